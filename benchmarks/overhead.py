"""What a step costs outside the kernels, and where that goes."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.subjects import Subjects
from octavo.bench.generate import greedy
from octavo.kernels import _native

KERNELS = ("linear", "rms_norm", "rope_write", "cache_write", "seal", "attention")
"""The functions of the native module that compute the model; planning and sampling count as overhead."""
_TOP = 15


@dataclass(frozen=True)
class Overhead:
    """Seconds per decode step, in each kernel and outside all of them: medians, which need not add up.

    `profile` is of the outside: function, calls per step, own seconds per step.
    """

    step_s: float
    outside_s: float
    kernels: dict[str, float]
    profile: list[tuple[str, float, float]]

    def show(self) -> None:
        """Tables on stderr."""
        console = Console(stderr=True)
        split = Table(title="One decode step at batch 1", title_justify="left")
        split.add_column("")
        split.add_column("ms", justify="right")
        for name, spent in sorted(self.kernels.items(), key=lambda item: -item[1]):
            split.add_row(name, f"{1000 * spent:.3f}")
        split.add_row("everything else", f"{1000 * self.outside_s:.3f}")
        split.add_row("step", f"{1000 * self.step_s:.3f}", style="bold")
        console.print(split)
        rest = Table(title="Everything else, profiled (the profiler itself costs time)", title_justify="left")
        rest.add_column("function")
        for column in ("calls per step", "own µs per step"):
            rest.add_column(column, justify="right")
        for name, calls, own in self.profile:
            rest.add_row(name, f"{calls:.1f}", f"{1e6 * own:.1f}")
        console.print(rest)


@dataclass
class Clocks:
    """What the clocks around the kernels have seen: seconds by kernel, and calls."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: int = 0

    def around(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        """`kernel`, clocked."""

        def clocked(*arguments: Any) -> Any:
            start = time.perf_counter()
            result = kernel(*arguments)
            self.seconds[name] += time.perf_counter() - start
            self.calls += 1
            return result

        return clocked


@contextmanager
def clocks() -> Iterator[Clocks]:
    """Inside, every kernel call is clocked."""
    found = Clocks()
    plain = {name: getattr(_native, name) for name in KERNELS}
    try:
        for name, kernel in plain.items():
            setattr(_native, name, found.around(name, kernel))
        yield found
    finally:
        for name, kernel in plain.items():
            setattr(_native, name, kernel)


def clock_cost_s(calls: int = 20_000) -> float:
    """Seconds that a clock adds to a call and does not see itself."""
    clock = Clocks()
    clocked = clock.around("nothing", _nothing)
    start = time.perf_counter()
    for _ in range(calls):
        clocked(1, 2, 3)
    return (time.perf_counter() - start - clock.seconds["nothing"]) / calls


def measure_overhead(on: Subjects, prompt: int, steps: int, repeats: int) -> Overhead:
    """Decode `steps` tokens after a prompt, `repeats` times after a warm-up, with a clock around every kernel.

    What the clocks themselves cost is taken off; what a call into the native module costs counts as kernel.
    """
    cost = clock_cost_s()
    whole: list[float] = []
    outside: list[float] = []
    kernels: dict[str, list[float]] = defaultdict(list)
    for turn in range(repeats + 1):
        with clocks() as found:
            for step_s in _steps(on, prompt, steps):
                bare = step_s - found.calls * cost
                if turn and step_s:
                    whole.append(bare)
                    outside.append(bare - sum(found.seconds.values()))
                    for name, spent in found.seconds.items():
                        kernels[name].append(spent)
                found.seconds.clear()
                found.calls = 0
    return Overhead(
        median(whole),
        median(outside),
        {name: median(values) for name, values in kernels.items()},
        _profile(on, prompt, steps),
    )


def _steps(on: Subjects, prompt: int, steps: int) -> Iterator[float]:
    """Seconds of each of `steps` decode steps, and before them a 0.0 when the prompt has been read."""
    engine = on.engine
    engine.submit(engine.prepare("bench", on.prompts.next(prompt), greedy(steps + 1)))
    while not engine.step():
        pass
    yield 0.0
    while engine.has_work:
        start = time.perf_counter()
        engine.step()
        yield time.perf_counter() - start


def _profile(on: Subjects, prompt: int, steps: int) -> list[tuple[str, float, float]]:
    """Functions by own time, kernels left out: they run inside the clocks, which the profiler tells apart."""
    profiler = cProfile.Profile()
    with clocks():
        decoding = _steps(on, prompt, steps)
        next(decoding)
        profiler.enable()
        for _ in decoding:
            pass
        profiler.disable()
    stats: dict[Any, Any] = pstats.Stats(profiler, stream=sys.stderr).stats  # type: ignore[attr-defined]
    rows = [
        (_name(where), calls / steps, own / steps)
        for where, (_, calls, own, _, _) in stats.items()
        if where[2] not in ("clocked", "<built-in method time.perf_counter>")
    ]
    return sorted(rows, key=lambda row: -row[2])[:_TOP]


def _nothing(*arguments: Any) -> None:
    pass


def _name(where: tuple[str, int, str]) -> str:
    file, line, function = where
    return function if file == "~" else f"{'/'.join(file.split('/')[-2:])}:{line} {function}"
