"""A plan as a picture: requests that fit, and tokens per second, over the length of a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from octavo.figures import save_figure
from octavo.plan.planner import Case
from octavo.plan.report import Plan


def save_plot(plan: Plan, file: Path) -> Path:
    """Draw `plan` into `file`, whose suffix says the kind of picture; returns the file that was written. Raises
    `ConfigError` if it cannot be."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (fits, speed) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    formats = {case.format: case for case in reversed(plan.cases)}
    for name, case in reversed(formats.items()):
        lengths = _lengths(case)
        cases = [replace(case, context=n, output=min(case.output, max(1, n // 2))) for n in lengths]
        counts = [max(c.max_requests, 0.5) for c in cases]
        fits.plot(lengths, counts, label=name)
        running = [c for c in cases if c.max_requests]
        ran = [c.context for c in running]
        fastest, slowest = (
            [c.batch / c.decode.low for c in running],
            [c.batch / c.decode.high for c in running],
        )
        line = speed.plot(ran, fastest, label=name)[0]
        if running:
            speed.fill_between(ran, slowest, fastest, color=line.get_color(), alpha=0.15)
    for case in plan.cases:
        fits.plot(case.context, max(case.max_requests, 0.5), "o", color="black", markersize=4)
    for axes, title, label in (
        (fits, "Requests that fit", "requests at a time"),
        (speed, "Decode with all of them running", "tokens per second"),
    ):
        axes.set(title=title, xlabel="tokens per request", ylabel=label)
        if any(len(line.get_xdata()) for line in axes.lines):  # a logarithmic axis of nothing cannot be drawn
            axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.3, which="both", linewidth=0.5)
        axes.legend()
    fits.axhline(1, color="grey", linewidth=0.8)
    figure.suptitle(f"{plan.facts.name} on {plan.hardware.name}")
    return save_figure(figure, file)


def _lengths(case: Case) -> list[int]:
    """Twelve lengths per decade from 256 tokens to four times the context asked for, or the model's own."""
    most = max(4 * case.context, case.facts.context or 0, 1024)
    lengths, step = [256], 10 ** (1 / 12)
    while lengths[-1] < most:
        lengths.append(max(lengths[-1] + 1, round(lengths[-1] * step)))
    return lengths
