"""Simulations as tables for people, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from octavo.figures import save_figure
from octavo.simulate.cache_only import CacheOnly
from octavo.simulate.measure import Distribution
from octavo.simulate.report import Report, Row
from octavo.simulate.sweep import Setting


def show_cache_only(found: Sequence[CacheOnly], console: Console) -> None:
    """Hit rates by capacity and policy."""
    table = _table(
        f"{found[0].requests} requests, {found[0].blocks} blocks asked for", "blocks", "hits", "hit rate"
    )
    for entry in found:
        capacity = "unlimited" if entry.capacity is None else f"{entry.capacity:,}"
        table.add_row(entry.policy, capacity, f"{entry.hits:,}", f"{entry.hit_rate:.1%}")
    console.print(table)


def show_report(report: Report, console: Console) -> None:
    """One line per setting; what was the same in all of them is said once."""
    first = report.rows[0]
    costs = {row.cost for row in report.rows}
    origin = f"step times from {first.cost}" if len(costs) == 1 else "step times as said below"
    asked = first.measures.finished + first.measures.rejected
    console.print(f"{report.model} on {report.hardware}, {origin}: {asked} requests")
    columns = ["blocks", "hits", "first token", "between", "tokens/s", "preempted"]
    rejected, mixed = any(row.measures.rejected for row in report.rows), len(costs) > 1
    columns += ["rejected"] * rejected + ["step times"] * mixed
    table = _table("Times: mean (95 %)", *columns)
    for row in report.rows:
        m = row.measures
        cells = row.to_dict()
        table.add_row(
            label(row.setting, report.rows),
            f"{row.blocks:,}",
            f"{cells['hit_rate']:.1%}",
            _times(m.ttft),
            _times(m.itl),
            f"{cells['output_tokens_per_s']:,.0f}",
            str(m.preemptions),
            *([str(m.rejected)] * rejected),
            *([row.cost] * mixed),
        )
    console.print(table)
    for note in dict.fromkeys(note for row in report.rows for note in row.notes):
        console.print(note)


def label(setting: Setting, rows: Sequence[Row]) -> str:
    """What sets a row apart from the others; everything if nothing does."""
    names = ("kv_cache_dtype", "cache_policy", "replicas", "routing")
    varied = [n for n in names if len({getattr(row.setting, n) for row in rows}) > 1]
    shown = varied or ["replicas", "routing"]
    values = {n: str(getattr(setting, n)) for n in shown}
    if "replicas" in values:
        values["replicas"] += " replica" if setting.replicas == 1 else " replicas"
    return ", ".join(values.values())


def _times(found: Distribution) -> str:
    mean, high = found.mean, found.percentile(0.95)
    if mean is None or high is None:
        return ""
    unit, scale = ("s", 1.0) if high >= 1 else ("ms", 1e3)
    return f"{mean * scale:,.3g} ({high * scale:,.3g}) {unit}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table


def save_plot(rows: Sequence[Row], file: Path) -> Path:
    """Hit rates and times to the first token of all settings, and how full the cache was; returns the file that was
    written. Raises `ConfigError`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (hits, times, full) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    labels = [f"{label(row.setting, rows)}\n{row.blocks:,} blocks" for row in rows]
    cells: list[dict[str, Any]] = [row.to_dict() for row in rows]
    hits.barh(labels, [100 * cell["hit_rate"] for cell in cells], color="tab:blue")
    hits.set(title="Prompt tokens found in the cache", xlabel="percent")
    places = range(len(rows))
    for offset, (name, text) in enumerate((("mean", "mean"), ("p95", "95 %"))):
        values = [cell["ttft_s"][name] or 0.0 for cell in cells]
        times.barh([p + 0.38 * offset for p in places], values, height=0.36, label=text)
    times.set(title="Time to the first token", xlabel="seconds")
    times.set_yticks([p + 0.19 for p in places], labels)
    times.legend()
    for row, text in zip(rows, labels, strict=True):
        points = row.measures.running.points()
        full.plot([p[0] for p in points], [100 * p[1] for p in points], label=text.replace("\n", ", "))
    full.set(title="Cache held by running requests", xlabel="seconds", ylabel="percent")
    full.legend(fontsize="small")
    for axes in (hits, times):
        axes.invert_yaxis()
    return save_figure(figure, file)
