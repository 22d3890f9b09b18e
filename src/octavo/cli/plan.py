"""`octavo plan`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.show import notice


def plan(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="Name such as llama-3-70b, directory, config.json or hub id."),
    ],
    hardware: Annotated[
        str, typer.Option(metavar="NAME", help="this, cpu, or devices such as 8xH100-80GB.")
    ] = "this",
    context: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="Tokens per request, e.g. 32k; several with commas.",
            show_default="32k, or what the model was made for",
        ),
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="FORMAT", help="bf16, f32, fp8, int8, int4, int2 or k=int8,v=int4; several with commas."
        ),
    ] = "bf16",
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="FORMAT", help="bf16, f32, fp8, int4, mxfp4.", show_default="as they are published"
        ),
    ] = None,
    kv_budget: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE|SIZE",
            help="Cache: a share of all memory such as 0.5, or a size such as 100GiB.",
            show_default="what weights leave of 90 % of an accelerator, or half of what they leave of RAM",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(metavar="N", help="Requests at a time.", show_default="as many as fit"),
    ] = None,
    output: Annotated[
        str | None,
        typer.Option(
            metavar="TOKENS",
            help="How many of a request's tokens are generated.",
            show_default="256, or half of the context",
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS", help="Positions per block.", show_default="16, or 32 for 8 bits and less"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the plan, e.g. plan.png.", show_default=False)
    ] = None,
) -> None:
    """How many requests of what length a machine carries. Also what limits it and what would help; loads no weights."""
    from octavo.plan.report import make_plan

    made = make_plan(
        model,
        hardware,
        context=context,
        kv_cache_dtype=kv_cache_dtype,
        weights=weights,
        kv_budget=kv_budget,
        concurrency=concurrency,
        output=output,
        block_size=block_size,
        notice=notice,
    )
    if plot is not None:
        from octavo.plan.plot import save_plot

        plot = save_plot(made, plot)
    if as_json:
        print(json.dumps(made.to_dict()))
        return
    from octavo.console import TableConsole
    from octavo.plan.show import show_plan

    show_plan(made, TableConsole())
    if plot is not None:
        print(f"Drawn in {plot}")
