"""A chat answer in OpenAI's form, whole or as it grows: both are made of the same events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.errors import RequestCancelled
from octavo.outputs import FinishReason, RequestOutput
from octavo.server.generation import Delta, deltas_of
from octavo.server.openai.calls import CallArguments, CallBegins, CallReader, Event, Text
from octavo.server.openai.logprobs import TokenBytes, chat_logprobs
from octavo.server.openai.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatFinish,
    ChatMessage,
    ChoiceLogprobs,
    Counted,
    Head,
    ToolCallBody,
    receipt_body,
    scored,
    usage_of,
)
from octavo.server.openai.tools import CallForm


@dataclass(frozen=True)
class Shape:
    """What was asked for. `head` are the fields that every response begins with, `form` that of calls that may come,
    `top` the log-probs per token, None for none."""

    head: Head
    form: CallForm | None
    top: int | None
    tokens: TokenBytes


class Reply:
    """One chat answer with all its choices."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._choices: defaultdict[int, _Choice] = defaultdict(lambda: _Choice(shape.form))

    def whole(self, output: RequestOutput) -> ChatCompletion:
        """The response for a finished request."""
        assert output.receipt is not None
        return {
            **self._shape.head,
            "object": "chat.completion",
            "choices": [self._choice(delta) for delta in deltas_of(output)],
            "usage": usage_of([output.receipt]),
            **scored(output),
            "octavo": receipt_body(output.receipt),
        }

    def chunks(self, new: Sequence[Delta], later: Counted) -> list[ChatChunk]:
        """The events for what is new; `later` is what each of them says of usage."""
        return [
            {**self._shape.head, "object": "chat.completion.chunk", "choices": [choice], **later}
            for delta in new
            for choice in self._chunk_choices(delta)
        ]

    def usage(self, output: RequestOutput) -> ChatChunk:
        """The last event: usage and receipt."""
        assert output.receipt is not None
        return {
            **self._shape.head,
            "object": "chat.completion.chunk",
            "choices": [],
            "usage": usage_of([output.receipt]),
            "octavo": receipt_body(output.receipt),
        }

    def _choice(self, delta: Delta) -> ChatChoice:
        choice = self._choices[delta.index]
        text = ""
        calls: list[ToolCallBody] = []
        for event in choice.read(delta):
            if isinstance(event, Text):
                text += event.text
            elif isinstance(event, CallBegins):
                calls.append(
                    {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
                )
            else:
                calls[event.index]["function"]["arguments"] += event.text
        message: ChatMessage = {
            "role": "assistant",
            "content": text or (None if calls else ""),
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        return {
            "index": delta.index,
            "message": message,
            "logprobs": self._logprobs(delta),
            "finish_reason": choice.finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
        }

    def _chunk_choices(self, delta: Delta) -> list[ChatChunkChoice]:
        first = delta.index not in self._choices
        choice = self._choices[delta.index]
        changes: list[ChatDelta] = [{"role": "assistant", "content": ""}] if first else []
        changes += map(_change, choice.read(delta))
        logprobs = self._logprobs(delta) if delta.token_ids else None
        if logprobs is not None and len(changes) == first:
            changes.append({"content": ""})
        found: list[ChatChunkChoice] = [
            {
                "index": delta.index,
                "delta": change,
                "logprobs": logprobs if at == first else None,  # with what they belong to, and once
                "finish_reason": None,
            }
            for at, change in enumerate(changes)
        ]
        if delta.finish_reason is not None:
            found.append(
                {
                    "index": delta.index,
                    "delta": {},
                    "logprobs": None,
                    "finish_reason": choice.finish_reason(delta.finish_reason),
                    "stop_reason": delta.stop_reason,
                }
            )
        return found

    def _logprobs(self, delta: Delta) -> ChoiceLogprobs | None:
        if self._shape.top is None or delta.logprobs is None:
            return None
        return chat_logprobs(delta.logprobs, delta.token_ids, self._shape.top, self._shape.tokens)


class _Choice:
    """One answer as it is read."""

    def __init__(self, form: CallForm | None) -> None:
        self._reader = None if form is None else CallReader(form)
        self._called = False

    def read(self, delta: Delta) -> list[Event]:
        """What `delta` says."""
        if self._reader is None:
            return [Text(delta.text)] if delta.text else []
        events = self._reader.feed(delta.text)
        if delta.finish_reason is not None:
            events += self._reader.finish()
        self._called |= any(isinstance(event, CallBegins) for event in events)
        return events

    def finish_reason(self, reason: FinishReason | None) -> ChatFinish:
        """Why it ended, as OpenAI says it."""
        if reason is None or reason == "abort":
            raise RequestCancelled("the answer was ended by the server")
        return "tool_calls" if reason == "stop" and self._called else reason


def _change(event: Event) -> ChatDelta:
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, CallArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {
        "tool_calls": [
            {
                "index": event.index,
                "id": event.id,
                "type": "function",
                "function": {"name": event.name, "arguments": ""},
            }
        ]
    }
