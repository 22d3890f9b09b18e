"""The plan of an engine that has just started: what it takes, and what it can hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from octavo.cache.layout import CacheLayout
from octavo.config import format_bytes
from octavo.ram import resident_bytes

if TYPE_CHECKING:
    from octavo.engine import Engine


@dataclass(frozen=True)
class StartPlan:
    """Bytes by use, and the limits that follow. `limit` is the longest sequence, prompt and answer together.

    `process_bytes` is what the process holds besides weights, scratch and cache.
    """

    weights_bytes: int
    scratch_bytes: int
    process_bytes: int
    cache_bytes: int
    layout: CacheLayout
    limit: int
    max_num_seqs: int

    @property
    def whole_bytes(self) -> int:
        """What the process will hold when its cache is full."""
        return self.weights_bytes + self.scratch_bytes + self.process_bytes + self.cache_bytes

    @property
    def max_requests(self) -> int:
        """Sequences of the longest kind that the cache holds at a time, were there no limit to them."""
        return self.layout.sequences_that_fit(self.cache_bytes, self.limit)

    def lines(self) -> list[str]:
        """For people."""
        halves = [self.limit // part for part in (1, 4, 16) if self.limit // part]
        fits = (f"{self.layout.sequences_that_fit(self.cache_bytes, n)} of {n} tokens" for n in halves)
        return [
            f"Memory: {format_bytes(self.whole_bytes)} with a full cache: weights {format_bytes(self.weights_bytes)}, "
            f"cache {format_bytes(self.cache_bytes)}, scratch {format_bytes(self.scratch_bytes)}, "
            f"process {format_bytes(self.process_bytes)}",
            f"A token takes {format_bytes(self.layout.bytes_per_token)} of cache in {self.layout.format}; the longest "
            f"request is {self.limit} tokens",
            f"Requests that fit at a time: {', '.join(fits)}; at most {self.max_num_seqs} run",
        ]


def plan_engine(engine: Engine) -> StartPlan:
    """The plan of `engine`, to be made before its first request: then none of its cache has been touched."""
    weights, scratch = engine.runner.weights_bytes, engine.runner.scratch_bytes
    return StartPlan(
        weights_bytes=weights,
        scratch_bytes=scratch,
        process_bytes=max(0, resident_bytes() - weights - scratch),
        cache_bytes=engine.cache.arena.bytes_total,
        layout=engine.layout,
        limit=engine.scheduler.limit,
        max_num_seqs=engine.config.max_num_seqs,
    )
