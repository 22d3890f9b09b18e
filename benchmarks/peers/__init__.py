"""Other engines, each in a process of its own, where they are installed.

A peer is a module of this package that finds its engine, reads a job from stdin and prints figures as JSON. It gets
the GGUF file, since that is what these engines load, and the same token ids as everybody.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = {"llama.cpp": "benchmarks.peers.llama", "OpenVINO GenAI": "benchmarks.peers.openvino"}
NOT_INSTALLED = 3
"""Exit status of a script that finds no engine."""
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Job:
    """What a peer does. `rounds` holds prompts for each measured repetition and, first, for a warm-up."""

    gguf: Path
    threads: int
    decode: int
    batch_new: int
    rounds: list[dict[str, Any]]

    def to_json(self) -> str:
        """As the scripts read it."""
        return json.dumps(
            {
                "gguf": str(self.gguf),
                "threads": self.threads,
                "decode": self.decode,
                "batch_new": self.batch_new,
                "rounds": self.rounds,
            }
        )


@dataclass(frozen=True)
class PeerResults:
    """By engine: its figures by name of the line, None if it is not installed."""

    by_engine: Mapping[str, Mapping[str, float] | None] = field(default_factory=dict)

    def figures(self, line: str) -> dict[str, float | None]:
        """What each engine reached in `line`; engines that ran without it are left out."""
        found: dict[str, float | None] = {}
        for engine, figures in self.by_engine.items():
            if figures is None:
                found[engine] = None
            elif line in figures:
                found[engine] = figures[line]
        return found


def run_peers(
    job: Job, directory: Path | None, engines: Iterable[str] | None = None, timeout_s: float = 3600
) -> PeerResults:
    """Run the scripts of `engines` (all), one after the other.

    `directory` is where `pip install --target` put them, if not in this environment; its `bin` is searched too. An
    engine that fails says so on stderr and has no figures.
    """
    return PeerResults({name: _run(name, job, directory, timeout_s) for name in engines or SCRIPTS})


def _run(name: str, job: Job, directory: Path | None, timeout_s: float) -> dict[str, float] | None:
    environment = dict(os.environ, OMP_NUM_THREADS=str(job.threads))
    command = [sys.executable, "-m", SCRIPTS[name]]
    if directory is not None:
        command.append(str(directory.resolve()))
        environment["PATH"] = f"{directory.resolve() / 'bin'}:{environment.get('PATH', '')}"
    done = subprocess.run(
        command,
        input=job.to_json(),
        env=environment,
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode == NOT_INSTALLED:
        return None
    if done.returncode:
        print(f"{name} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return {}
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures
