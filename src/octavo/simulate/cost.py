"""How long a step takes: the work of a step plan, and models that give it seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from typing import Protocol

from octavo.plan.roofline import Roofline, pairs_seen
from octavo.schedule.scheduler import Chunk

_GOLDEN = 0x9E3779B9  # of 1 << 32


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes for `sequences` sequences. `rows` are tokens, `logits` rows that are sampled; `seen` are
    positions read and `pairs` pairs of a query and a position it sees, both by kind of layer, in the order of
    `StepCost.windows`. Pairs of chunks of more than one token are in `prompt_pairs`."""

    sequences: int
    rows: int
    logits: int
    seen: tuple[int, ...]
    pairs: tuple[int, ...]
    prompt_pairs: tuple[int, ...]


class StepCost(Protocol):
    """Seconds of a step."""

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Those of the model's layer groups, None for full attention."""

    @property
    def spread(self) -> tuple[float, ...]:
        """Factors by which steps of equal work differ from their mean, each as frequent as the others."""

    def seconds(self, work: StepWork) -> float:
        """How long the step takes on average."""


def factor(spread: tuple[float, ...], step: int) -> float:
    """That of step number `step` of a replica: the same in every run, each equally often, in an order that falls into
    step with nothing (multiples of the golden ratio; Knuth, The Art of Computer Programming 3, 6.4)."""
    return spread[(step * _GOLDEN % (1 << 32) * len(spread)) >> 32]


def work_of(chunks: Iterable[Chunk], windows: tuple[int | None, ...]) -> StepWork:
    """The work of a step plan."""
    sequences = rows = logits = 0
    seen, pairs, prompt_pairs = ([0] * len(windows) for _ in range(3))
    for chunk in chunks:
        start, stop = chunk.start, chunk.stop
        sequences += 1
        rows += stop - start
        logits += chunk.sample
        into = pairs if stop - start == 1 else prompt_pairs
        for i, window in enumerate(windows):
            seen[i] += stop if window is None else min(stop, window + stop - start - 1)
            into[i] += pairs_seen(stop, window) - pairs_seen(start, window)
    return StepWork(sequences, rows, logits, tuple(seen), tuple(pairs), tuple(prompt_pairs))


class RooflineCost:
    """Seconds from a roofline: the geometric middle of its bounds."""

    def __init__(self, roofline: Roofline) -> None:
        self.windows = tuple(group.window for group in roofline.layout.groups)
        self.spread = (1.0,)
        self._roofline = roofline

    def seconds(self, work: StepWork) -> float:
        """How long the step takes."""
        bounds = self._roofline.step(work.rows, work.logits, work.seen, work.pairs, work.prompt_pairs)
        return sqrt(bounds.low * bounds.high)


@dataclass(frozen=True)
class UnitCost:
    """Every step takes one second: time is counted in steps."""

    windows: tuple[int | None, ...]
    spread: tuple[float, ...] = (1.0,)

    def seconds(self, work: StepWork) -> float:
        """One."""
        return 1.0
