"""What OpenAI's endpoints take. Every field is honoured; what is not known, or known and not supported, is refused.

Names are OpenAI's, and vLLM's for what OpenAI does not have. A null is the same as leaving the field out. Ranges that
`SamplingParams` checks are not repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, Tag, model_validator

from octavo.errors import InvalidRequest, show
from octavo.server.openai.messages import Message
from octavo.server.strict import Strict, by_key, by_type, one_of

MAX_CHOICES = 128
MAX_PROMPTS = 1024
MAX_LOGPROBS = 20
MAX_STRINGS = 64
"""Stop strings and bad words: each is looked for at every step."""

_UNSUPPORTED = {
    "audio": "audio output is not supported; leave it out",
    "function_call": "it is replaced by tool_choice",
    "functions": "they are replaced by tools",
    "metadata": "nothing is stored that it could be kept with; leave it out",
    "prediction": "predicted outputs are not supported; leave it out",
    "suffix": "inserting text is not supported; leave it out",
    "use_beam_search": "beam search is not supported; leave it out",
    "verbosity": "it is not supported; leave it out",
    "web_search_options": "web search is not supported; leave it out",
}


class StreamOptions(Strict):
    """`include_usage`: one more chunk at the end, without choices, with usage and receipt. With
    `continuous_usage_stats` (vLLM's) all others have the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] | None = None

    @model_validator(mode="after")
    def _check(self) -> StreamOptions:
        if self.continuous_usage_stats and not self.include_usage:
            raise ValueError("continuous_usage_stats needs include_usage: true")
        return self


class JsonSchema(Strict):
    """A JSON schema that an answer must match; it is enforced whether or not it is `strict`."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Strict):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    one_of(by_key("type"), "its type must be text, json_object or json_schema"),
]


class StructuredOutputs(Strict):
    """vLLM's way to say what an answer must be; exactly one of these. `grammar` is Lark."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


Strings = Annotated[list[str], Field(fail_fast=True, max_length=MAX_STRINGS)]
Stop = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[Strings, Tag("<list>")],
    one_of(by_type, "must be a string or a list of strings"),
]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class Generation(Strict):
    """What both endpoints take."""

    model: str | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Stop | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    bad_words: Strings | None = None
    allowed_token_ids: TokenIds | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token id, as a string, to what is added.")
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    cache_ttl: float | None = Field(
        None, description="Seconds for which the blocks stay pinned after the answer."
    )
    exact: bool | None = None
    context_policy: Literal["window"] | None = None
    sinks: int | None = None
    window: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: str | None = Field(None, description="Written to the log.", max_length=512)
    prompt_cache_key: str | None = Field(
        None, description="Names the request in /cache, in the dashboard and in the log.", max_length=512
    )

    @model_validator(mode="before")
    @classmethod
    def _say_what_is_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        for name, reason in _UNSUPPORTED.items():
            if data.get(name) is not None and name not in cls.model_fields:
                raise InvalidRequest(f"{name}: {reason}", param=name)
        return {
            key: value
            for key, value in data.items()
            if key not in _UNSUPPORTED or key in cls.model_fields or value is not None
        }

    @model_validator(mode="after")
    def _check_stream(self) -> Generation:
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream=true; leave it out", param="stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest(
                "prompt_logprobs does not work with stream=true; leave one of them out",
                param="prompt_logprobs",
            )
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with usage and receipt."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_on(self) -> bool:
        """Whether every chunk says what the usage is so far."""
        options = self.stream_options
        return options is not None and options.continuous_usage_stats


class FunctionDefinition(Strict):
    """A function; `parameters` is the JSON schema of its arguments, an object."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Something that may be called."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Strict):
    """The function to call."""

    name: str


class NamedToolChoice(Strict):
    """This function must be called."""

    type: Literal["function"]
    function: FunctionName


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<str>")] | Annotated[NamedToolChoice, Tag("<dict>")],
    one_of(by_type, "must be none, auto, required, or the function to call"),
]


class ChatRequest(Generation):
    """`/v1/chat/completions`."""

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = Field(
        None, description="For models whose chat template knows it.", max_length=64
    )
    modalities: list[Literal["text"]] | None = None
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    safety_identifier: str | None = Field(None, description="The same as user.", max_length=512)

    @model_validator(mode="after")
    def _check_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true", param="top_logprobs")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise InvalidRequest(
                f"max_tokens={show(self.max_tokens)} and max_completion_tokens={show(self.max_completion_tokens)} "
                "differ; leave max_tokens out",
                param="max_tokens",
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other; leave one of them out",
                param="add_generation_prompt",
            )
        return self


Ids = Annotated[list[int], Field(fail_fast=True, min_length=1)]


def _prompt(value: Any) -> str:
    return by_type(value) + (by_type(value[0]) if isinstance(value, list) and value else "")


Prompt = Annotated[
    Annotated[str, Tag("<str>")]
    | Annotated[list[str], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("<list><str>")]
    | Annotated[Ids, Tag("<list><int>")]
    | Annotated[list[Ids], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("<list><list>")],
    one_of(_prompt, "must be a string, a list of token ids, or a list of these, and not empty"),
]


class CompletionRequest(Generation):
    """`/v1/completions`."""

    prompt: Prompt
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _check_together(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequest(
                f"best_of={show(self.best_of)} other than n={self.n or 1} is not supported; leave it out",
                param="best_of",
            )
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens=0 only works with echo=true; max_tokens=1 works", param="max_tokens"
            )
        return self
