"""An evaluation as a table for people."""

from __future__ import annotations

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from octavo.evaluate.report import Evaluation, Row
from octavo.evaluate.retrieval import DEPTHS

_COLUMNS = ("bytes", "ppl", "change", "KL", "KL 99%", "top-1", "needles", "JSON")


def show_evaluation(evaluation: Evaluation, console: Console) -> None:
    """What was measured, a row per format, and where needles were lost."""
    windows = "1 window" if evaluation.windows == 1 else f"{evaluation.windows} windows"
    console.print(
        f"{evaluation.model}, {evaluation.text} text: {evaluation.positions:,} tokens predicted in {windows} of "
        f"{evaluation.window:,}, blocks of {evaluation.block_size}",
        soft_wrap=True,
    )
    table = Table(
        title=f"Against {evaluation.full}: what the bytes of a token buy",
        title_justify="left",
        box=SIMPLE,
        padding=(0, 0, 0, 1),
    )
    table.add_column("")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in evaluation.rows:
        table.add_row(row.layout.format, *_cells(row))
    console.print(table)
    for row in evaluation.rows:
        lost = [f"{depth:.0%}" for depth, found in zip(DEPTHS, row.found or (), strict=False) if not found]
        if lost:
            console.print(f"{row.layout.format}: needles not found at {', '.join(lost)} of the text")
        if row.records is not None and row.records.parsed < 1:
            console.print(
                f"{row.layout.format}: {1 - row.records.parsed:.0%} of the answers were no JSON objects"
            )


def _cells(row: Row) -> tuple[str, ...]:
    losses = row.losses
    return (
        f"{row.layout.bytes_per_token:,}",
        f"{losses.perplexity:.3f}",
        f"{row.perplexity_increase:+.2%}",
        f"{losses.kl_mean:.4f}",
        f"{losses.kl_p99:.4f}",
        f"{losses.top1_agreement:.1%}",
        "–" if row.found is None else f"{sum(row.found)}/{len(row.found)}",
        "–" if row.records is None else f"{row.records.fields:.0%}",
    )
