"""The cache account of one response, and of the whole engine: totals are the sum of all receipts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Miss:
    """Why reuse ended where it did: `disabled`, `namespace`, `exactness`, `reclaimed`, `diverged`, `tail` or
    `cold`.

    `exactness` also says that the request drops context from there on and computes what nobody else has.
    `at_token` is the first prompt token that was not reused; None if only the last one had to be computed.
    """

    reason: str
    at_token: int | None


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a request for `cache_ttl` got: `bytes` of its first `tokens` tokens, newly or again kept for `ttl_s`
    seconds, or `refused` and why."""

    ttl_s: float
    blocks: int
    bytes: int
    refused: str | None = None
    tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "ttl_s": self.ttl_s,
            "tokens": self.tokens,
            "blocks": self.blocks,
            "bytes": self.bytes,
            "refused": self.refused,
        }


@dataclass(slots=True)
class Receipt:
    """Counts of one request, whatever its `n`.

    `reused_tokens + computed_tokens = prompt_tokens`, fixed at first admission. `recomputed_tokens` are
    positions computed again after a preemption. `written_blocks` are blocks it sealed, `formats` the
    positions whose K and V were written, by it or by the requests it reuses, when it was resumed too.
    `compressed_tokens` are positions that were read from folded blocks, at first or when it was resumed; the most
    that one of its sequences had of them.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    seed: int | None = None
    reused_from: Counter[str] = field(default_factory=Counter)
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    written_blocks: int = 0
    miss: Miss | None = None
    preemptions: int = 0
    queued_ms: float = 0.0
    formats: Counter[str] = field(default_factory=Counter)
    compressed_tokens: int = 0
    dropped: list[tuple[int, int, str]] = field(default_factory=list)
    pinned: list[Pinned] = field(default_factory=list)
    exact: bool = True

    @property
    def reused_tokens(self) -> int:
        return self.reused_from.total()

    def admit(self, reused: int, computed: int, queued_ms: float) -> None:
        """First admission: `reused` prompt tokens come from the arena; `computed` are left to do."""
        if reused:
            self.reused_from["arena"] += reused
        self.computed_tokens += computed
        self.queued_ms += queued_ms

    def step(self, again: int, blocks: int, tokens: int) -> None:
        """One step: positions computed again, blocks sealed, tokens sampled."""
        self.recomputed_tokens += again
        self.written_blocks += blocks
        self.completion_tokens += tokens

    def write(self, formats: Mapping[str, int]) -> None:
        """There are so many positions more than before, by format."""
        for name, count in formats.items():
            self.formats[name] += count
            if not self.formats[name]:
                del self.formats[name]

    def compress(self, tokens: int) -> int:
        """A sequence goes on from blocks of which `tokens` positions were folded. Returns how many more than before."""
        more = max(0, tokens - self.compressed_tokens)
        self.compressed_tokens += more
        return more

    def drop(self, first: int, last: int) -> int:
        """A position was computed that no longer sees positions `first` to `last`, by `context_policy="window"`.

        Returns how many of them were still seen before.
        """
        before = max([first - 1, *(d[1] for d in self.dropped)])
        self.dropped = [(first, max(last, before), "window")]
        self.exact = False
        return max(0, last - before)

    def to_dict(self) -> dict[str, Any]:
        """The `octavo` object of a response."""
        miss = self.miss
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "seed": self.seed,
            "reused_tokens": self.reused_tokens,
            "reused_from": dict(self.reused_from),
            "computed_tokens": self.computed_tokens,
            "recomputed_tokens": self.recomputed_tokens,
            "written_blocks": self.written_blocks,
            "miss": None if miss is None else {"reason": miss.reason, "at_token": miss.at_token},
            "preemptions": self.preemptions,
            "queued_ms": round(self.queued_ms, 3),
            "formats": dict(self.formats),
            "compressed_tokens": self.compressed_tokens,
            "dropped": [list(d) for d in self.dropped],
            "pinned": self._pinned(),
            "exact": self.exact,
        }

    def _pinned(self) -> dict[str, Any] | None:
        """The pins of all choices together; one refusal shows."""
        if not self.pinned:
            return None
        refused = next((p.refused for p in self.pinned if p.refused is not None), None)
        blocks, nbytes = sum(p.blocks for p in self.pinned), sum(p.bytes for p in self.pinned)
        tokens = max(p.tokens for p in self.pinned)
        return Pinned(self.pinned[0].ttl_s, blocks, nbytes, refused, tokens).to_dict()
