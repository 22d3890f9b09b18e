"""`python -m benchmarks.simulation real|scale`: simulations against the running engine, and how far they reach.

The last line of the output is one JSON object.
"""

from __future__ import annotations

import json
import random
import resource
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer

from benchmarks.data import AZURE_TRACE
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.plan.report import make_plan
from octavo.simulate.calibrate import fit_steps, time_steps
from octavo.simulate.cost import RooflineCost
from octavo.simulate.loop import Look, simulate
from octavo.simulate.measure import Measures
from octavo.simulate.replay import replay
from octavo.simulate.replica import ReplicaSpec
from octavo.simulate.synthetic import Synthetic
from octavo.simulate.trace import Arrival, read_trace

# The second is the largest of the children; together they hold no more than as many times that.
_WHO = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)

app = typer.Typer(add_completion=False, help=__doc__)

# What a simulation may be off by, as parts of the real figure.
GOALS = {"output_tokens_per_s": 0.05, "ttft mean": 0.10, "itl mean": 0.10, "ttft p95": 0.20, "itl p95": 0.20}


@app.command()
def real(
    minutes: Annotated[float, typer.Option(help="Length of each replay.")] = 10.0,
    model: Annotated[str, typer.Option(help="Alias, directory or hub id.")] = "smollm2",
) -> None:
    """Replay an Azure slice and a workload with shared prefixes, then simulate both with one calibration. A third of
    that is made before, a third between and a third after the replays: a machine's pace changes by the minute."""
    engine = Engine(EngineConfig.create(model, kv_cache_memory="1GiB"))
    workloads = {"azure": azure(60 * minutes), "shared": shared(60 * minutes)}
    turns, measured = len(workloads) + 1, dict[str, Measures]()
    samples = time_steps(engine, turn=0, turns=turns)
    for turn, (name, arrivals) in enumerate(workloads.items(), start=1):
        engine.cache.reset()
        measured[name] = replay(engine, arrivals)
        print(f"{name}: {measured[name].finished} requests replayed", flush=True)
        samples += time_steps(engine, turn=turn, turns=turns)
    spec = ReplicaSpec(
        engine.layout,
        engine.cache.arena.bytes_total,
        fit_steps(engine, samples),
        max_num_seqs=engine.config.max_num_seqs,
        max_num_batched_tokens=engine.config.max_num_batched_tokens,
        max_model_len=engine.loaded.spec.max_position_embeddings,
    )
    lines = {
        name: _compare(name, measured[name], simulate(arrivals, spec)) for name, arrivals in workloads.items()
    }
    print(json.dumps(lines))


def azure(seconds: float) -> list[Arrival]:
    """The conversation trace for a machine some sixteen times smaller: every second request, an eighth as long. Two
    thirds of the time there is work then; with much less, percentiles show the jitter of the machine alone."""
    sparse = read_trace(AZURE_TRACE)[::2]
    return [
        replace(a, index=i, prompt=max(1, a.prompt // 8), output=max(1, a.output // 8))
        for i, a in enumerate(a for a in sparse if a.at < seconds)
    ]


def shared(seconds: float, rate: float = 0.5) -> list[Arrival]:
    """Prompts that begin with one of four prefixes of 256 tokens."""
    draw, at, made = random.Random(1), 0.0, list[Arrival]()
    while (at := at + draw.expovariate(rate)) < seconds:
        prompt, output = 256 + draw.randint(20, 120), draw.randint(5, 60)
        made.append(Arrival(len(made), at, prompt, output, 256, (draw.randint(0, 3),)))
    return made


def _compare(name: str, measured: Measures, simulated: Measures) -> dict[str, Any]:
    found, within = {}, True
    for goal, limit in GOALS.items():
        a, b = (_figure(m, goal) for m in (measured, simulated))
        off = b / a - 1
        within &= abs(off) <= limit
        found[goal] = {"real": a, "simulated": b, "off": off, "limit": limit}
        print(
            f"{name:8} {goal:20} real {a:.4g}, simulated {b:.4g}: {off:+.1%} (limit {limit:.0%})", flush=True
        )
    counts = {"hits": measured.reused_tokens == simulated.reused_tokens, "within": within}
    return {**found, **counts}


def _figure(measures: Measures, goal: str) -> float:
    if goal == "output_tokens_per_s":
        return measures.output_tokens / measures.ended_at
    distribution, which = goal.split()
    value: float = getattr(measures, distribution).to_dict()[which]
    return value


@app.command()
def scale(
    requests: Annotated[int, typer.Option(help="Requests in all.")] = 1_000_000,
    replicas: Annotated[int, typer.Option(help="Replicas of 10,000 blocks.")] = 1000,
    rate: Annotated[float, typer.Option(help="Requests per second and replica.")] = 8.0,
    processes: Annotated[int, typer.Option(help="Processes.")] = 2,
) -> None:
    """Mean 1,000 prompt and 100 output tokens, Poisson arrivals, shared prefixes."""
    case = make_plan("llama-3.1-8b", "H100-80GB", context="2k").first
    cache_bytes = 10_000 * sum(case.layout.block_sizes_bytes)
    spec = ReplicaSpec(case.layout, cache_bytes, RooflineCost(case.roofline))
    began = time.perf_counter()
    arrivals = Synthetic(requests, rate * replicas).arrivals()
    found = simulate(arrivals, spec, replicas=replicas, look=Look(60.0), processes=processes)
    seconds = time.perf_counter() - began
    own, child = (resource.getrusage(who).ru_maxrss * 1024 for who in _WHO)
    line = {
        "requests": found.finished,
        "replicas": replicas,
        "seconds": seconds,
        "gigabytes": (own + (processes if processes > 1 else 0) * child) / 1e9,
        "steps": found.steps,
        "hit_rate": found.reused_tokens / found.prompt_tokens,
        "ttft_s": found.ttft.to_dict(),
        "output_tokens_per_s": found.output_tokens / found.ended_at,
    }
    print(json.dumps(line))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a suite."""
    app(args=list(sys.argv[1:] if arguments is None else arguments))


if __name__ == "__main__":
    main()
