"""A public load generator, guidellm, where `pip install --target DIR guidellm` put it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

INSTALL = "python -m pip install --target DIR -c constraints.txt guidellm"
_PAUSE_S = 3600.0


@dataclass(frozen=True)
class Load:
    """What `clients` saw who asked one request after the other. Milliseconds, and tokens of all answers per second."""

    clients: int
    requests: int
    failed: int
    ttft_ms: float
    ttft_p95_ms: float
    itl_ms: float
    itl_p95_ms: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """For the JSON line."""
        return {"name": f"clients_{self.clients}", **asdict(self)}


@dataclass(frozen=True)
class Traffic:
    """Random prompts of `prompt` tokens and answers of `new`; each of `clients` together ask `requests` times."""

    clients: tuple[int, ...]
    requests: int
    prompt: int
    new: int


def measure_load(
    url: str, model: str, tokenizer: Path, traffic: Traffic, directory: Path | None
) -> list[Load]:
    """Let guidellm ask `model` at `url` for chat completions, with one count of clients after the other.

    `directory` is where guidellm is installed, if not in this environment. Raises `RuntimeError` if it fails.
    """
    loads = []
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        for clients in traffic.clients:
            command = _command(url, model, tokenizer, traffic, clients, report)
            done = subprocess.run(
                command,
                env=_environment(directory),
                cwd=scratch,
                capture_output=True,
                text=True,
                timeout=_PAUSE_S,
            )
            if done.returncode or not report.is_file():
                raise RuntimeError(
                    f"guidellm failed; it is installed with `{INSTALL}` and found with --loadgen DIR\n"
                    f"{done.stderr[-2000:]}"
                )
            loads.append(_load(clients, json.loads(report.read_text())))
            report.unlink()
    return loads


def _command(
    url: str, model: str, tokenizer: Path, traffic: Traffic, clients: int, report: Path
) -> list[str]:
    parts: dict[str, dict[str, Any]] = {
        "backend": {"kind": "openai_http", "target": url, "model": model, "http2": False},
        "profile": {"kind": "concurrent", "streams": [clients]},
        "constraint": {"kind": "max_requests", "count": traffic.requests * clients},
        "tokenizer": {"kind": "huggingface_auto", "model": str(tokenizer)},
        "data": {
            "kind": "synthetic_text",
            "prompt_tokens": traffic.prompt,
            "output_tokens": traffic.new,
        },
        "seed": {"kind": "static", "value": clients},  # other prompts, or they would be cached
        "output": {"kind": "json", "path": str(report)},
    }
    options = [item for name, value in parts.items() for item in (f"--{name}", json.dumps(value))]
    # -P: what lies in the directory it runs in is none of its modules.
    return [sys.executable, "-P", "-m", "guidellm", "run", *options, "--disable-console"]


def _environment(directory: Path | None) -> Mapping[str, str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if directory is not None:
        environment["PYTHONPATH"] = str(directory.resolve())
    return environment


def _load(clients: int, report: Mapping[str, Any]) -> Load:
    [benchmark] = report["benchmarks"]
    metrics = benchmark["metrics"]

    def of_answers(name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = metrics[name]["successful"]
        return found

    first, gaps = of_answers("time_to_first_token_ms"), of_answers("inter_token_latency_ms")
    totals = metrics["request_totals"]
    tokens = of_answers("output_token_count")["total_sum"]
    return Load(
        clients=clients,
        requests=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        ttft_ms=first["median"],
        ttft_p95_ms=first["percentiles"]["p95"],
        itl_ms=gaps["median"],
        itl_p95_ms=gaps["percentiles"]["p95"],
        tokens_per_s=tokens / benchmark["duration"],
    )
