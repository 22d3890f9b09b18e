"""The serving suite: `octavo serve` as its clients see it."""

from __future__ import annotations

import json
import platform
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.crowd import Tally, crowd
from benchmarks.data import Prompts
from benchmarks.loadgen import INSTALL, Load, Traffic, measure_load
from benchmarks.measure import Line, alternate, markdown_rows, result_table
from octavo.config import Environment
from octavo.model.source import resolve
from octavo.model.tokenizer import load_tokenizer

READY_S = 600.0


@dataclass(frozen=True)
class Sizes:
    """The load, and a crowd that is larger than the server takes, which asks for `prompt` and `new` tokens, up to half
    of that more or less. `goal` is the requirement, where it applies."""

    traffic: Traffic
    running: int
    waiting: int
    crowd: int
    asked: int
    prompt: int
    new: int
    repeats: int
    goal: float | None


FULL = Sizes(Traffic((1, 8, 32), 6, 256, 128), 16, 32, 200, 400, 128, 64, 3, goal=0.9)
QUICK = Sizes(Traffic((1, 2), 2, 32, 8), 2, 2, 8, 16, 16, 8, 1, goal=None)


@contextmanager
def served(model: str, dtype: str, *flags: str) -> Iterator[str]:
    """The address of `octavo serve`, once it is ready. It is told to end afterwards."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "octavo.cli", "serve", model, "--port", str(port), "--dtype", dtype]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([*command, *flags], stderr=log)
        try:
            _await(process, url)
            yield url
        except RuntimeError as error:
            log.seek(0)
            raise RuntimeError(f"{error}\n{log.read()[-2000:].decode(errors='replace')}") from error
        finally:
            process.terminate()
            process.wait()


def _await(process: subprocess.Popen[bytes], url: str) -> None:
    end = time.monotonic() + READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"octavo serve has ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health"):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError(f"octavo serve was not ready after {READY_S:g} s")


def overload(url: str, model: str, prompts: Prompts, sizes: Sizes) -> tuple[Line, Tally]:
    """Answers per second with more clients than the server takes against as many as it just takes.

    The tally is that of all crowds that were too large. Raises `RuntimeError` if a request was lost.
    """
    whole = Tally()

    def tokens_per_s(clients: int) -> float:
        # Of many lengths, or those who began together would end and be replaced together, which is faster.
        lengths = [(50 + i * 37 % 101) / 100 for i in range(sizes.asked)]
        asked = [(prompts.next(round(sizes.prompt * by)), round(sizes.new * by)) for by in lengths]
        tally = crowd(url, model, asked, clients)
        if tally.lost:
            raise RuntimeError(f"{len(tally.lost)} requests were lost, the first with {tally.lost[0]}")
        if clients == sizes.crowd:
            whole.answers += tally.answers
            whole.refusals += tally.refusals
        return tally.tokens_per_s

    fits = sizes.running + sizes.waiting
    found = alternate(
        {"crowd": lambda: tokens_per_s(sizes.crowd), "no overload": lambda: tokens_per_s(fits)}, sizes.repeats
    )
    title = f"tokens of answers, {sizes.crowd} clients where {sizes.running} run and {sizes.waiting} wait"
    others = {"no overload": found["no overload"]}
    return Line("overload", title, "tokens/s", found["crowd"], others, "no overload", sizes.goal), whole


def load_table(loads: Sequence[Load]) -> Table:
    """Loads for people."""
    table = Table(title="load", title_justify="left")
    columns = ("clients", "requests", "failed", "TTFT ms", "p95", "inter-token ms", "p95", "tokens/s")
    for column in columns:
        table.add_column(column, justify="right")
    for load in loads:
        times = (load.ttft_ms, load.ttft_p95_ms, load.itl_ms, load.itl_p95_ms)
        table.add_row(
            *(str(count) for count in (load.clients, load.requests, load.failed)),
            *(f"{ms:.1f}" for ms in times),
            f"{load.tokens_per_s:.1f}",
        )
    return table


def suite(
    model: Annotated[str, typer.Option(help="Alias, directory, .gguf file or hub id.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="Compute type.")] = "bfloat16",
    loadgen: Annotated[
        Path | None,
        typer.Option(help=f"Where guidellm is: {INSTALL}.", show_default="this environment"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes, to see that it runs; no requirement applies.")
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print rows for the README.")] = False,
) -> None:
    """`octavo serve` under load: first tokens, gaps, throughput, and what an overload costs."""
    sizes = QUICK if quick else FULL
    path = resolve(model, Environment.read().home)
    tokenizer = load_tokenizer(path)
    with served(model, dtype) as url:
        loads = measure_load(url, model, path, sizes.traffic, loadgen)
    flags = ("--max-num-seqs", str(sizes.running), "--max-waiting", str(sizes.waiting))
    with served(model, dtype, *flags) as url:
        line, tally = overload(url, model, Prompts(tokenizer, tokenizer.vocab_size), sizes)
    console = Console(stderr=markdown)
    console.print(load_table(loads))
    console.print(result_table("overload", [line]))
    console.print(f"{tally.answers} answers after {tally.refusals} refusals, none lost")
    if markdown:
        print("\n".join([*_markdown(loads), "", *markdown_rows([line])]))
    result: dict[str, Any] = {
        "model": model,
        "dtype": dtype,
        "quick": quick,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.machine(),
        "suites": {"serving": [*(load.to_dict() for load in loads), line.to_dict()]},
    }
    print(json.dumps(result))


def _markdown(loads: Sequence[Load]) -> list[str]:
    rows = ["| clients | first token (p95) | between tokens (p95) | tokens/s |", "|---:|---:|---:|---:|"]
    for load in loads:
        rows.append(
            f"| {load.clients} | {load.ttft_ms:.0f} ms ({load.ttft_p95_ms:.0f}) "
            f"| {load.itl_ms:.1f} ms ({load.itl_p95_ms:.1f}) | {load.tokens_per_s:.0f} |"
        )
    return rows
