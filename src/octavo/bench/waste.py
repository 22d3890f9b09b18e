"""What a reservation of the maximum length wastes, and what blocks waste.

Both run through the real scheduler and cache manager, without a model: every step computes one token of each running
sequence, or a chunk of its prompt. Contiguous reservation is the same thing with one block per sequence, as long as
the longest request there is.
"""

from __future__ import annotations

import csv
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from pathlib import Path

from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cache.manager import CacheManager
from octavo.errors import ConfigError
from octavo.schedule.request import Request
from octavo.schedule.request import Sequence as Running
from octavo.schedule.scheduler import Scheduler

SMOLLM2_LAYERS = LayerGroup(tuple(range(30)), num_kv_heads=3, head_dim=64)
"""The layer group of SmolLM2-135M, so that nothing has to be loaded."""


@dataclass(frozen=True)
class Lengths:
    """One request: tokens of its prompt and of its answer."""

    prompt: int
    answer: int

    @property
    def cached(self) -> int:
        """Positions in the cache when it ends: the last token is sampled and never computed."""
        return self.prompt + self.answer - 1


@dataclass(frozen=True)
class Account:
    """Bytes of cache held by running requests, averaged over the steps, and how many ran.

    `used` holds a key or value that a later step may read, `wasted` does not. `most_running` is how many requests ran
    at once at best.
    """

    reserved: float
    used: float
    most_running: int
    mean_running: float
    steps: int
    preemptions: int

    @property
    def wasted(self) -> float:
        """Bytes reserved and not used."""
        return self.reserved - self.used

    @property
    def waste(self) -> float:
        """Share of the reserved bytes that is not used."""
        return self.wasted / self.reserved


@dataclass(frozen=True)
class WasteReport:
    """The same requests in the same `budget` bytes, both ways. `longest` is the reserved length, in tokens."""

    requests: int
    budget: int
    block_size: int
    longest: int
    contiguous: Account
    blocks: Account


def compare_waste(
    requests: Sequence[Lengths],
    layout: CacheLayout,
    budget: int,
    *,
    max_num_seqs: int = 256,
    max_num_batched_tokens: int = 512,
) -> WasteReport:
    """Run `requests`, all there at the start, under both rules. Raises `ConfigError` if one does not fit `budget`."""
    longest = max(r.prompt + r.answer for r in requests)
    reservation = replace(layout, block_size=longest)
    if budget < (need := sum(reservation.block_sizes_bytes)):
        raise ConfigError(
            f"kv_cache_memory={budget} bytes: the longest request has {longest} tokens, give at least {need} bytes",
            param="kv_cache_memory",
        )
    limits = {"max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens}
    return WasteReport(
        requests=len(requests),
        budget=budget,
        block_size=layout.block_size,
        longest=longest,
        contiguous=run_account(requests, reservation, budget, **limits),
        blocks=run_account(requests, layout, budget, **limits),
    )


def run_account(
    requests: Sequence[Lengths],
    layout: CacheLayout,
    budget: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
) -> Account:
    """Run `requests` to their ends and average over the steps what the running ones held at the end of each."""
    cache = CacheManager(layout, budget)
    scheduler = Scheduler(cache, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
    fresh = count()
    answers = {str(i): r.answer for i, r in enumerate(requests)}
    for i, lengths in enumerate(requests):
        scheduler.add(Request(str(i), i, list(islice(fresh, lengths.prompt))))
    reserved = used = most = running = steps = 0
    while scheduler.has_work:
        plan = scheduler.plan()
        scheduler.commit(plan, [[next(fresh)] if chunk.sample else [] for chunk in plan.chunks])
        steps += 1
        reserved += cache.stats().bytes_running
        used += sum(bytes_used(layout, sequence.num_computed) for sequence in scheduler.running)
        running += len(scheduler.running)
        most = max(most, len(scheduler.running))
        for sequence in list(scheduler.running):
            if _answered(sequence) == answers[sequence.request.request_id]:
                scheduler.finish(sequence, "length")
    return Account(
        reserved=reserved / steps,
        used=used / steps,
        most_running=most,
        mean_running=running / steps,
        steps=steps,
        preemptions=scheduler.totals.preemptions,
    )


def bytes_used(layout: CacheLayout, positions: int) -> int:
    """Bytes of the keys and values that a sequence of `positions` computed positions may still read."""
    total = 0
    for g, group in enumerate(layout.groups):
        kept = positions if group.window is None else min(positions, group.window)
        total += layout.block_bytes(g) // layout.block_size * kept
    return total


def read_azure_trace(path: Path, requests: int, scale: float) -> list[Lengths]:
    """The first `requests` of an Azure LLM inference trace, lengths times `scale` and at least 1.

    Columns `ContextTokens` (the prompt) and `GeneratedTokens`; arrival times are not used. Raises `ConfigError` if the
    file is something else or too short.
    """
    try:
        with path.open(newline="") as file:
            rows = list(islice(csv.DictReader(file), requests))
        found = [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in rows]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"trace={str(path)!r} is no readable CSV with whole numbers in the columns ContextTokens and "
            f"GeneratedTokens ({error})",
            param="trace",
        ) from error
    if len(found) < requests:
        raise ConfigError(
            f"trace={str(path)!r} holds {len(found)} requests; ask for at most that many", param="requests"
        )
    return [Lengths(_scaled(prompt, scale), _scaled(answer, scale)) for prompt, answer in found]


def drawn_lengths(requests: int, scale: float, seed: int = 0) -> list[Lengths]:
    """Made-up chat requests: log-normal lengths with medians of 800 and 130 tokens, times `scale`."""
    draw = random.Random(seed)

    def length(median: int, spread: float, most: int) -> int:
        return _scaled(min(most, round(median * math.exp(spread * draw.gauss(0, 1)))), scale)

    return [Lengths(length(800, 0.9, 4096), length(130, 0.8, 1024)) for _ in range(requests)]


def _scaled(tokens: int, scale: float) -> int:
    return max(1, round(tokens * scale))


def _answered(sequence: Running) -> int:
    return len(sequence.token_ids) - len(sequence.request.prompt_token_ids)
