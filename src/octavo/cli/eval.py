"""`octavo eval`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.show import notice
from octavo.config import EngineConfig


def eval_formats(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, directory, .gguf file or hub id.")],
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="FORMATS",
            help="With commas: auto, bf16, f32, fp8, int8, int4, int2, k=int8,v=int4 ...",
        ),
    ] = "auto,fp8,int8,int4,int2",
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Text to measure on.", show_default="a short one that is shipped"),
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(
            metavar="TOKENS",
            help="The text is cut into windows of this length.",
            show_default="2048, or the model's context",
        ),
    ] = None,
    max_windows: Annotated[
        int | None, typer.Option(metavar="N", help="No more windows than this.", show_default="all")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Weights and arithmetic: auto, bfloat16, float32.")
    ] = EngineConfig.dtype,
    block_size: Annotated[
        int | None, typer.Option(metavar="TOKENS", help="Positions per block.", show_default="32")
    ] = None,
    max_num_batched_tokens: Annotated[
        str, typer.Option(metavar="TOKENS", help="Tokens computed per step.")
    ] = str(EngineConfig.max_num_batched_tokens),
    num_threads: Annotated[
        int | None, typer.Option(help="Threads that compute.", show_default="the processors there are")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw it too, e.g. eval.png.", show_default=False)
    ] = None,
) -> None:
    """What smaller cache formats cost MODEL: perplexity, divergence, agreement, retrieval, JSON."""
    from octavo.evaluate.report import evaluate
    from octavo.figures import picture_file

    if plot is not None:
        plot = picture_file(plot)  # before the work is done
    found = evaluate(
        model,
        kv_cache_dtype,
        text=text,
        window=window,
        max_windows=max_windows,
        notice=notice,
        dtype=dtype,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        num_threads=num_threads,
    )
    if plot is not None:
        from octavo.evaluate.plot import save_plot

        save_plot(found, plot)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    from octavo.console import TableConsole
    from octavo.evaluate.show import show_evaluation

    show_evaluation(found, TableConsole())
    if plot is not None:
        print(f"Drawn in {plot}")
