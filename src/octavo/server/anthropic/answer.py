"""An answer of the engine as Anthropic's message, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence

from octavo.cache.receipt import Receipt
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.anthropic.content import AnswerEvent, Content, Reader
from octavo.server.anthropic.schemas import (
    CacheCreation,
    MessagesRequest,
    MessagesResponse,
    StopReason,
    Usage,
)
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
        return self._message(output, answer)

    def changes(self, deltas: Sequence[Delta], output: RequestOutput) -> Iterator[AnswerEvent]:
        """The events that tell of `deltas`; `output` is the snapshot they lead to."""
        [answer] = output.outputs
        if not self._begun:
            self._begun = True
            message = self._message(output, None).model_dump(exclude={"octavo"})
            yield {"type": "message_start", "message": message}
            yield {"type": "ping"}
        yield from self._grown("".join(delta.text for delta in deltas), finished=output.finished)
        if output.finished:
            message = self._message(output, answer).model_dump()
            delta = {name: message[name] for name in ("stop_reason", "stop_sequence")}
            yield {
                "type": "message_delta",
                "delta": delta,
                "usage": message["usage"],
                "octavo": message["octavo"],
            }
            yield {"type": "message_stop"}

    def _grown(self, text: str, *, finished: bool) -> Iterator[AnswerEvent]:
        if self._request.max_tokens:
            yield from self._content.feed(text)
            if finished:
                yield from self._content.finish()

    def _message(self, output: RequestOutput, answer: CompletionOutput | None) -> MessagesResponse:
        """The message so far; `answer` is what it came to, once it is complete."""
        assert output.receipt is not None
        tokens = len(output.outputs[0].token_ids) if self._request.max_tokens else 0
        return MessagesResponse(
            id=self._id,
            model=self._model,
            content=self._content.blocks,
            stop_reason=None if answer is None else self._stop_reason(answer),
            stop_sequence=None if answer is None else _stop_sequence(answer),
            usage=_usage(output.receipt, tokens),
            octavo=receipt_body(output.receipt),
        )

    def _stop_reason(self, answer: CompletionOutput) -> StopReason:
        if answer.finish_reason == "length":
            full = len(answer.token_ids) >= self._request.max_tokens
            return "max_tokens" if full else "model_context_window_exceeded"
        if _stop_sequence(answer) is not None:
            return "stop_sequence"
        return "tool_use" if self._content.calls else "end_turn"


def _stop_sequence(answer: CompletionOutput) -> str | None:
    return answer.stop_reason if isinstance(answer.stop_reason, str) else None


def _usage(receipt: Receipt, output_tokens: int) -> Usage:
    """Read is what was found in the cache; created, what was not and is kept because it was marked."""
    read = receipt.reused_tokens
    created = {300.0: 0, 3600.0: 0}
    for pinned in receipt.pinned:
        created[pinned.ttl_s] = max(0, pinned.tokens - read)
    return Usage(
        input_tokens=receipt.prompt_tokens - read - sum(created.values()),
        cache_read_input_tokens=read,
        cache_creation_input_tokens=sum(created.values()),
        cache_creation=CacheCreation(
            ephemeral_5m_input_tokens=created[300.0], ephemeral_1h_input_tokens=created[3600.0]
        ),
        output_tokens=output_tokens,
    )
