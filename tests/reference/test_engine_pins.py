"""Engine options of the cache: how much may be pinned, and which policy reclaims."""

from collections.abc import Callable

import pytest

from octavo.cache.policy import LRU, CostAware
from octavo.engine import Engine
from octavo.errors import InvalidRequest
from support.engines import finish, greedy, submit, together

PROMPT = list(range(64))
BYTES = 8 * 1024 * 4  # what is published of the prompt: full blocks of the tiny llama in float32


def pinned(engine: Engine) -> dict[str, object]:
    live = submit(engine, "pins", (PROMPT, greedy(4, cache_ttl=60.0)))
    finish(engine)
    receipt: dict[str, object] = live.request.receipt.to_dict()["pinned"]
    return receipt


def test_a_quarter_of_the_cache_may_be_pinned(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", dtype="float32", kv_cache_memory=4 * BYTES)
    assert pinned(engine) == {"ttl_s": 60.0, "tokens": 64, "blocks": 4, "bytes": BYTES, "refused": None}
    less = engine_of("llama", dtype="float32", kv_cache_memory=4 * BYTES - 1)
    assert pinned(less)["refused"] == f"over max_pinned={BYTES - 1} bytes by 1"


@pytest.mark.parametrize(("budget", "refused"), [(0, True), (BYTES - 1, True), (BYTES, False)])
def test_max_pinned_is_the_budget(budget: int, refused: bool, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", dtype="float32", max_pinned=budget)
    found = pinned(engine)
    assert (found["refused"] is not None) == refused
    assert found["bytes"] == (0 if refused else BYTES)


def test_pinned_blocks_outlive_others(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", dtype="float32", kv_cache_memory=2 * BYTES, max_pinned=BYTES)
    pinned(engine)
    for start in (100, 120, 140):
        together(engine, [([start, *PROMPT[1:]], greedy(1))])
    live = submit(engine, "again", (PROMPT, greedy(1)))
    finish(engine)
    assert live.request.receipt.reused_tokens == 48


@pytest.mark.parametrize(("limit", "blocks"), [(1, 0), (16, 1), (33, 2), (64, 4)])
def test_a_part_of_the_prompt_can_be_pinned_alone(
    limit: int, blocks: int, engine_of: Callable[..., Engine]
) -> None:
    """It is pinned as soon as it is computed, once however many choices there are, and stays after an abort."""
    engine = engine_of("llama", dtype="float32", max_num_batched_tokens=40)
    live = submit(engine, "part", (PROMPT, greedy(20, n=3, cache_ttl=60.0, cache_ttl_tokens=limit)))
    engine.step()
    assert bool(live.request.receipt.pinned) == (limit <= 40)
    for _ in range(3):
        engine.step()
    [pin] = live.request.receipt.pinned
    assert (pin.tokens, pin.blocks, pin.refused) == (blocks * 16, blocks, None)
    engine.abort("part")
    engine.check()
    assert engine.stats().bytes_pinned == blocks * BYTES // 4


def test_no_more_than_the_prompt_can_be_pinned_alone(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", dtype="float32")
    with pytest.raises(InvalidRequest, match="cache_ttl_tokens=64 works"):
        engine.prepare("long", PROMPT, greedy(1, cache_ttl=1.0, cache_ttl_tokens=65))


@pytest.mark.parametrize(("name", "policy"), [("lru", LRU), ("cost", CostAware)])
def test_the_policy_is_the_one_asked_for(name: str, policy: type, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", dtype="float32", cache_policy=name, kv_cache_memory=2 * BYTES)
    assert type(engine.cache.idle.policy) is policy
    requests = [([i, *PROMPT[1:]], greedy(12)) for i in range(5)]
    assert together(engine, requests) == together(engine_of("llama", dtype="float32"), requests)
