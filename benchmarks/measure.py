"""How a benchmark is taken, and one line of its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich.table import Table


@dataclass(frozen=True)
class Line:
    """One comparison. `others` holds what the other engines, or the machine, reached; None: not installed.

    `reference` is the one of them that `at_least` speaks of: how many times better Octavo has to be (a share, where the
    reference is a limit of the machine). None: reported, not required.
    """

    name: str
    title: str
    unit: str
    octavo: float
    others: Mapping[str, float | None]
    reference: str
    at_least: float | None
    lower_is_better: bool = False

    def times_better(self, other: str) -> float | None:
        """How many times better Octavo is than `other`; more than 1 means better."""
        value = self.others.get(other)
        if value is None:
            return None
        return value / self.octavo if self.lower_is_better else self.octavo / value

    @property
    def ratio(self) -> float:
        """Octavo against the reference."""
        ratio = self.times_better(self.reference)
        assert ratio is not None
        return ratio

    @property
    def passed(self) -> bool | None:
        """Whether the requirement holds; None where there is none."""
        return None if self.at_least is None else self.ratio >= self.at_least

    def to_dict(self) -> dict[str, Any]:
        """For the JSON line."""
        return {
            "name": self.name,
            "unit": self.unit,
            "octavo": self.octavo,
            **self.others,
            "ratio": self.ratio,
            "at_least": self.at_least,
            "passed": self.passed,
        }


def alternate(contenders: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median of `repeats` results of each contender, after one round that does not count.

    Every round runs all of them, in turns from the front and from the back, so that whatever else the machine does
    concerns all alike.
    """
    results: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(repeats + 1):
        for name in list(contenders)[:: 1 if turn % 2 else -1]:
            result = contenders[name]()
            if turn:
                results[name].append(result)
    return {name: median(values) for name, values in results.items()}


def result_table(title: str, lines: Iterable[Line]) -> Table:
    """Lines for people."""
    table = Table(title=title, title_justify="left")
    for column in ("", "Octavo", "others", "ratio", "at least", ""):
        table.add_column(column, justify="left" if column in ("", "others") else "right")
    for line in lines:
        verdict = {True: "ok", False: "MISSED", None: ""}[line.passed]
        goal = "" if line.at_least is None else f"{line.at_least:g}"
        table.add_row(
            line.title, figure(line.octavo, line.unit), _others(line), f"{line.ratio:.2f}", goal, verdict
        )
    return table


def markdown_rows(lines: Iterable[Line]) -> list[str]:
    """Lines as rows of a Markdown table."""
    rows = ["| | Octavo | others | ratio |", "|---|---:|---|---:|"]
    for line in lines:
        rows.append(
            f"| {line.title} | {figure(line.octavo, line.unit)} | {_others(line)} | {line.ratio:.2f} |"
        )
    return rows


def figure(value: float, unit: str) -> str:
    """`value` with three significant digits and its unit."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {unit}"


def _others(line: Line) -> str:
    cells = []
    for name, value in line.others.items():
        cells.append(f"{name}: {'not installed' if value is None else figure(value, line.unit)}")
    return ", ".join(cells)
