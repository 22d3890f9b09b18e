"""A request on its way through the engine."""

from __future__ import annotations

from octavo.answer import Answer
from octavo.errors import OctavoError
from octavo.grammar import Grammar
from octavo.outputs import PromptLogprobs, RequestOutput
from octavo.params import SamplingParams
from octavo.schedule.request import Request
from octavo.watch import Timing


class LiveRequest:
    """A request between `prepare` and its last output. `arrived` is a time of `time.monotonic`."""

    def __init__(self, request: Request, prompt: str | None, params: SamplingParams, arrived: float) -> None:
        self.request = request
        self.prompt = prompt
        self.params = params
        self.answers: list[Answer] = []
        self.bad_words: tuple[tuple[int, ...], ...] = ()
        self.grammar: Grammar | None = None
        self.error: OctavoError | None = None
        self.arrived = arrived
        self.first_token: float | None = None
        self.last_token: float | None = None
        self.ended: float | None = None
        self.prompt_logprobs: PromptLogprobs | None = (
            None if params.prompt_logprobs is None else [None] * len(request.prompt_token_ids)
        )
        self._prompt_token_ids = list(request.prompt_token_ids)  # all snapshots share it

    @property
    def finished(self) -> bool:
        """Whether nothing more will come."""
        return self.error is not None or self.request.finished

    @property
    def timing(self) -> Timing:
        """When things happened so far."""
        admitted = self.request.admitted_at
        return Timing(self.arrived, admitted, self.first_token, self.last_token, self.ended)

    def output(self) -> RequestOutput:
        """A snapshot that later steps do not change (but for the receipt, which is complete when it is finished)."""
        return RequestOutput(
            request_id=self.request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(),
            outputs=[answer.output(i) for i, answer in enumerate(self.answers)],
            finished=self.finished,
            receipt=self.request.receipt,
            timing=self.timing,
        )

    def _prompt_logprobs(self) -> PromptLogprobs | None:
        """A copy while some are still to come, the list itself after that."""
        found = self.prompt_logprobs
        return found if found is None or self.answers else list(found)
