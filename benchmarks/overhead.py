"""What a step costs outside the kernels, and where that goes."""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import alternate
from benchmarks.subjects import Subjects
from octavo.bench.generate import greedy
from octavo.kernels import _native

KERNELS = ("linear", "rms_norm", "rope_write", "cache_write", "attention")
"""The functions of the native module that compute the model; planning and sampling count as overhead."""
_TOP = 15


@dataclass(frozen=True)
class Overhead:
    """Seconds per decode step: in all, in each kernel, and a profile of the rest: function, calls and own seconds."""

    step_s: float
    kernels: dict[str, float]
    profile: list[tuple[str, float, float]]

    @property
    def outside_s(self) -> float:
        """Seconds per step that no kernel accounts for."""
        return self.step_s - sum(self.kernels.values())

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


def measure_overhead(on: Subjects, prompt: int, steps: int, repeats: int) -> Overhead:
    """Decode `steps` tokens after a prompt: bare, with a clock around every kernel, and under a profiler.

    The step time is that of the bare runs, so the clocks are not counted as overhead.
    """
    spent: dict[str, list[float]] = defaultdict(list)

    def bare() -> float:
        return median(on.octavo_times(on.prompts.next(prompt), steps + 1)[1:])

    def clocked() -> float:
        with clocks() as totals:
            each = _decode(on, prompt, steps, totals)
        for name in KERNELS:
            spent[name].append(median(step.get(name, 0.0) for step in each))
        return 0.0

    found = alternate({"bare": bare, "clocked": clocked}, repeats)
    kernels = {name: median(values) for name, values in spent.items() if any(values)}
    return Overhead(found["bare"], kernels, _profile(on, prompt, steps))


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Inside, the seconds spent in each kernel add up in the dictionary yielded."""
    totals: dict[str, float] = defaultdict(float)
    plain = {name: getattr(_native, name) for name in KERNELS}
    try:
        for name, kernel in plain.items():
            setattr(_native, name, _clocked(name, kernel, totals))
        yield totals
    finally:
        for name, kernel in plain.items():
            setattr(_native, name, kernel)


def _clocked(name: str, kernel: Callable[..., Any], totals: dict[str, float]) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = kernel(*arguments)
        totals[name] += time.perf_counter() - start
        return result

    return run


def _decode(on: Subjects, prompt: int, steps: int, totals: dict[str, float]) -> list[dict[str, float]]:
    """Kernel seconds of each decode step."""
    engine = on.engine
    engine.submit(engine.prepare("bench", on.prompts.next(prompt), greedy(steps + 1)))
    while not engine.step():
        pass
    each = []
    while engine.has_work:
        totals.clear()
        engine.step()
        each.append(dict(totals))
    return each


def _profile(on: Subjects, prompt: int, steps: int) -> list[tuple[str, float, float]]:
    engine = on.engine
    engine.submit(engine.prepare("bench", on.prompts.next(prompt), greedy(steps + 1)))
    while not engine.step():
        pass
    profiler = cProfile.Profile()
    profiler.enable()
    while engine.has_work:
        engine.step()
    profiler.disable()
    stats: dict[Any, Any] = pstats.Stats(profiler, stream=sys.stderr).stats  # type: ignore[attr-defined]
    rows = [
        (_name(where), calls / steps, own / steps)
        for where, (_, calls, own, _, _) in stats.items()
        if not any(
            f"_native.{kernel} " in f"{where[2]} " or where[2].endswith(f".{kernel}>") for kernel in KERNELS
        )
    ]
    return sorted(rows, key=lambda row: -row[2])[:_TOP]


def _name(where: tuple[str, int, str]) -> str:
    file, line, function = where
    return function if file == "~" else f"{'/'.join(file.split('/')[-2:])}:{line} {function}"
