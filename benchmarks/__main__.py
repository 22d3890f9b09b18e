"""`python -m benchmarks [SUITE]`: all suites, or one. The last line of the output is one JSON object."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks import core, formats, serving, sharing
from benchmarks.data import AZURE_TRACE
from benchmarks.measure import Line, markdown_rows, result_table
from benchmarks.peers import Job, PeerResults, run_peers
from benchmarks.subjects import Subjects
from octavo.bench.cache import measure_cache
from octavo.bench.limits import MachineLimits, measure_limits
from octavo.bench.show import limits_line
from octavo.bench.waste import SMOLLM2_LAYERS, compare_waste, read_azure_trace
from octavo.cache.layout import CacheLayout
from octavo.config import Environment
from octavo.kernels import native
from octavo.model.pull import ALIASES, pull

app = typer.Typer(add_completion=False, help="Octavo's benchmarks. Without a suite all of them run.")

Model = Annotated[str, typer.Option(help="Alias, directory, .gguf file or hub id.")]
Quick = Annotated[
    bool, typer.Option("--quick", help="Tiny sizes, to see that it runs; no requirement applies.")
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print rows for the README.")]
PeerDirectory = Annotated[
    Path | None,
    typer.Option(
        "--peers", help="Where `pip install --target` put other engines.", show_default="this environment"
    ),
]
Dtype = Annotated[str, typer.Option(help="Compute type of Octavo and transformers.")]
Threads = Annotated[
    int | None, typer.Option(help="Threads of every engine.", show_default="the processors there are")
]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def run_core(
    model: str, dtype: str, sizes: core.Sizes, only: list[str], peers: Path | None, limits: MachineLimits
) -> list[Line]:
    """The lines of the core suite, in order; those named in `only`, if any are."""
    unknown = set(only) - set(core.LINES)
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: known are {', '.join(core.LINES)}", param_hint="--only"
        )
    on = Subjects.load(model, dtype, limits)
    found = (
        PeerResults()
        if set(only) - {"decode", "ttft", "ttft_long", "batch"}
        else _peers(model, on, sizes, peers)
    )
    lines = []
    for name, measure in core.LINES.items():
        if not only or name in only:
            _say(f"{name} ...")
            lines += measure(on, sizes, found)
    return lines


def _peers(model: str, on: Subjects, sizes: core.Sizes, directory: Path | None) -> PeerResults:
    gguf = pull(model, Environment.read().home, _say) if model in ALIASES else Path(model)
    if gguf.suffix != ".gguf":
        return PeerResults()
    rounds: list[dict[str, Any]] = [
        {
            "prompt": on.prompts.next(sizes.prompt),
            "prompt_again": on.prompts.next(sizes.prompt),
            "long_prompt": on.prompts.next(sizes.long_prompt),
            "batch": on.batch(sizes.batch, sizes.batch_prompt),
        }
        for _ in range(sizes.repeats + 1)
    ]
    _say("other engines ...")
    return run_peers(Job(gguf, on.engine.num_threads, sizes.decode, sizes.batch_new, rounds), directory)


def run_sharing(
    model: str,
    dtype: str,
    sizes: sharing.Sizes,
    only: list[str],
    peers: Path | None,
    limits: MachineLimits,
) -> list[Line]:
    """The lines of the sharing suite, in order; those named in `only`, if any are."""
    unknown = set(only) - set(sharing.LINES)
    if unknown:
        raise typer.BadParameter(
            f"{', '.join(sorted(unknown))}: known are {', '.join(sharing.LINES)}", param_hint="--only"
        )
    apart = Subjects.load(model, dtype, limits)
    found = PeerResults()
    if model in ALIASES and (not only or "cold_prefix" in only):
        gguf = pull(model, Environment.read().home, _say)
        rounds = [{"shared": sharing.shared_batch(apart, sizes)} for _ in range(sizes.repeats + 1)]
        job = Job(gguf, apart.engine.num_threads, 0, sizes.new, rounds)
        found = run_peers(job, peers, ["OpenVINO GenAI"])
    on = sharing.Sharing.of(apart)
    lines = []
    for name, measure in sharing.LINES.items():
        if not only or name in only:
            _say(f"{name} ...")
            lines += measure(on, sizes, found)
    return lines


def run_cache(
    model: str, limits: MachineLimits, prompt_tokens: int = 256, new_tokens: int = 512
) -> list[Line]:
    """The lesson of the cache: one generation with it and without. Takes minutes."""
    report = measure_cache(
        model, prompt_tokens=prompt_tokens, new_tokens=new_tokens, limits=limits, notice=_say
    )
    others = {run.name: run.total_s for run in report.runs if run is not report.octavo}
    title = f"{new_tokens} tokens after {prompt_tokens} in float32"
    return [Line("cache", title, "s", report.octavo.total_s, others, "no cache", 10.0, lower_is_better=True)]


def run_waste() -> list[Line]:
    """The requirement is on the share of bytes in use, not on time."""
    if not AZURE_TRACE.exists():
        _say(f"waste: skipped, there is no {AZURE_TRACE}")
        return []
    requests = read_azure_trace(AZURE_TRACE, requests=200, scale=0.25)
    report = compare_waste(requests, CacheLayout((SMOLLM2_LAYERS,), 16, "bf16"), 256 << 20)
    return [
        Line(
            "waste",
            "cache bytes held and not used, 200 requests of the Azure trace",
            "%",
            100 * report.blocks.waste,
            {"at most": 4.0, "contiguous": 100 * report.contiguous.waste},
            "at most",
            1.0,
            lower_is_better=True,
        )
    ]


def _finish(
    suites: dict[str, list[Line]], limits: MachineLimits | None, markdown: bool, facts: dict[str, Any]
) -> None:
    console = Console(stderr=markdown)
    if limits is not None:
        console.print(limits_line(limits))
    for name, lines in suites.items():
        console.print(result_table(name, lines))
        if markdown:
            print("\n".join(markdown_rows(lines)))
    result = {
        **facts,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "kernels": native.path(),
        "limits": None if limits is None else asdict(limits),
        "suites": {name: [line.to_dict() for line in lines] for name, lines in suites.items()},
    }
    print(json.dumps(result))


@app.command(name="core")
def core_suite(
    model: Model = "smollm2",
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(core.LINES)}; may be repeated.")
    ] = None,
    quick: Quick = False,
    markdown: Markdown = False,
    peers: PeerDirectory = None,
) -> None:
    """One model against transformers, other engines and this machine's limits."""
    native.set_num_threads(threads or native.DEFAULT_THREADS)
    limits = measure_limits()
    lines = run_core(model, dtype, core.QUICK if quick else core.Sizes(), only or [], peers, limits)
    _finish({"core": lines}, limits, markdown, {"model": model, "dtype": dtype, "quick": quick})


