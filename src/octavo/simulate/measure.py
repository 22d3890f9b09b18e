"""What a simulation counts, in memory that does not grow with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import exp, log

_STEP = log(1.005)
_MOST_POINTS = 500


@dataclass
class Distribution:
    """Times. Mean and extremes are exact; percentiles are within 0.3 %."""

    count: int = 0
    total: float = 0.0
    most: float = 0.0
    _buckets: Counter[int] = field(default_factory=Counter)

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` times."""
        self.count += times
        self.total += value * times
        if value > self.most:
            self.most = value
        self._buckets[round(log(value) / _STEP) if value > 0 else -(1 << 30)] += times

    def merge(self, other: Distribution) -> None:
        """Count all that `other` has."""
        self.count += other.count
        self.total += other.total
        self.most = max(self.most, other.most)
        self._buckets.update(other._buckets)

    @property
    def mean(self) -> float | None:
        """None if nothing was counted."""
        return self.total / self.count if self.count else None

    def percentile(self, share: float) -> float | None:
        """The value that `share` of all do not exceed."""
        left = share * self.count
        for bucket in sorted(self._buckets):
            left -= self._buckets[bucket]
            if left <= 0:
                return min(self.most, exp(bucket * _STEP)) if bucket > -(1 << 30) else 0.0
        return None

    def to_dict(self) -> dict[str, float | None]:
        """For JSON."""
        percentiles = {f"p{share}": self.percentile(share / 100) for share in (50, 95, 99)}
        return {"mean": self.mean, **percentiles}


@dataclass
class Curve:
    """A value over time, as means of `width` seconds each; of twice as many seconds whenever they become too many."""

    width: float
    _sums: dict[int, list[float]] = field(default_factory=dict)

    def add(self, at: float, value: float) -> None:
        """The value is `value` at time `at`."""
        self._count(int(at / self.width), value, 1)
        while len(self._sums) > _MOST_POINTS:
            self._coarsen()

    def merge(self, other: Curve) -> None:
        """Mean of both, by how often each was looked at. Widths differ by doublings at most."""
        while self.width < other.width:
            self._coarsen()
        times = round(self.width / other.width)
        for key, (total, count) in other._sums.items():
            self._count(key // times, total, count)
        while len(self._sums) > _MOST_POINTS:
            self._coarsen()

    def _count(self, key: int, total: float, count: float) -> None:
        entry = self._sums.setdefault(key, [0.0, 0.0])
        entry[0] += total
        entry[1] += count

    def _coarsen(self) -> None:
        fine, self._sums = self._sums, {}
        self.width *= 2
        for key, (total, count) in fine.items():
            self._count(key // 2, total, count)

    def points(self) -> list[tuple[float, float]]:
        """(seconds, mean), in order."""
        return [(key * self.width, total / count) for key, (total, count) in sorted(self._sums.items())]


@dataclass
class Measures:
    """All that is counted of one replica, or of several together."""

    width: float
    ttft: Distribution = field(default_factory=Distribution)
    itl: Distribution = field(default_factory=Distribution)
    waiting: Distribution = field(default_factory=Distribution)
    lifetime: Distribution = field(default_factory=Distribution)
    running: Curve = field(init=False)
    cached: Curve = field(init=False)
    queue: Curve = field(init=False)
    finished: int = 0
    rejected: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    steps: int = 0
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        self.running, self.cached, self.queue = (Curve(self.width) for _ in range(3))

    def merge(self, other: Measures) -> None:
        """Add those of another replica."""
        for name in ("ttft", "itl", "waiting", "lifetime", "running", "cached", "queue"):
            getattr(self, name).merge(getattr(other, name))
        for name in (
            *("finished", "rejected", "output_tokens", "prompt_tokens", "reused_tokens"),
            *("preemptions", "recomputed_tokens", "steps"),
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.ended_at = max(self.ended_at, other.ended_at)
