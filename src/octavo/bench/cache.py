"""`octavo bench cache`: the lesson of the cache, measured on one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch

from octavo.bench.baseline import Baseline
from octavo.bench.generate import Generation, answer, with_octavo, with_transformers, without_cache
from octavo.bench.limits import MachineLimits, measure_limits
from octavo.bench.text import prompt_ids
from octavo.bench.work import Work, model_work
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.model.pull import Notice

GROWTH_POINTS = 5
_WARM_UP_TOKENS = 4


@dataclass(frozen=True)
class Phase:
    """Prefill or decode of one run: rates, and their shares of what the machine can do at best."""

    seconds: float
    tokens_per_s: float
    gflops: float
    gflops_share: float
    gbytes_per_s: float
    gbytes_share: float

    @classmethod
    def of(cls, tokens: int, seconds: float, work: Work, flops_limit: float, read_limit: float) -> Phase:
        """`tokens` took `work`; limits are per second."""
        flops, read = work.flops / seconds, work.bytes_read / seconds
        return cls(seconds, tokens / seconds, flops / 1e9, flops / flops_limit, read / 1e9, read / read_limit)


@dataclass(frozen=True)
class Growth:
    """Around a sequence of `length` tokens: milliseconds for one more, and the positions computed for it and since the
    start."""

    length: int
    ms_per_token: float
    positions: int
    positions_so_far: int


@dataclass(frozen=True)
class CacheReport:
    """What `measure_cache` found. `same_tokens[name]` is how many tokens a run has in common with Octavo's, from the
    first; all of them in float32, unless something is wrong."""

    model: str
    dtype: str
    prompt_tokens: int
    new_tokens: int
    limits: MachineLimits
    runs: list[Generation]
    prefill: dict[str, Phase]
    decode: dict[str, Phase]
    same_tokens: dict[str, int]

    @property
    def octavo(self) -> Generation:
        """The run with Octavo's cache."""
        return self.runs[-1]

    def times_faster(self, name: str) -> float:
        """How many times faster than run `name` the whole generation was with Octavo."""
        return next(r.total_s for r in self.runs if r.name == name) / self.octavo.total_s

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "model": self.model,
            "dtype": self.dtype,
            "prompt_tokens": self.prompt_tokens,
            "new_tokens": self.new_tokens,
            "limits": asdict(self.limits),
            "runs": [
                {
                    "name": run.name,
                    "seconds": run.total_s,
                    "tokens_per_s": run.tokens_per_s,
                    "octavo_times_faster": self.times_faster(run.name),
                    "prefill": asdict(self.prefill[run.name]),
                    "decode": asdict(self.decode[run.name]),
                    "growth": [asdict(point) for point in growth(run, self.prompt_tokens)],
                    "same_tokens": self.same_tokens[run.name],
                }
                for run in self.runs
            ],
        }


def measure_cache(
    model: str,
    *,
    prompt_tokens: int = 256,
    new_tokens: int = 512,
    dtype: str = "float32",
    num_threads: int | None = None,
    limits: MachineLimits | None = None,
    notice: Notice = lambda text: None,
) -> CacheReport:
    """Generate `new_tokens` greedy tokens three times, one run after the other on the same threads.

    The reference run recomputes everything per token, so this takes minutes for hundreds of tokens. Raises what loading
    raises, and `ConfigError` where the lengths do not fit the model.
    """
    if prompt_tokens < 1 or new_tokens < 2:
        raise ConfigError(
            f"prompt_tokens={prompt_tokens} and new_tokens={new_tokens}: give at least 1 and 2",
            param="new_tokens" if new_tokens < 2 else "prompt_tokens",
        )
    total = prompt_tokens + new_tokens
    engine = Engine(
        EngineConfig(
            model=model,
            dtype=dtype,
            max_model_len=total + 1,
            max_num_batched_tokens=total,
            enable_prefix_caching=False,
            num_threads=num_threads,
        ),
        notice=notice,
    )
    loaded = engine.loaded
    work = model_work(loaded.path, loaded.spec, engine.layout)
    baseline = Baseline(loaded.path, loaded.torch_dtype)
    prompt = prompt_ids(engine.tokenizer, prompt_tokens, vocab_size=loaded.spec.vocab_size)
    _warm_up(engine, baseline, prompt)
    notice("Measuring this machine's limits ...")
    limits = limits or measure_limits()
    ways: list[Callable[[], Generation]] = [
        lambda: without_cache(engine, work, prompt, new_tokens),
        lambda: with_transformers(baseline, work, prompt, new_tokens),
        lambda: with_octavo(engine, work, prompt, new_tokens),
    ]
    runs = []
    for way in ways:
        runs.append(way())
        notice(f"{runs[-1].name}: {runs[-1].total_s:.2f} s")
    return _report(model, loaded.torch_dtype, prompt_tokens, new_tokens, limits, runs)


def _report(
    model: str, dtype: torch.dtype, prompt: int, new: int, limits: MachineLimits, runs: list[Generation]
) -> CacheReport:
    caps = limits.flops_per_s(dtype), limits.read_bytes_per_s
    return CacheReport(
        model=model,
        dtype=str(dtype).removeprefix("torch."),
        prompt_tokens=prompt,
        new_tokens=new,
        limits=limits,
        runs=runs,
        prefill={r.name: Phase.of(prompt, r.seconds[0], r.prefill, *caps) for r in runs},
        decode={r.name: Phase.of(new - 1, r.decode_s, r.decode, *caps) for r in runs},
        same_tokens={r.name: common_prefix(r.token_ids, runs[-1].token_ids) for r in runs},
    )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens are equal before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def growth(run: Generation, prompt_tokens: int) -> list[Growth]:
    """`GROWTH_POINTS` points along the run, after the first token; times are medians of an eighth of it."""
    last = len(run.seconds) - 1
    so_far = list(accumulate(run.positions))
    radius = max(1, last // (2 * 8))
    points = []
    for i in sorted({1 + round(k * (last - 1) / (GROWTH_POINTS - 1)) for k in range(GROWTH_POINTS)}):
        nearby = run.seconds[max(1, i - radius) : i + radius + 1]
        points.append(Growth(prompt_tokens + i, 1000 * median(nearby), run.positions[i], so_far[i]))
    return points


def _warm_up(engine: Engine, baseline: Baseline, prompt: list[int]) -> None:
    answer(engine, prompt, min(_WARM_UP_TOKENS, engine.scheduler.limit - len(prompt)))
    baseline.start([prompt])
    baseline.step()


def save_plot(report: CacheReport, path: Path) -> Path:
    """Draw time and work against length into the PNG `path`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    time_axis, work_axis = figure.subplots(1, 2)
    for run, style in zip(report.runs, ("-", "-", "--"), strict=True):  # two of the lines lie on each other
        lengths = range(report.prompt_tokens + 1, report.prompt_tokens + len(run.seconds))
        time_axis.plot(lengths, [1000 * s for s in run.seconds[1:]], style, label=run.name)
        work_axis.plot(lengths, list(accumulate(run.positions))[1:], style, label=run.name)
    time_axis.set(title="Time of one more token", ylabel="ms", yscale="log")
    work_axis.set(title="Work so far", ylabel="positions computed", yscale="log")
    for axis in (time_axis, work_axis):
        axis.set_xlabel("tokens in the sequence")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.suptitle(f"{report.model}, {report.dtype}, {report.limits.threads} threads")
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.print_png(path)
    return path
