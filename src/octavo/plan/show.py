"""A plan as tables for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from octavo.plan.advice import advise, head_variants, held, notes, prompt_notes
from octavo.plan.planner import Case
from octavo.plan.report import Plan
from octavo.plan.roofline import Bounds

MOST_ADVICE = 6


def decimal_bytes(count: float) -> str:
    """Bytes in decimal units, as vendors count them: `10.5 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def seconds(bounds: Bounds) -> str:
    """An interval of time and what takes it: `17–36 ms, bandwidth`."""
    unit, scale = next(((u, x) for u, x in (("s", 1.0), ("ms", 1e3)) if bounds.high * x >= 1), ("µs", 1e6))
    return f"{_digits(bounds.low * scale)}–{_digits(bounds.high * scale)} {unit}, {bounds.bound}"


def _digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def show_plan(plan: Plan, console: Console) -> None:
    """Rows, times, what would help, and what must be known beside them."""
    facts, hardware, first = plan.facts, plan.hardware, plan.first
    active = facts.weights.active
    sparse = f", {active / 1e9:.3g} billion of them for a token" if active < facts.weights.total else ""
    made_for = "" if facts.context is None else f", made for {facts.context} positions"
    console.print(f"{facts.name}: {facts.weights.total / 1e9:.4g} billion parameters{sparse}{made_for}")
    console.print(
        f"{hardware.name}: {decimal_bytes(hardware.total_bytes)} of memory; {first.weights} weights "
        f"{decimal_bytes(first.weights_bytes)}, cache {decimal_bytes(first.cache_bytes)}{_process(plan)}"
    )
    if first.concurrency is not None:
        need = decimal_bytes(first.concurrency * first.bytes_per_request)
        console.print(
            f"{first.concurrency} requests of {first.context:,} tokens in {first.format}: {need} of cache"
        )
    console.print(_fits(plan))
    if running := [case for case in plan.cases if case.max_requests]:
        console.print(_times(running))
    if advice := advise(first):
        table = _table("What would help", "requests", "times")
        for entry in advice[:MOST_ADVICE]:
            times = "" if entry.times is None else f"{entry.times:.2g}"
            table.add_row(entry.change, str(entry.max_requests), times)
        console.print(table)
    if variants := head_variants(first):
        table = _table("The same model with other heads", "KV heads", "per token", "requests")
        for variant in variants:
            table.add_row(
                variant.name,
                str(variant.kv_heads),
                decimal_bytes(variant.bytes_per_token) + held(variant),
                str(variant.max_requests),
            )
        console.print(table)
    found = [note for case in plan.cases for note in notes(case)]
    for note in dict.fromkeys([*found, *prompt_notes(first)]):
        console.print(f"Note: {note}.")
    console.print(f"Sources: {facts.source}. {hardware.source}.", style="dim")


def _process(plan: Plan) -> str:
    taken = plan.hardware.process_bytes
    return f", the process itself {decimal_bytes(taken)}" if taken else ""


def _fits(plan: Plan) -> Table:
    table = _table("What fits", "context", "per token", "a request", "requests", "longest", "limited by")
    for case in plan.cases:
        table.add_row(
            case.format,
            f"{case.context:,}",
            decimal_bytes(case.layout.bytes_per_token),
            decimal_bytes(case.bytes_per_request),
            _requests(case),
            "any" if case.max_context is None else f"{case.max_context:,}",
            case.binding,
        )
    return table


def _requests(case: Case) -> str:
    if case.concurrency is None:
        return str(case.max_requests)
    return f"{case.max_requests} ({case.concurrency} asked)"


def _times(cases: Sequence[Case]) -> Table:
    columns = ("context", "a prompt takes", "a step takes", "of", "tokens/s", "compute from")
    table = _table("How fast, at best and at worst", *columns)
    for case in cases:
        batch = case.roofline.compute_bound_batch(case.context)
        table.add_row(
            case.format,
            f"{case.context:,}",
            seconds(case.prefill),
            seconds(case.decode),
            str(case.batch),
            f"{_digits(case.batch / case.decode.high)}–{_digits(case.batch / case.decode.low)}",
            "never" if batch is None else f"{batch} requests",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column, justify="right")
    return table
