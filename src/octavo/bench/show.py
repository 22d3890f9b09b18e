"""Reports as tables for people."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from octavo.bench.cache import CacheReport, Phase, growth
from octavo.bench.limits import MachineLimits
from octavo.bench.waste import Account, WasteReport
from octavo.config import format_bytes


def limits_line(limits: MachineLimits) -> str:
    """The machine in one line."""
    return (
        f"This machine, {limits.threads} threads: {limits.read_bytes_per_s / 1e9:.1f} GB/s read, "
        f"{limits.bf16_flops_per_s / 1e9:.0f} GFLOP/s in bf16, {limits.f32_flops_per_s / 1e9:.0f} in float32"
    )


def show_cache(report: CacheReport, console: Console) -> None:
    """The three runs, their phases, and how work grows."""
    console.print(
        f"{report.model}, {report.dtype}: {report.new_tokens} tokens after a prompt of {report.prompt_tokens}"
    )
    console.print(limits_line(report.limits))
    runs = _table("Whole run", "seconds", "tokens/s", "Octavo is faster", "same tokens")
    for run in report.runs:
        times = f"{report.times_faster(run.name):.1f}x" if run is not report.octavo else ""
        same = f"{report.same_tokens[run.name]} of {report.new_tokens}"
        runs.add_row(run.name, f"{run.total_s:.2f}", f"{run.tokens_per_s:.1f}", times, same)
    console.print(runs)
    for title, phases in (("Prefill", report.prefill), ("Decode", report.decode)):
        table = _table(title, "seconds", "tokens/s", "GFLOP/s", "of GEMM", "GB/s", "of read")
        for name, phase in phases.items():
            table.add_row(name, *_phase_cells(phase))
        console.print(table)
    console.print(_growth_table(report))
    for name, count in report.same_tokens.items():
        if count < report.new_tokens:
            console.print(_difference(name, count, report.dtype))


def _growth_table(report: CacheReport) -> Table:
    points = {run.name: growth(run, report.prompt_tokens) for run in report.runs}
    table = Table(title="Growth: ms for one more token (positions computed for it)", title_justify="left")
    table.add_column("tokens in the sequence", justify="right")
    for name in points:
        table.add_column(name, justify="right")
    for row in zip(*points.values(), strict=True):
        cells = [f"{point.ms_per_token:.1f} ({point.positions})" for point in row]
        table.add_row(str(row[0].length), *cells)
    totals = [f"{sum(run.positions)} positions in all" for run in report.runs]
    table.add_row("", *totals)
    return table


def _difference(name: str, same: int, dtype: str) -> str:
    why = (
        "which float32 does not explain: please report it"
        if dtype == "float32"
        else f"which rounding to {dtype} explains; --dtype float32 gives the same tokens"
    )
    return f"{name} and octavo differ from new token {same} on, {why}."


def show_waste(report: WasteReport, console: Console) -> None:
    """Both rules side by side."""
    console.print(
        f"{report.requests} requests of up to {report.longest} tokens in {format_bytes(report.budget)} of cache, "
        "averages over time"
    )
    table = _table("", "reserved", "used", "wasted", "waste", "most at once", "mean", "steps")
    table.add_row(f"contiguous, {report.longest}", *_account_cells(report.contiguous))
    table.add_row(f"blocks of {report.block_size}", *_account_cells(report.blocks))
    console.print(table)


def _account_cells(account: Account) -> list[str]:
    sizes = [format_bytes(round(b)) for b in (account.reserved, account.used, account.wasted)]
    running = [str(account.most_running), f"{account.mean_running:.1f}", str(account.steps)]
    return [*sizes, f"{account.waste:.1%}", *running]


def _phase_cells(phase: Phase) -> list[str]:
    return [
        f"{phase.seconds:.3f}",
        f"{phase.tokens_per_s:.1f}",
        f"{phase.gflops:.1f}",
        f"{phase.gflops_share:.0%}",
        f"{phase.gbytes_per_s:.1f}",
        f"{phase.gbytes_share:.0%}",
    ]


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title or None, title_justify="left")
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right")
    return table
