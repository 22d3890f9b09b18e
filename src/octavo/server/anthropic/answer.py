"""An answer of the engine as Anthropic's message, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.anthropic.content import Content, Reader
from octavo.server.anthropic.responses import (
    MessageBegun,
    MessageEvent,
    MessagesResponse,
    StopReason,
    usage_of,
)
from octavo.server.anthropic.schemas import MessagesRequest
from octavo.server.generation import Delta
from octavo.server.openai.responses import receipt_body


class Answer:
    """The answer to `request`; `reader` finds the calls in its text. Good for one answer, whole or in pieces."""

    def __init__(self, model: str, request: MessagesRequest, reader: Reader) -> None:
        self._model = model
        self._request = request
        self._content = Content(reader)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._begun = False

    def whole(self, output: RequestOutput) -> MessagesResponse:
        """The message of a finished request."""
        [answer] = output.outputs
        for _ in self._grown(answer.text, finished=True):
            pass
        assert output.receipt is not None
        return {**self._message(output, answer), "octavo": receipt_body(output.receipt)}

    def changes(self, deltas: Sequence[Delta], output: RequestOutput) -> Iterator[MessageEvent]:
        """The events that tell of `deltas`; `output` is the snapshot they lead to."""
        [answer] = output.outputs
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": self._message(output, None)}
            yield {"type": "ping"}
        yield from self._grown("".join(delta.text for delta in deltas), finished=output.finished)
        if output.finished:
            assert output.receipt is not None
            yield {
                "type": "message_delta",
                "delta": {
                    "stop_reason": self._stop_reason(answer),
                    "stop_sequence": _stop_sequence(answer),
                },
                "usage": usage_of(output.receipt, self._tokens(output)),
                "octavo": receipt_body(output.receipt),
            }
            yield {"type": "message_stop"}

    def _grown(self, text: str, *, finished: bool) -> Iterator[MessageEvent]:
        if self._request.max_tokens:
            yield from self._content.feed(text)
            if finished:
                yield from self._content.finish()

    def _message(self, output: RequestOutput, answer: CompletionOutput | None) -> MessageBegun:
        """The message so far; `answer` is what it came to, once it is complete."""
        assert output.receipt is not None
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": self._content.blocks,
            "stop_reason": None if answer is None else self._stop_reason(answer),
            "stop_sequence": None if answer is None else _stop_sequence(answer),
            "usage": usage_of(output.receipt, self._tokens(output)),
        }

    def _tokens(self, output: RequestOutput) -> int:
        return len(output.outputs[0].token_ids) if self._request.max_tokens else 0

    def _stop_reason(self, answer: CompletionOutput) -> StopReason:
        if answer.finish_reason == "length":
            full = len(answer.token_ids) >= self._request.max_tokens
            return "max_tokens" if full else "model_context_window_exceeded"
        if _stop_sequence(answer) is not None:
            return "stop_sequence"
        return "tool_use" if self._content.calls else "end_turn"


def _stop_sequence(answer: CompletionOutput) -> str | None:
    return answer.stop_reason if isinstance(answer.stop_reason, str) else None
