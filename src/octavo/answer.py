"""One answer as it grows: tokens in, text and log-probs out, and the reason it ends."""

from __future__ import annotations

from collections.abc import Callable

from octavo.detokenize import Decoder, IncrementalDetokenizer
from octavo.outputs import CompletionOutput, FinishReason, Logprob
from octavo.params import SamplingParams
from octavo.sample import Choice, Sampled, TopEntry
from octavo.stop import StopChecker


def logprob_dict(entries: tuple[TopEntry, ...], text: Callable[[int], str]) -> dict[int, Logprob]:
    """Token id → `Logprob` for the entries of one position."""
    return {token: Logprob(logprob, rank, text(token)) for token, logprob, rank in entries}


class Answer:
    """Turns the sampled tokens of one sequence into a `CompletionOutput`.

    `limit` is the most tokens of the whole sequence. `decoder` is None for a model without tokenizer: the text is
    then empty. `last_token` is when it got its latest token, in seconds.
    """

    def __init__(
        self,
        choice: Choice,
        *,
        limit: int,
        eos_token_ids: frozenset[int],
        decoder: Decoder | None,
        fallback_byte: int | None,
        token_text: Callable[[int], str],
    ) -> None:
        self.choice = choice
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.last_token: float | None = None
        self._limit = limit
        self._eos = eos_token_ids
        self._token_text = token_text
        params = choice.params
        self._detokenizer = (
            None
            if decoder is None
            else IncrementalDetokenizer(decoder, params.skip_special_tokens, fallback_byte)
        )
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)
        self._stop_reason: int | str | None = None
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0

    @property
    def params(self) -> SamplingParams:
        """What was asked for."""
        return self.choice.params

    def push(self, sampled: Sampled) -> FinishReason | None:
        """Take the token that was just appended to the sequence; returns why the answer ends, if it does."""
        params, token = self.params, sampled.token_id
        self._cumulative += sampled.logprob
        if params.logprobs is not None:
            self._logprobs.append(logprob_dict(sampled.top, self._token_text))
        is_end = token in self._eos and not params.ignore_eos
        is_stop = token in params.stop_token_ids
        if not (is_end or is_stop) or params.include_stop_str_in_output:
            self._read(self._detokenizer.push(token) if self._detokenizer else "")
        if self._stop.matched is not None:
            return self._end("stop", self._stop.matched)
        if is_end or is_stop:
            return self._end("stop", token if is_stop else None)
        if self.choice.complete and self.choice.new_tokens >= params.min_tokens:
            return self._end("stop", None)
        if self._is_full():
            return self._end("length", None)
        return None

    def output(self, index: int) -> CompletionOutput:
        """The answer so far."""
        params = self.params
        return CompletionOutput(
            index=index,
            text=self.text,
            token_ids=self.choice.token_ids[self.choice.prompt_len :],
            logprobs=None if params.logprobs is None else list(self._logprobs),
            cumulative_logprob=self._cumulative,
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
        )

    def abort(self) -> None:
        """End without the rest of the text."""
        if self.finish_reason is None:
            self.finish_reason = "abort"

    def _is_full(self) -> bool:
        max_tokens = self.params.max_tokens
        full = max_tokens is not None and self.choice.new_tokens >= max_tokens
        return full or len(self.choice.token_ids) >= self._limit

    def _read(self, delta: str) -> None:
        released, _ = self._stop.push(delta, armed=self.choice.new_tokens > self.params.min_tokens)
        self.text += released

    def _end(self, reason: FinishReason, stop_reason: int | str | None) -> FinishReason:
        if self._stop.matched is None:
            self._read(self._detokenizer.flush() if self._detokenizer else "")
        if self._stop.matched is None:
            self.text += self._stop.flush()
        else:
            reason, stop_reason = "stop", self._stop.matched
        self.finish_reason, self._stop_reason = reason, stop_reason
        return reason
