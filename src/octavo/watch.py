"""What those who look on get to know: exact counts, and every latency as it happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.live import LiveRequest


@dataclass(frozen=True)
class EngineTotals:
    """Counts since the engine began, and the requests it has now. Between two steps

        started = finished + cancelled + rejected + running + waiting

    holds, in requests, whatever their `n`: `rejected` were refused at the door (too long, impossible, overload),
    `finished` ended by themselves (reasons `stop`, `length` and, where nothing was left to sample, `error`; of
    several choices the gravest), `cancelled` were aborted, `running` have a sequence that runs.

    Tokens: of `prompt_tokens` admitted so far `queried_tokens` were looked for in the cache and `reused_tokens` found,
    `computed_tokens` were left to compute; `recomputed_tokens` are positions computed again after a preemption;
    `dropped_positions` were dropped by `context_policy`. `reclaimed_blocks` counts by reason, `folded_blocks` by the
    format that cached blocks were folded to.
    """

    started: int
    finished: dict[str, int]
    cancelled: int
    rejected: int
    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    queried_tokens: int
    reused_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    dropped_positions: int
    written_blocks: int
    reclaimed_blocks: dict[str, int]
    folded_blocks: dict[str, int]
    preemptions: int
    steps: int


@dataclass(frozen=True)
class Timing:
    """When things happened to a request, in seconds of `time.monotonic`; None for what has not happened.

    `arrived` is before its prompt was encoded, `admitted` when it first began to run, `last_token` the latest token of
    any choice, `ended` when its last choice ended or it was aborted.
    """

    arrived: float
    admitted: float | None
    first_token: float | None
    last_token: float | None
    ended: float | None


@dataclass(frozen=True)
class Health:
    """Is there work, and does it go on? `steps` were computed so far; `seconds_since_progress` have passed since the
    last of them ended or, if that is later, since work appeared where there was none. `failed` says why the engine
    has ended."""

    steps: int
    seconds_since_progress: float
    has_work: bool
    failed: str | None


class Observer:
    """Told by the engine, in the engine's thread, so its methods must be quick and must not raise. This one ignores
    everything."""

    def first_token(self, live: LiveRequest) -> None:
        """`live` has its first token."""

    def token_gaps(self, seconds: Sequence[float]) -> None:
        """A step gave a token to answers that had one before; so long ago each."""

    def ended(self, live: LiveRequest, reason: str) -> None:
        """`live` is over: `stop`, `length`, `error` or `abort`. Its receipt and timing are complete."""
