"""What the peer scripts share. Nothing of Octavo is imported in their processes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from statistics import median
from typing import Any

from benchmarks.peers import NOT_INSTALLED


def search_also() -> None:
    """Import from the directory named on the command line too, after everything else."""
    sys.path += sys.argv[1:]


def require(module: str) -> None:
    """Exit if `module` is not installed."""
    if find_spec(module) is None:
        sys.exit(NOT_INSTALLED)


def read_job() -> dict[str, Any]:
    """The job from stdin."""
    job: dict[str, Any] = json.load(sys.stdin)
    return job


def timed(work: Callable[[], object]) -> float:
    """Seconds that `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def report(rounds: list[dict[str, float]]) -> None:
    """Print the medians of all rounds but the first, which was the warm-up."""
    print(json.dumps({name: median(r[name] for r in rounds[1:]) for name in rounds[0]}))