@app.command(name="sharing")
def sharing_suite(
    model: Model = "smollm2",
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    only: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(sharing.LINES)}; may be repeated.")
    ] = None,
    quick: Quick = False,
    markdown: Markdown = False,
    peers: PeerDirectory = None,
) -> None:
    """What a prefix costs that somebody has computed before. Takes 3 GiB for its caches."""
    native.set_num_threads(threads or native.DEFAULT_THREADS)
    limits = measure_limits()
    sizes = sharing.QUICK if quick else sharing.Sizes()
    lines = run_sharing(model, dtype, sizes, only or [], peers, limits)
    _finish({"sharing": lines}, limits, markdown, {"model": model, "dtype": dtype, "quick": quick})


@app.command(name="formats")
def formats_suite(
    model: Model = "smollm2",
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    quick: Quick = False,
    markdown: Markdown = False,
) -> None:
    """Decode over caches in every format. Takes 5 GiB, and minutes to fill them."""
    native.set_num_threads(threads or native.DEFAULT_THREADS)
    limits = measure_limits()
    lines = formats.measure(model, dtype, formats.QUICK if quick else formats.Sizes(), _say)
    _finish({"formats": lines}, limits, markdown, {"model": model, "dtype": dtype, "quick": quick})


@app.command(name="cache")
def cache_suite(model: Model = "smollm2", threads: Threads = None, markdown: Markdown = False) -> None:
    """One generation with and without a cache; takes minutes. `octavo bench cache` tells more."""
    native.set_num_threads(threads or native.DEFAULT_THREADS)
    limits = measure_limits()
    _finish({"cache": run_cache(model, limits)}, limits, markdown, {"model": model})


@app.command()
def waste(markdown: Markdown = False) -> None:
    """Blocks against contiguous reservation, on a trace."""
    _finish({"waste": run_waste()}, None, markdown, {})


app.command(name="serving")(serving.suite)


@app.callback(invoke_without_command=True)
def all_suites(
    context: typer.Context,
    model: Model = "smollm2",
    dtype: Dtype = "bfloat16",
    threads: Threads = None,
    markdown: Markdown = False,
    peers: PeerDirectory = None,
) -> None:
    """Octavo's benchmarks. Without a suite all but `serving` run; options go behind the suite's name."""
    if context.invoked_subcommand is not None:
        return
    native.set_num_threads(threads or native.DEFAULT_THREADS)
    limits = measure_limits()
    suites = {
        "core": run_core(model, dtype, core.Sizes(), [], peers, limits),
        "sharing": run_sharing(model, dtype, sharing.Sizes(), [], peers, limits),
        "formats": formats.measure(model, dtype, formats.Sizes(), _say),
        "waste": run_waste(),
        "cache": run_cache(model, limits),
    }
    _finish(suites, limits, markdown, {"model": model, "dtype": dtype, "quick": False})


if __name__ == "__main__":
    app()
