"""Anthropic's requests as chat requests, and what of their prompts is marked to be kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from octavo.errors import InvalidRequest
from octavo.server.anthropic.schemas import (
    AnyChoice,
    AssistantMessage,
    Block,
    CacheControl,
    Message,
    MessagesRequest,
    NoChoice,
    Prompt,
    SystemMessage,
    TextBlock,
    Tool,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
)
from octavo.server.openai import messages as chat
from octavo.server.openai import schemas as openai
from octavo.server.openai.translate import FORM, form_refused

_PARAMETERS = ".function.parameters"
MARK = "\ue000"
"""Not a character of any language; where it changes a rendered conversation, a marked block is."""


def chat_request(prompt: Prompt, mark: str = "") -> openai.ChatRequest:
    """`prompt` as a chat request; each block with a `cache_control` ends with `mark`.

    Messages of one role that follow each other become one, as Anthropic has it. Results of tools are messages of
    their own. Raises `InvalidRequest` where calls and results do not match.
    """
    fields: dict[str, Any] = {"messages": _chat_messages(prompt, mark)}
    if continues(prompt):
        fields |= {"continue_final_message": True}
    if prompt.tools:
        fields["tools"] = [_tool(tool, _mark(tool, mark)) for tool in prompt.tools]
    if prompt.output_config is not None and prompt.output_config.format is not None:
        schema = openai.JsonSchema(name="answer", schema=prompt.output_config.format.schema_)
        fields["response_format"] = openai.JsonSchemaFormat(type="json_schema", json_schema=schema)
    return openai.ChatRequest.model_construct(**fields, **_tool_choice(prompt), **_sampling(prompt))


@contextmanager
def blamed_on(prompt: Prompt) -> Iterator[None]:
    """What is refused of a chat request is refused by the name of the field of `prompt` that it came by."""
    try:
        yield
    except InvalidRequest as error:
        if error.param == FORM:
            raise form_refused(error, "tools" if prompt.tools else "output_config.format") from error
        if _PARAMETERS not in (error.param or ""):
            raise
        field, message = (
            text.replace(_PARAMETERS, ".input_schema") for text in (error.param or "", error.message)
        )
        raise InvalidRequest(message, param=field) from error


def _sampling(prompt: Prompt) -> dict[str, Any]:
    if not isinstance(prompt, MessagesRequest):
        return {}
    same = ("temperature", "top_p", "top_k", "seed", "priority", "cache_salt")
    return {
        **{name: getattr(prompt, name) for name in same},
        "max_tokens": max(1, prompt.max_tokens),
        "stop": prompt.stop_sequences,
    }


def _tool_choice(prompt: Prompt) -> dict[str, Any]:
    choice = prompt.tool_choice
    if choice is None:
        return {}
    if isinstance(choice, NoChoice):
        return {"tool_choice": "none"}
    fields: dict[str, Any] = {"tool_choice": "required" if isinstance(choice, AnyChoice) else "auto"}
    if isinstance(choice, ToolChoice):
        named = openai.FunctionName(name=choice.name)
        fields["tool_choice"] = openai.NamedToolChoice(type="function", function=named)
    return fields | {"parallel_tool_calls": not choice.disable_parallel_tool_use}


def _tool(tool: Tool, mark: str) -> openai.Tool:
    """Marked at the end of both that a template may write last."""
    function = openai.FunctionDefinition.model_construct(  # Anthropic's names may be longer
        name=tool.name,
        description=tool.description + mark or None,
        parameters={**tool.input_schema, mark: mark} if mark else tool.input_schema,
        strict=tool.strict,
    )
    return openai.Tool.model_construct(type="function", function=function)


def _chat_messages(prompt: Prompt, mark: str) -> list[chat.Message]:
    messages: list[chat.Message] = []
    if prompt.system:
        messages.append(chat.SystemMessage(role="system", content=_text(prompt.system, mark)))
    for message in _checked(prompt):
        for found in _split(message, mark):
            last = messages[-1] if messages else None
            if type(last) is type(found) and not isinstance(found, chat.ToolMessage):
                _join(last, found)
            else:
                messages.append(found)
    return messages


def continues(prompt: Prompt) -> bool:
    """Whether the answer goes on with the last message instead of following it."""
    return isinstance(_spoken(prompt)[-1], AssistantMessage)


def _spoken(prompt: Prompt) -> list[Message]:
    """The messages but for an empty beginning of the answer, which is none."""
    messages = prompt.messages
    while messages and isinstance(messages[-1], AssistantMessage) and not _any(messages[-1].content):
        messages = messages[:-1]
    if not messages:
        raise InvalidRequest("messages holds nothing to answer; add a user message", param="messages")
    return messages


def _any(blocks: Sequence[Block]) -> bool:
    return any(not isinstance(block, TextBlock) or block.text for block in blocks)


def _checked(prompt: Prompt) -> list[Message]:
    """The messages, in which each call has its result right after it, and each result its call."""
    messages = _spoken(prompt)
    open_calls: set[str] = set()
    for at, message in enumerate(messages):
        if isinstance(message, UserMessage):
            _check_results(at, message, open_calls)
        elif open_calls:
            raise _misplaced(at, f"comes before the tool_result for {min(open_calls)!r}; add it in between")
        open_calls |= {b.id for b in message.content if isinstance(b, ToolUseBlock)}
    last = len(messages) - 1
    if open_calls:
        raise _misplaced(
            last, f"is the last message, and the tool_result for {min(open_calls)!r} is missing; add it"
        )
    if continues(prompt) and (text := _text(messages[last].content)) != text.rstrip():
        raise _misplaced(last, "is the beginning of the answer and ends with white space; remove that")
    return messages


def _check_results(at: int, message: UserMessage, open_calls: set[str]) -> None:
    """Take the results in `message` off `open_calls`."""
    texts = False
    for block in message.content:
        if isinstance(block, TextBlock):
            texts = True
        elif texts:
            raise _misplaced(at, "has a text before a tool_result; put the results first")
        elif block.tool_use_id not in open_calls:
            raise _misplaced(
                at, f"has a tool_result for {block.tool_use_id!r}, which no tool_use before it names"
            )
        else:
            open_calls.remove(block.tool_use_id)


def _misplaced(at: int, what: str) -> InvalidRequest:
    return InvalidRequest(f"messages[{at}] {what}", param=f"messages[{at}].content")


def keep_for(prompt: Prompt) -> float | None:
    """For how many seconds the marked part is to be kept: the longest that is asked for. None if nothing is marked."""
    return max((control.seconds for control in _controls(prompt)), default=None)


def marked_length(text: str, marked: str) -> int:
    """Characters of `text` up to the end of its last marked block.

    `marked` is the same conversation with `MARK` at the end of every marked block.
    """
    same = 0
    longest = min(len(text), len(marked))
    while same < longest and text[-1 - same] == marked[-1 - same]:
        same += 1
    return len(text) - same if len(text) != len(marked) else 0


def tokens_within(length: int, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> int:
    """How many of `token_ids` lie within the first `length` characters of what they spell."""
    low, high = 0, len(token_ids)
    while low < high:
        middle = (low + high + 1) // 2
        if len(decode(token_ids[:middle])) <= length:
            low = middle
        else:
            high = middle - 1
    return low


def _controls(prompt: Prompt) -> Iterator[CacheControl]:
    blocks: list[Block] = [*prompt.system, *prompt.tools]
    for message in prompt.messages:
        for block in message.content:
            blocks.append(block)
            if isinstance(block, ToolResultBlock):
                blocks.extend(block.content)
    if prompt.cache_control is not None:
        yield prompt.cache_control
    yield from (block.cache_control for block in blocks if block.cache_control is not None)


def _text(blocks: Sequence[Block], mark: str = "") -> str:
    """The texts among `blocks`, one below the other."""
    return "\n".join(b.text + _mark(b, mark) for b in blocks if isinstance(b, TextBlock))


def _mark(block: Block, mark: str) -> str:
    return "" if block.cache_control is None else mark


def _split(message: Message, mark: str) -> Iterator[chat.Message]:
    """`message` as one message or, where tools have returned something, several."""
    text = _text(message.content, mark)
    if isinstance(message, SystemMessage):
        yield chat.SystemMessage(role="system", content=text)
    elif isinstance(message, AssistantMessage):
        calls = [_call(b, mark) for b in message.content if isinstance(b, ToolUseBlock)]
        yield chat.AssistantMessage(role="assistant", content=text, tool_calls=calls or None)
    else:
        results = [b for b in message.content if isinstance(b, ToolResultBlock)]
        for result in results:
            content = (
                ("Error: " if result.is_error else "") + _text(result.content, mark) + _mark(result, mark)
            )
            yield chat.ToolMessage(role="tool", tool_call_id=result.tool_use_id, content=content)
        if text or not results:
            yield chat.UserMessage(role="user", content=text)


def _call(block: ToolUseBlock, mark: str) -> chat.ToolCall:
    arguments = {**block.input, mark: mark} if _mark(block, mark) else block.input
    function = chat.CalledFunction(name=block.name, arguments=json.dumps(arguments))
    return chat.ToolCall(id=block.id, function=function)


def _join(message: Any, more: Any) -> None:
    """Make `more`, of the same role, part of `message`."""
    message.content = "\n".join(content for content in (message.content, more.content) if content)
    if isinstance(more, chat.AssistantMessage) and more.tool_calls:
        message.tool_calls = [*(message.tool_calls or []), *more.tool_calls]
