"""An evaluation as a picture: what the bytes of a format buy."""

from __future__ import annotations

from pathlib import Path

from octavo.evaluate.report import Evaluation
from octavo.figures import save_figure


def save_plot(evaluation: Evaluation, file: Path) -> Path:
    """Draw into `file`, whose suffix says the kind of picture; returns the file that was written. Raises
    `ConfigError` if it cannot be."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import PercentFormatter

    figure, (perplexity, divergence, agreement) = plt.subplots(
        1, 3, figsize=(13, 4.2), sharex=True, layout="constrained"
    )
    for row in evaluation.rows:
        size, losses = row.layout.bytes_per_token, row.losses
        dots = {"marker": "o", "linestyle": "none"}
        color = perplexity.plot(size, row.perplexity_increase, label=row.layout.format, **dots)[0].get_color()
        if losses.kl_mean > 0:  # the logarithm of nothing has no place
            divergence.plot([size, size], [losses.kl_mean, losses.kl_p99], color=color, linewidth=0.8)
            divergence.plot(size, losses.kl_mean, color=color, **dots)
            divergence.plot(size, losses.kl_p99, color=color, marker="_", linestyle="none")
        agreement.plot(size, losses.top1_agreement, color=color, **dots)
    perplexity.set(title="Perplexity", ylabel="above full precision")
    divergence.set(
        title="KL divergence, mean and 99th percentile", ylabel="nats from full precision", yscale="log"
    )
    agreement.set(title="Same likeliest token", ylabel="share of positions")
    for axes in (perplexity, agreement):
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (perplexity, divergence, agreement):
        axes.set(xlabel="bytes per token", xlim=(0, None))
        axes.grid(alpha=0.3, linewidth=0.5)
    perplexity.legend()
    figure.suptitle(f"{evaluation.model}, {evaluation.positions:,} tokens of {evaluation.text} text")
    return save_figure(figure, file)
