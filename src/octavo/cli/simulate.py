"""`octavo simulate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.show import notice
from octavo.errors import ConfigError

CACHE_ONLY = ("trace", "cache_only", "capacity", "cache_policy", "requests", "as_json")
"""What `--cache-only` reads."""


def simulate(
    ctx: typer.Context,
    trace: Annotated[
        Path,
        typer.Argument(metavar="TRACE", help="Mooncake JSONL, a request log of octavo serve, or Azure CSV."),
    ],
    model: Annotated[
        str | None, typer.Option(metavar="MODEL", help="As in octavo plan.", show_default=False)
    ] = None,
    hardware: Annotated[
        str, typer.Option(metavar="NAME", help="One replica: this, cpu, or a device such as H100-80GB.")
    ] = "this",
    replicas: Annotated[str, typer.Option(metavar="N", help="How many; several with commas.")] = "1",
    routing: Annotated[
        str,
        typer.Option(metavar="NAME", help="round-robin, least-loaded, prefix; several with commas."),
    ] = "round-robin",
    cache_only: Annotated[
        bool,
        typer.Option(
            "--cache-only", help="Hits alone: each request ends before the next, blocks as in the trace."
        ),
    ] = False,
    capacity: Annotated[
        str | None,
        typer.Option(
            metavar="BLOCKS",
            help="Cache of a replica in sealed blocks, e.g. 10k; several with commas.",
            show_default="what fits; unlimited with --cache-only",
        ),
    ] = None,
    cache_policy: Annotated[
        str, typer.Option(metavar="NAME", help="lru, cost; several with commas.")
    ] = "lru",
    kv_cache_dtype: Annotated[
        str, typer.Option(metavar="FORMAT", help="As in octavo plan; several with commas.")
    ] = "bf16",
    weights: Annotated[
        str | None, typer.Option(metavar="FORMAT", help="As in octavo plan.", show_default=False)
    ] = None,
    kv_budget: Annotated[
        str | None, typer.Option(metavar="SHARE|SIZE", help="As in octavo plan.", show_default=False)
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="Positions per block; large ones simulate faster.",
            show_default="16, or 32 for 8 bits and less",
        ),
    ] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at a time.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens computed per step.")] = 512,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help="The first N requests.", show_default="all")
    ] = None,
    speed: Annotated[float, typer.Option(help="How much faster than in the trace they come.")] = 1.0,
    num_threads: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Take the calibration with so many threads.",
            show_default="the processors there are",
        ),
    ] = None,
    processes: Annotated[int, typer.Option(help="Processes; only round-robin uses more than one.")] = 1,
    no_lifetimes: Annotated[
        bool,
        typer.Option("--no-lifetimes", help="Do not follow how long blocks live; twice as fast or more."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it, e.g. simulation.png.", show_default=False)
    ] = None,
) -> None:
    """Replay a trace through the real scheduler and cache. A cost model stands in for the forward pass."""
    from octavo.console import TableConsole
    from octavo.figures import picture_file
    from octavo.simulate import report, show

    if cache_only:
        _check_cache_only(ctx)
    arrivals = report.load(trace, requests, speed)
    if cache_only:
        found = report.run_cache_only(arrivals, capacity, cache_policy)
        if as_json:
            rows = [entry.to_dict() for entry in found]
            answer = {**rows[0], "trace": str(trace), **({"rows": rows} if len(rows) > 1 else {})}
            print(json.dumps(answer, allow_nan=False))
        else:
            show.show_cache_only(found, TableConsole())
        return
    if model is None:
        raise ConfigError("model: say which model is served, e.g. --model llama-3.1-8b", param="model")
    if plot is not None:
        plot = picture_file(plot)  # before the work is done
    made = report.run(
        trace,
        arrivals,
        model,
        hardware,
        kv_cache_dtype=kv_cache_dtype,
        capacity=capacity,
        cache_policy=cache_policy,
        replicas=replicas,
        routing=routing,
        weights=weights,
        kv_budget=kv_budget,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=num_threads,
        processes=processes,
        lifetimes=not no_lifetimes,
        notice=notice,
    )
    if plot is not None:
        show.save_plot(made.rows, plot)
    if as_json:
        print(json.dumps(made.to_dict(), allow_nan=False))
        return
    show.show_report(made, TableConsole())
    if plot is not None:
        print(f"Drawn in {plot}")


def _check_cache_only(ctx: typer.Context) -> None:
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        # By name: the class has changed its home between versions of typer.
        if name not in CACHE_ONLY and source is not None and source.name != "DEFAULT":
            raise ConfigError(f"{name}: --cache-only does not read it; leave it out", param=name)
