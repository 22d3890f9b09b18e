"""OpenAI's requests in Octavo's words: sampling parameters, messages for the chat template, jobs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.errors import InvalidRequest, show
from octavo.model.tokenizer import Tokenizer
from octavo.params import SamplingParams
from octavo.server.openai.logprobs import special_tokens
from octavo.server.openai.messages import (
    AssistantMessage,
    Content,
    Message,
    SystemMessage,
    TextPart,
    ToolMessage,
)
from octavo.server.openai.schemas import (
    ChatRequest,
    Generation,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedToolChoice,
    ResponseFormat,
    Tool,
)
from octavo.server.openai.tools import (
    HERMES,
    CallForm,
    Function,
    Mode,
    Rules,
    form_of,
    grammar,
    instructions,
    spell_calls,
)
from octavo.structured import StructuredOutputs

_SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "min_tokens",
    "stop",
    "include_stop_str_in_output",
    "stop_token_ids",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "prompt_logprobs",
    "skip_special_tokens",
    "priority",
    "cache_salt",
    "cache_ttl",
    "exact",
    "context_policy",
    "sinks",
    "window",
)
FORM = "structured_outputs"
_ANY_OBJECT = {"type": "object"}
_RENDERING = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""What is no variable of a template, or has a field of its own."""


def sampling_params(body: Generation, **own: Any) -> SamplingParams:
    """The parameters of `body`; `own` are those whose names or meanings differ. Raises `InvalidRequest`."""
    same = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    return SamplingParams(**{**same, "logit_bias": _logit_bias(body.logit_bias), **own})


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if given is None:
        return None
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 20):
            raise InvalidRequest(
                f"logit_bias has the key {show(token)}, which is no token id; keys are ids as strings",
                param="logit_bias",
            )
    return {int(token): bias for token, bias in given.items()}


def structured(body: Generation) -> StructuredOutputs | None:
    """What the answer must be, None if anything. Raises `InvalidRequest` if that is said twice."""
    wanted = _format(body.response_format)
    if body.structured_outputs is None:
        return wanted
    if wanted is not None:
        raise InvalidRequest(
            "structured_outputs and response_format exclude each other; leave one of them out",
            param="structured_outputs",
        )
    named = body.structured_outputs
    return StructuredOutputs(
        json_schema=named.json_,
        json_object=named.json_object is True,
        regex=named.regex,
        choice=named.choice,
        grammar=named.grammar,
    )


def _format(wanted: ResponseFormat | None) -> StructuredOutputs | None:
    schema = text_schema(wanted)
    if schema is None:
        return None
    if isinstance(wanted, JsonObjectFormat):
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json_schema=dict(schema))


def text_schema(wanted: ResponseFormat | None) -> Mapping[str, Any] | None:
    """The JSON schema that text must match, None if it is free."""
    if isinstance(wanted, JsonSchemaFormat):
        return wanted.json_schema.schema_ if wanted.json_schema.schema_ is not None else _ANY_OBJECT
    return _ANY_OBJECT if isinstance(wanted, JsonObjectFormat) else None


@contextmanager
def blamed_on(body: Generation) -> Iterator[None]:
    """A form that is refused where it is compiled is refused by the name of the field that it came by."""
    try:
        yield
    except InvalidRequest as error:
        if error.param != FORM or body.structured_outputs is not None:
            raise
        field = "tools" if isinstance(body, ChatRequest) and body.tools else "response_format"
        raise form_refused(error, field) from error


def form_refused(error: InvalidRequest, field: str) -> InvalidRequest:
    """`error`, which names `FORM`, about the `field` of a request that the form came by."""
    return InvalidRequest(f"{field}: {error.message.removeprefix(FORM).lstrip(' :')}", param=field)


