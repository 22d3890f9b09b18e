"""Simulations as a user asks for them: one row per combination of what is swept."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.config import Environment, format_bytes
from octavo.errors import ConfigError
from octavo.plan.planner import Budget, Case
from octavo.plan.report import make_plan
from octavo.plan.weights import WEIGHT_FORMATS
from octavo.schedule.limits import UNNAMED_CONTEXT
from octavo.simulate.cache_only import CacheOnly, cache_only
from octavo.simulate.cost import RooflineCost, StepCost
from octavo.simulate.fitted import Measured
from octavo.simulate.fitted import load as load_fitted
from octavo.simulate.loop import Look, simulate
from octavo.simulate.measure import Measures
from octavo.simulate.replica import ReplicaSpec
from octavo.simulate.sweep import Setting, cache_settings, check_capacity, settings
from octavo.simulate.trace import Arrival, read_trace

CURVE_POINTS = 120
SPEEDS = (1e-6, 1e6)
"""Times stay finite, and apart."""


@dataclass(frozen=True)
class Row:
    """A setting and what came of it; `blocks` is the cache of a replica, `cost` says where step times are from, and
    `notes` what somebody who reads the numbers must know."""

    setting: Setting
    blocks: int
    cost: str
    notes: tuple[str, ...]
    measures: Measures

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Times are seconds."""
        m, s = self.measures, self.setting
        return {
            "requests": m.finished,
            "hit_rate": m.reused_tokens / m.prompt_tokens if m.prompt_tokens else 0.0,
            "ttft_s": m.ttft.to_dict(),
            "itl_s": m.itl.to_dict(),
            "output_tokens_per_s": m.output_tokens / m.ended_at if m.ended_at else 0.0,
            "preemptions": m.preemptions,
            "rejected": m.rejected,
            "waiting_s": m.waiting.to_dict(),
            "block_lifetime_s": m.lifetime.to_dict(),
            "prompt_tokens": m.prompt_tokens,
            "output_tokens": m.output_tokens,
            "recomputed_tokens": m.recomputed_tokens,
            "duration_s": m.ended_at,
            "steps": m.steps,
            "kv_cache_dtype": s.kv_cache_dtype,
            "capacity_blocks": self.blocks,
            "cache_policy": s.cache_policy,
            "replicas": s.replicas,
            "routing": s.routing,
            "cost": self.cost,
            "occupancy": {"running": m.running.points(), "cached": m.cached.points()},
            "waiting_requests": m.queue.points(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True)
class Report:
    """All rows of one command."""

    trace: str
    model: str
    hardware: str
    rows: tuple[Row, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: the first row, and all of them under `rows` where something was swept."""
        head = {"trace": self.trace, "model": self.model, "hardware": self.hardware}
        rows = [row.to_dict() for row in self.rows]
        return {**rows[0], **head, **({"rows": rows} if len(rows) > 1 else {})}


def load(trace: Path, requests: int | None = None, speed: float = 1.0) -> list[Arrival]:
    """The first `requests` requests of a trace, coming `speed` times as fast. Raises `ConfigError`."""
    if requests is not None and requests < 1:
        raise ConfigError(f"requests={requests} must be at least 1", param="requests")
    least, most = SPEEDS
    if not least <= speed <= most:
        raise ConfigError(f"speed={speed} must be from {least:f} to {most:.0f}", param="speed")
    arrivals = read_trace(trace)[:requests]
    return arrivals if speed == 1 else [replace(a, at=a.at / speed) for a in arrivals]


def run_cache_only(arrivals: Sequence[Arrival], capacities: str | None, policies: str) -> list[CacheOnly]:
    """Hits for every capacity in blocks (None, or `unlimited`: all of them) and every policy."""
    return [cache_only(arrivals, *setting) for setting in cache_settings(capacities, policies)]


def run(
    trace: Path,
    arrivals: Sequence[Arrival],
    model: str,
    hardware: str,
    *,
    kv_cache_dtype: str = "bf16",
    capacity: str | None = None,
    cache_policy: str = "lru",
    replicas: str = "1",
    routing: str = "round-robin",
    weights: str | None = None,
    kv_budget: str | None = None,
    block_size: int | None = None,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    num_threads: int | None = None,
    processes: int = 1,
    lifetimes: bool = True,
    notice: Callable[[str], None] = lambda _: None,
) -> Report:
    """Simulate every combination of the options that list several values with commas, equal ones once.

    Steps take as long as `octavo bench calibrate` found on `this`, where it was run for the model, its compute type and
    as many threads, and the cache has that type too; else what a roofline says, which knows no `num_threads`. Raises
    `ConfigError` or `ModelNotFound` naming the field.
    """
    for name, value in (
        ("max_num_seqs", max_num_seqs),
        ("max_num_batched_tokens", max_num_batched_tokens),
        ("num_threads", num_threads),
        ("processes", processes),
    ):
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} must be at least 1", param=name)
    if processes > _processors():
        raise ConfigError(
            f"processes={processes} must be at most {_processors()}, the processors there are",
            param="processes",
        )
    if processes > 1 and "round-robin" not in routing.split(","):
        raise ConfigError(
            f"processes={processes}: replicas behind routing={routing!r} watch each other and are simulated together; "
            "leave it out",
            param="processes",
        )
    if capacity is not None:
        check_capacity(capacity, kv_budget)
    options: dict[str, Any] = {"weights": weights, "kv_budget": kv_budget, "block_size": block_size}
    plan = make_plan(model, hardware, kv_cache_dtype=kv_cache_dtype, notice=notice, **options)
    cases = {case.format: case for case in plan.cases}
    # Whole microseconds, lest the width is next to nothing.
    look = Look(round(max(a.at for a in arrivals) / CURVE_POINTS, 6) or 1.0, lifetimes)
    costs = {case.format: _cost(case, num_threads) for case in plan.cases}
    specs = {
        s: _spec(cases[s.kv_cache_dtype], costs[s.kv_cache_dtype][1], s, max_num_seqs, max_num_batched_tokens)
        for s in settings(list(cases), capacity, cache_policy, replicas, routing)
    }
    rows = []
    for setting, spec in specs.items():
        measures = simulate(
            arrivals,
            spec,
            replicas=setting.replicas,
            routing=setting.routing,
            look=look,
            processes=processes,
        )
        case, (source, _) = cases[setting.kv_cache_dtype], costs[setting.kv_cache_dtype]
        blocks = spec.cache_bytes // _sealed_bytes(case)
        rows.append(Row(setting, blocks, source, _notes(case, setting), measures))
    return Report(str(trace), plan.facts.name, plan.hardware.name, tuple(rows))


def _cost(case: Case, num_threads: int | None) -> tuple[str, StepCost]:
    """Where step times are from, and the times."""
    fitted, layout = None, case.layout
    if case.hardware.name == "this" and not layout.is_stored and layout.compute == case.weights:
        threads = num_threads or _processors()
        fitted = load_fitted(Environment.read().home, Measured(case.facts, case.weights, threads))
    if fitted is not None:
        return "calibration", fitted
    if num_threads is not None:
        raise ConfigError(
            f"num_threads={num_threads}: there is no calibration of {case.facts.name} with so many threads, weights in "
            f"{case.weights} and a cache in {case.format} on {case.hardware.name}; leave it out, or see octavo bench "
            "calibrate --help",
            param="num_threads",
        )
    return "roofline", RooflineCost(case.roofline)


def _spec(
    case: Case, cost: StepCost, setting: Setting, max_num_seqs: int, max_num_batched_tokens: int
) -> ReplicaSpec:
    if case.hardware.count > 1:
        raise ConfigError(
            f"hardware={case.hardware.name!r}: a replica is one device; --replicas says how many there are",
            param="hardware",
        )
    return ReplicaSpec(
        case.device_layout,
        _cache_bytes(case, setting.capacity),
        cost,
        setting.cache_policy,
        max_num_seqs,
        max_num_batched_tokens,
        case.facts.context or UNNAMED_CONTEXT,
    )


def _processors() -> int:
    return len(os.sched_getaffinity(0))


def _sealed_bytes(case: Case) -> int:
    return sum(case.device_layout.sealed_sizes_bytes)


def _open_bytes(case: Case) -> int:
    return sum(case.device_layout.block_sizes_bytes)


def _cache_bytes(case: Case, capacity: int | None) -> int:
    """The cache of a replica. Raises `ConfigError` where not even one block can be filled."""
    least, asked = _open_bytes(case), case.asked_bytes
    if capacity is not None:
        fewest = -(-least // _sealed_bytes(case))
        if capacity < fewest:
            raise ConfigError(
                f"capacity={capacity}: a block that is being filled takes as much as {fewest} sealed ones in "
                f"{case.format}; give {fewest} or more",
                param="capacity",
            )
        return capacity * _sealed_bytes(case)
    if asked is not None and asked < least:
        raise ConfigError(
            f"kv_budget: {asked} bytes do not hold one block; kv_budget={least} does", param="kv_budget"
        )
    if case.cache_bytes < least:
        others = [replace(case, weights=name) for name in WEIGHT_FORMATS]
        ways = [f"weights={c.weights}" for c in others if c.cache_bytes >= _open_bytes(c)]
        raise ConfigError(
            f"hardware={case.hardware.name!r}: weights of {format_bytes(case.weights_bytes)} leave "
            f"{format_bytes(case.cache_bytes)} of {format_bytes(case.hardware.total_bytes)} for the cache, and one "
            f"block takes {format_bytes(least)}; {' or '.join(ways) or 'larger hardware'} works, and with a capacity "
            "it is simulated as if there were room",
            param="hardware",
        )
    return case.cache_bytes


def _notes(case: Case, setting: Setting) -> tuple[str, ...]:
    """Where the cache is not what was asked for, or more than there can be."""
    if setting.capacity is not None:
        held = replace(case, budget=Budget(share=1.0)).cache_bytes // _sealed_bytes(case)
        said = (
            f"{case.hardware.name} holds {held} blocks of {case.format} beside the weights; that there are "
            f"{setting.capacity} is assumed"
        )
        return (said,) if setting.capacity > held else ()
    asked, left = case.asked_bytes, case.cache_bytes
    if asked is None or asked <= left:
        return ()
    return (f"kv_budget: {format_bytes(left)} of the {format_bytes(asked)} are left beside the weights",)
