"""A simulation is the engine without its model: with arrivals given in steps, both plan the same steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from octavo.engine import Engine
from octavo.params import SamplingParams
from octavo.schedule.scheduler import Scheduler, StepPlan
from octavo.simulate.cost import UnitCost
from octavo.simulate.replica import Replica, ReplicaSpec
from octavo.simulate.trace import Arrival
from support.engines import greedy, submit
from support.sharing import pool
from support.sizes import sized

Plans = list[list[tuple[str, int, int, bool]]]
BLOCK = 8


def arrivals(seed: int, count: int) -> list[Arrival]:
    """Some with a common beginning, some with several answers, all with tokens that the tiny models know."""
    draw = random.Random(seed)
    at, made = 0, []
    for index in range(count):
        at += draw.choice([0, 0, 1, 3, 9])
        blocks = draw.randint(1, 6)
        ids = (draw.randint(0, 2), *(draw.randint(3, 200) for _ in range(blocks - 1)), 200 + index % 50)
        prompt = blocks * BLOCK + draw.randint(1, BLOCK - 1)
        n = draw.choice([1, 1, 1, 3])
        if n > 1:  # the first block with sampled tokens has three: two answers might begin with the same one
            prompt = min(prompt, (blocks + 1) * BLOCK - 3)
        made.append(Arrival(index, float(at), prompt, draw.randint(1, 30), BLOCK, ids, n=n))
    return made


def watched(scheduler: Scheduler) -> Plans:
    """Every plan that `scheduler` makes from now on."""
    plans: Plans = []
    plan = scheduler.plan

    def watching() -> StepPlan:
        made = plan()
        if made.chunks:
            plans.append([(c.sequence.request.request_id, c.start, c.stop, c.sample) for c in made.chunks])
        return made

    scheduler.plan = watching  # type: ignore[method-assign]
    return plans


def sampled(arrival: Arrival) -> SamplingParams:
    """Answers of one request differ from their first token on, as in a simulation."""
    temperature = 0.0 if arrival.n == 1 else 100.0
    return greedy(arrival.output, logprobs=None, n=arrival.n, temperature=temperature, seed=arrival.index)


def served(engine: Engine, trace: list[Arrival]) -> tuple[Plans, list[int]]:
    """Plans of the engine, and what each request reused."""
    plans, lives, step = watched(engine.scheduler), [], 0
    waiting = list(trace)
    while waiting or engine.has_work:
        while waiting and waiting[0].at <= step:
            arrival = waiting.pop(0)
            lives.append(
                submit(
                    engine,
                    str(arrival.index),
                    (arrival.prompt_tokens(), sampled(arrival)),
                )
            )
        if engine.has_work:
            engine.step()
        step += 1
    engine.check()
    return plans, [live.request.receipt.reused_tokens for live in lives]


@pytest.mark.parametrize("seed", range(sized(3, 20)))
@pytest.mark.parametrize("policy", ["lru", "cost"])
@pytest.mark.parametrize("blocks", [14, 24, 200])
def test_step_plans_preemptions_and_hits_are_the_engines(
    seed: int, policy: str, blocks: int, engine_of: Callable[..., Engine]
) -> None:
    trace = arrivals(seed, sized(25, 100))
    options: dict[str, Any] = {"max_num_seqs": 6, "max_num_batched_tokens": 32}
    engine = engine_of(
        "llama",
        dtype="float32",
        block_size=BLOCK,
        kv_cache_memory=pool(blocks, BLOCK, "llama", "f32"),
        cache_policy=policy,
        num_threads=1,
        **options,
    )
    real, reused = served(engine, trace)

    spec = ReplicaSpec(
        engine.layout,
        engine.cache.arena.bytes_total,
        UnitCost((None,)),
        policy,
        max_model_len=1024,
        **options,
    )
    replica = Replica(spec, 1.0, leaps=False)
    assert replica.cache.layout is engine.layout
    simulated = watched(replica.scheduler)
    for arrival in trace:
        replica.advance(arrival.at)
        replica.add(arrival)
    replica.advance(float("inf"))
    replica.cache.check()

    assert simulated == real
    totals = engine.scheduler.totals
    found = replica.measures
    assert (found.preemptions, found.finished) == (totals.preemptions, len(trace))
    assert (found.reused_tokens, found.recomputed_tokens) == (sum(reused), totals.recomputed_tokens)
    assert found.output_tokens == totals.completion_tokens == sum(a.n * a.output for a in trace)
    if blocks == 14:
        assert found.preemptions > 0
    if blocks == 200:
        assert found.reused_tokens > 0