class Conversation:
    """A chat request as its model's template wants it.

    `form` is how calls are written, None if there are no tools; `reads_calls` says whether they may come.
    """

    def __init__(self, body: ChatRequest, tokenizer: Tokenizer) -> None:
        self._body = body
        self._tokenizer = tokenizer
        self._template = _template_text(tokenizer, with_tools=bool(body.tools))
        known = form_of(self._template)
        self._native = known is not None
        self._mode, self._functions = _tool_choice(body)
        self.form: CallForm | None = (known or HERMES) if body.tools else None
        self.reads_calls = self.form is not None and self._mode != "none"
        self._called = {
            call.id: call.function.name
            for message in body.messages
            if isinstance(message, AssistantMessage)
            for call in message.tool_calls or ()
        }

    def messages(self) -> list[dict[str, Any]]:
        """The messages for the template."""
        messages = [self._plain(message) for message in self._body.messages]
        if not self._native:
            messages = _without_tool_roles(messages)
            if self._body.tools:
                messages = _instructed(messages, instructions(_dumped(self._body.tools)))
        return messages

    def options(self) -> dict[str, Any]:
        """Variables for the template. Raises `InvalidRequest` for one that it does not know."""
        body = self._body
        variables = dict(body.chat_template_kwargs or {})
        for name in variables:
            if name in _RENDERING:
                raise InvalidRequest(
                    f"chat_template_kwargs: {name} is not set there; use the field of its own where there is one",
                    param="chat_template_kwargs",
                )
            self._must_know(name, f"chat_template_kwargs.{name}")
        if body.reasoning_effort is not None:
            self._must_know("reasoning_effort", "reasoning_effort")
            variables["reasoning_effort"] = body.reasoning_effort
        if body.tools and self._native:
            variables["tools"] = _dumped(body.tools)
        for name in ("add_generation_prompt", "continue_final_message"):
            if getattr(body, name) is not None:
                variables[name] = getattr(body, name)
        return variables

    def params(self) -> SamplingParams:
        """The parameters of the answer. Raises `InvalidRequest`."""
        body = self._body
        limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
        own: dict[str, Any] = {
            "max_tokens": limit,
            "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "structured_outputs": self._structured(),
        }
        if self.form is not None and body.skip_special_tokens is None:
            special = special_tokens(self._tokenizer)
            own["skip_special_tokens"] = not any(token in self.form.opening for token in special)
        return sampling_params(body, **own)

    def _structured(self) -> StructuredOutputs | None:
        body = self._body
        if self.form is None:
            return structured(body)
        if body.structured_outputs is not None:
            raise InvalidRequest(
                "structured_outputs does not work with tools; use response_format, or leave tools out",
                param="structured_outputs",
            )
        schema = text_schema(body.response_format)
        if self._mode == "none" and schema is not None:
            return structured(body)
        named = isinstance(body.tool_choice, NamedToolChoice)
        rules = Rules(self._mode, body.parallel_tool_calls is not False and not named, schema)
        return StructuredOutputs(
            grammar=grammar(self.form, self._functions, rules, special_tokens(self._tokenizer))
        )

    def _must_know(self, name: str, param: str) -> None:
        if self._template is not None and name not in self._template:
            raise InvalidRequest(
                f"{param}: the chat template of this model does not know {show(name)}; leave it out",
                param=param,
            )

    def _plain(self, message: Message) -> dict[str, Any]:
        plain: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
        if message.name is not None:
            plain["name"] = message.name
        if isinstance(message, SystemMessage) and "developer" not in (self._template or ""):
            plain["role"] = "system"
        if isinstance(message, AssistantMessage):
            if message.content is None and message.refusal is not None:
                plain["content"] = message.refusal
            if message.tool_calls:
                plain["tool_calls"] = [
                    {
                        "id": call.id,
                        "type": call.type,
                        "function": {
                            "name": call.function.name,
                            "arguments": _arguments(call.function.arguments),
                        },
                    }
                    for call in message.tool_calls
                ]
        if isinstance(message, ToolMessage):
            plain["tool_call_id"] = message.tool_call_id
            plain.setdefault("name", self._called.get(message.tool_call_id))
        return plain


def _tool_choice(body: ChatRequest) -> tuple[Mode, list[Function]]:
    """Whether there must be calls, and of which functions. Raises `InvalidRequest`."""
    if not body.tools:
        for name in ("tool_choice", "parallel_tool_calls"):
            if getattr(body, name) not in (None, "none", "auto", True):
                raise InvalidRequest(f"{name} needs tools; leave it out", param=name)
        return "none", []
    functions = [
        Function(tool.function.name, tool.function.parameters, tool.function.strict is True)
        for tool in body.tools
    ]
    names = [function.name for function in functions]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest(f"tools has two functions named {show(twice)}; rename one", param="tools")
    choice = body.tool_choice
    if choice is None or isinstance(choice, str):
        return choice or "auto", functions
    wanted = [function for function in functions if function.name == choice.function.name]
    if not wanted:
        raise InvalidRequest(
            f"tool_choice names {show(choice.function.name)}, which is none of tools: {', '.join(names)}",
            param="tool_choice",
        )
    return "required", wanted


def _template_text(tokenizer: Tokenizer, *, with_tools: bool) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        named: str | None = template.get("tool_use") if with_tools else None
        return named or template.get("default")
    return template


def _dumped(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    return [tool.model_dump(exclude_none=True) for tool in tools]


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)


def _arguments(text: str) -> Any:
    """An object as templates take it; what is none (a call that was cut off) stays text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _without_tool_roles(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """For a template that knows nothing of calls: they and their results as text."""
    plain: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        if message["role"] == "tool":
            result = f"<tool_response>\n{message['content']}\n</tool_response>"
            if follows_result:
                plain[-1]["content"] += f"\n{result}"
            else:
                plain.append({"role": "user", "content": result})
        elif "tool_calls" in message:
            said = [message["content"]] if message["content"] else []
            spelled = "\n".join([*said, spell_calls(message["tool_calls"])])
            rest = {k: v for k, v in message.items() if k != "tool_calls"}
            plain.append({**rest, "content": spelled})
        else:
            plain.append(message)
        follows_result = message["role"] == "tool"
    return plain


def _instructed(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """`messages` with `text` at the end of the system message, which is made if there is none."""
    if messages[0]["role"] in ("system", "developer"):
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
