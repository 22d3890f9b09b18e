"""A step cost fitted to measured steps: piecewise linear in the rows, linear in everything else, and how far they
spread."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from octavo.errors import ConfigError
from octavo.kept import Kept
from octavo.plan.facts import ModelFacts
from octavo.plan.machine import machine_facts
from octavo.simulate.cost import StepWork

_KNOTS = tuple(1 << i for i in range(15))
_OUTLIER = 1.5
_FACTORS = 64
_ROUNDS = 3

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One step that was measured."""

    work: StepWork
    seconds: float


@dataclass(frozen=True)
class FittedCost:
    """`base[i]` seconds for `knots[i]` rows, straight lines between them, and seconds per position that is read, per
    pair in prompts, per sampled row and per sequence. `shares` is each layer group's part of the layers. `spread` is by
    what the measured steps differed from that, in equal parts of them."""

    windows: tuple[int | None, ...]
    shares: tuple[float, ...]
    knots: tuple[int, ...]
    base: tuple[float, ...]
    per_seen: float
    per_prompt_pair: float
    per_logit: float
    per_sequence: float
    spread: tuple[float, ...] = (1.0,)

    def seconds(self, work: StepWork) -> float:
        """How long the step takes on average."""
        seen, pairs = _weighed(work, self.shares)
        rest = self.per_seen * seen + self.per_prompt_pair * pairs
        return (
            self._base(work.rows) + rest + self.per_logit * work.logits + self.per_sequence * work.sequences
        )

    def _base(self, rows: int) -> float:
        knots, base = self.knots, self.base
        if len(knots) == 1:
            return base[0] * rows / knots[0]
        right = min(max(1, bisect_right(knots, rows)), len(knots) - 1)
        left = right - 1
        slope = (base[right] - base[left]) / (knots[right] - knots[left])
        return max(base[left] + slope * (rows - knots[left]), 0.0)


def _weighed(work: StepWork, shares: Sequence[float]) -> tuple[float, float]:
    seen = sum(share * n for share, n in zip(shares, work.seen, strict=True))
    return seen, sum(share * n for share, n in zip(shares, work.prompt_pairs, strict=True))


def fit(samples: Sequence[Sample], windows: tuple[int | None, ...], shares: tuple[float, ...]) -> FittedCost:
    """The cost with no negative part whose relative errors are least; steps far off it, which something else on the
    machine has disturbed, are left out. Errors are relative to the cost, not to what was measured: else steps that
    happened to be fast would weigh more, and every mean come out too low. Raises `ConfigError` without samples."""
    if not samples:
        raise ConfigError("calibration: no step was measured", param="samples")
    widest = max(sample.work.rows for sample in samples)
    knots = (*(k for k in _KNOTS if k < widest), widest)
    columns = np.array([_row(sample.work, knots, shares) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    kept, unit = np.ones(len(samples), dtype=bool), seconds
    for _ in range(_ROUNDS):
        found = _least_squares(columns[kept] / unit[kept, None], seconds[kept] / unit[kept])
        cost = np.maximum(columns @ found, 1e-12)
        unit = np.clip(cost, seconds / _OUTLIER, seconds * _OUTLIER)
        kept = cost == unit
        if not kept.any():
            kept[:] = True
    base, rest = (tuple(map(float, part)) for part in (found[: len(knots)], found[len(knots) :]))
    seen, pair, logit, sequence = rest
    spread = _spread(seconds[kept] / unit[kept])
    return FittedCost(windows, shares, knots, base, seen, pair, logit, sequence, spread)


def _spread(ratios: Floats) -> tuple[float, ...]:
    """The middles of equal parts of `ratios`, their mean 1."""
    middles = np.quantile(ratios, (np.arange(_FACTORS) + 0.5) / _FACTORS)
    return tuple(map(float, middles / middles.mean()))


def _row(work: StepWork, knots: Sequence[int], shares: Sequence[float]) -> list[float]:
    """What each coefficient is multiplied with."""
    hats = [0.0] * len(knots)
    right = min(bisect_right(knots, work.rows), len(knots) - 1)
    left = max(0, right - 1)
    if left == right:
        hats[left] = 1.0
    else:
        part = (work.rows - knots[left]) / (knots[right] - knots[left])
        hats[left], hats[right] = 1 - part, part
    return [*hats, *_weighed(work, shares), float(work.logits), float(work.sequences)]


def _least_squares(columns: Floats, wanted: Floats) -> Floats:
    """x >= 0 with `columns @ x` close to `wanted`: what comes out negative is left out, the most negative first."""
    used = [i for i in range(columns.shape[1]) if columns[:, i].any()]
    found = np.zeros(columns.shape[1])
    scale = np.maximum(np.abs(columns).max(axis=0), 1e-300)
    while used:
        part, *_ = np.linalg.lstsq(columns[:, used] / scale[used], wanted, rcond=None)
        if part.min() >= 0:
            found[used] = part / scale[used]
            break
        used.pop(int(part.argmin()))
    return found


@dataclass(frozen=True)
class Measured:
    """What was calibrated on this machine: a model, by its shape and not by what it is called, its compute type and the
    threads."""

    model: ModelFacts
    compute: str
    threads: int

    def kept(self, home: Path) -> Kept:
        """Where its calibration is."""
        model = self.model.spec, self.model.weights
        return Kept(home, "calibration", [*machine_facts(), *model, self.compute, self.threads])


def save(cost: FittedCost, home: Path, measured: Measured) -> Path:
    """Keep a calibration. Raises `ConfigError` if that fails."""
    kept = measured.kept(home)
    if not kept.save(asdict(cost)):
        raise ConfigError(
            f"calibration: {str(kept.file)!r} cannot be written; set OCTAVO_HOME", param="OCTAVO_HOME"
        )
    return kept.file


def load(home: Path, measured: Measured) -> FittedCost | None:
    """The calibration that was kept; None if there is none that can be read."""
    try:
        cost = TypeAdapter(FittedCost).validate_python(measured.kept(home).load())
    except ValidationError:
        return None
    sound = len(cost.knots) == len(cost.base) > 0 and min(cost.spread, default=0) > 0
    return cost if sound and cost.base[-1] > 0 else None
