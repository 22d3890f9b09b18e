"""Simulations as a user asks for them: one row per combination of what is swept."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from octavo.cache.policy import POLICIES
from octavo.config import Environment
from octavo.errors import ConfigError, show
from octavo.plan.planner import Case
from octavo.plan.report import make_plan
from octavo.schedule.limits import UNNAMED_CONTEXT
from octavo.simulate.cache_only import CacheOnly, cache_only
from octavo.simulate.cost import RooflineCost, StepCost
from octavo.simulate.fitted import Measured
from octavo.simulate.fitted import load as load_fitted
from octavo.simulate.loop import Look, simulate
from octavo.simulate.measure import Measures
from octavo.simulate.replica import ReplicaSpec
from octavo.simulate.routing import ROUTINGS
from octavo.simulate.trace import Arrival, read_trace

CURVE_POINTS = 120


@dataclass(frozen=True)
class Setting:
    """One combination of what can be swept. `capacity` is the cache of a replica, in blocks; None is what fits."""

    kv_cache_dtype: str
    capacity: int | None
    cache_policy: str
    replicas: int
    routing: str


@dataclass(frozen=True)
class Row:
    """A setting and what came of it; `blocks` is the cache of a replica, `cost` says where step times are from."""

    setting: Setting
    blocks: int
    cost: str
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
    if not 0 < speed < 1e6:
        raise ConfigError(f"speed={speed} must be from 0 to a million", param="speed")
    arrivals = read_trace(trace)[:requests]
    return arrivals if speed == 1 else [replace(a, at=a.at / speed) for a in arrivals]


def run_cache_only(arrivals: Sequence[Arrival], capacities: str | None, policies: str) -> list[CacheOnly]:
    """Hits for every capacity in blocks (None, or `unlimited`: all of them) and every policy."""
    return [
        cache_only(arrivals, capacity, policy)
        for policy in _names("cache_policy", policies, POLICIES)
        for capacity in _capacities(capacities)
    ]


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
    """Simulate every combination of the options that list several values with commas.

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
    if processes > 1 and "round-robin" not in routing.split(","):
        raise ConfigError(
            f"processes={processes}: replicas behind routing={routing!r} watch each other and are simulated together; "
            "leave it out",
            param="processes",
        )
    options: dict[str, Any] = {"weights": weights, "kv_budget": kv_budget, "block_size": block_size}
    plan = make_plan(model, hardware, kv_cache_dtype=kv_cache_dtype, notice=notice, **options)
    cases = {case.format: case for case in plan.cases}
    look = Look(max(a.at for a in arrivals) / CURVE_POINTS or 1.0, lifetimes)
    costs = {case.format: _cost(case, num_threads) for case in plan.cases}
    rows = []
    for setting in _settings(list(cases), capacity, cache_policy, replicas, routing):
        case = cases[setting.kv_cache_dtype]
        source, cost = costs[setting.kv_cache_dtype]
        spec = _spec(case, cost, setting, max_num_seqs, max_num_batched_tokens)
        measures = simulate(
            arrivals,
            spec,
            replicas=setting.replicas,
            routing=setting.routing,
            look=look,
            processes=processes,
        )
        rows.append(Row(setting, spec.cache_bytes // sum(spec.layout.block_sizes_bytes), source, measures))
    return Report(str(trace), plan.facts.name, plan.hardware.name, tuple(rows))


def _cost(case: Case, num_threads: int | None) -> tuple[str, StepCost]:
    """Where step times are from, and the times."""
    fitted, layout = None, case.layout
    if case.hardware.name == "this" and not layout.is_stored and layout.compute == case.weights:
        threads = num_threads or len(os.sched_getaffinity(0))
        fitted = load_fitted(Environment.read().home, Measured(case.facts.name, case.weights, threads))
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
    block = sum(case.device_layout.block_sizes_bytes)
    cache_bytes = case.cache_bytes if setting.capacity is None else setting.capacity * block
    if cache_bytes < block:
        raise ConfigError(
            f"hardware={case.hardware.name!r}: {cache_bytes} bytes are left for the cache, and one block takes {block}",
            param="hardware",
        )
    return ReplicaSpec(
        case.device_layout,
        cache_bytes,
        cost,
        setting.cache_policy,
        max_num_seqs,
        max_num_batched_tokens,
        case.facts.context or UNNAMED_CONTEXT,
    )


def _settings(
    formats: Sequence[str], capacity: str | None, policy: str, replicas: str, routing: str
) -> Iterator[Setting]:
    yield from (
        Setting(*values)
        for values in product(
            formats,
            _capacities(capacity),
            _names("cache_policy", policy, POLICIES),
            _counts("replicas", replicas),
            _names("routing", routing, ROUTINGS),
        )
    )


def _capacities(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",")]
    return [None if part == "unlimited" else _counts("capacity", part)[0] for part in parts]


def _counts(param: str, text: str) -> list[int]:
    found = []
    for part in text.split(","):
        part = part.strip()
        digits, scale = (part[:-1], 1000) if part.endswith("k") else (part, 1)
        if not digits.isascii() or not digits.isdecimal() or not 1 <= int(digits) * scale <= 1 << 40:
            raise ConfigError(f"{param}={show(part)} is not a number such as 8 or 10k", param=param)
        found.append(int(digits) * scale)
    return found


def _names(param: str, text: str, known: dict[str, Any]) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in known:
            raise ConfigError(f"{param}={show(part)} is not one of {', '.join(known)}", param=param)
    return parts
