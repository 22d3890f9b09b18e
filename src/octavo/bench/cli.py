"""`octavo bench`: commands whose modules are imported when they run, so that `--help` loads no torch."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(name="bench", help="Measure what the cache is worth on this machine.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def _notice(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@app.command()
def cache(
    model: Annotated[str, typer.Argument(help="Alias, directory, .gguf file or hub id.")],
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 512,
    dtype: Annotated[
        str, typer.Option(help="In float32 all three must say the same; bfloat16 is faster.")
    ] = "float32",
    num_threads: Annotated[
        int | None, typer.Option(help="Threads that compute.", show_default="the processors there are")
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory of the PNG.")] = Path(),
    as_json: Json = False,
) -> None:
    """Generate the same text without a cache, with transformers' cache and with Octavo's; draws cache.png.

    Without a cache everything is recomputed for every token: with the default lengths that takes minutes.
    """
    from octavo.bench.cache import measure_cache, save_plot

    report = measure_cache(
        model,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        dtype=dtype,
        num_threads=num_threads,
        notice=_notice,
    )
    plot = save_plot(report, out / "cache.png")
    if as_json:
        print(json.dumps({**report.to_dict(), "plot": str(plot)}))
        return
    from octavo.bench.show import show_cache
    from octavo.console import TableConsole

    show_cache(report, TableConsole())
    print(f"Drawn in {plot}")


@app.command()
def waste(
    trace: Annotated[
        Path | None,
        typer.Option(
            help="CSV with columns ContextTokens and GeneratedTokens, as in the Azure LLM inference traces.",
            show_default="made-up chat lengths",
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="How many, from the first.", min=1)] = 200,
    scale: Annotated[float, typer.Option(help="Multiply all lengths.", min=0.0)] = 0.25,
    block_size: Annotated[int, typer.Option(help="Positions per block.")] = 16,
    kv_cache_memory: Annotated[str, typer.Option(help="Size of the cache.")] = "256MiB",
    as_json: Json = False,
) -> None:
    """Compare blocks with contiguous reservation of the longest request: bytes reserved, used, wasted, and requests
    that fit. For the cache shape of SmolLM2 in bf16; no model is loaded."""
    from octavo.bench.waste import SMOLLM2_LAYERS, compare_waste, drawn_lengths, read_azure_trace
    from octavo.cache.layout import CacheLayout
    from octavo.config import EngineConfig, parse_bytes

    EngineConfig("smollm2", block_size=block_size)  # refuses a block size that an engine would refuse
    lengths = drawn_lengths(requests, scale) if trace is None else read_azure_trace(trace, requests, scale)
    layout = CacheLayout((SMOLLM2_LAYERS,), block_size, "bf16")
    report = compare_waste(lengths, layout, parse_bytes(kv_cache_memory, "kv_cache_memory"))
    if as_json:
        contiguous, blocks = (
            {**asdict(a), "wasted": a.wasted, "waste": a.waste} for a in (report.contiguous, report.blocks)
        )
        print(json.dumps({**asdict(report), "contiguous": contiguous, "blocks": blocks}))
        return
    from octavo.bench.show import show_waste
    from octavo.console import TableConsole

    show_waste(report, TableConsole())
