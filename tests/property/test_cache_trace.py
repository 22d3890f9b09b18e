"""The Mooncake traces through the real index: hit rates must be those of a plain LRU worked out elsewhere."""

import json
from itertools import islice

import pytest

from octavo.cache.hashing import Namespace
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cache.manager import CacheManager
from support.sizes import DATA, FULL, sized

TRACE = DATA / "traces" / "mooncake" / "conversation_trace.jsonl"
TRACE_BLOCK = 512
BLOCK = 4
UNLIMITED = 400_000
LAYOUT = CacheLayout((LayerGroup((0,), 1, 32),), BLOCK, "bf16")

pytestmark = pytest.mark.skipif(not TRACE.exists(), reason=f"no trace at {TRACE}; set OCTAVO_DATA")


def requests(count):
    """Every trace block of 512 tokens stands for 4 of ours; an unsealed rest becomes one token."""
    with TRACE.open() as lines:
        for line in islice(lines, count):
            row = json.loads(line)
            full = row["input_length"] // TRACE_BLOCK
            tokens = [block for block in row["hash_ids"][:full] for _ in range(BLOCK)]
            yield tokens + row["hash_ids"][full:], len(row["hash_ids"])


def hit_rate(blocks, policy="lru", count=None):
    """Percent of all blocks, each request finishing before the next arrives."""
    cache = CacheManager(LAYOUT, blocks * LAYOUT.block_bytes(0), policy=policy)
    hits = total = 0
    for tokens, looked_up in requests(count):
        lease = cache.lease(Namespace("trace"))
        hits += cache.match(lease, tokens) // BLOCK
        total += looked_up
        assert cache.extend(lease, len(tokens))
        cache.commit(lease, tokens, len(tokens))
        cache.release(lease)
    cache.check()
    return 100 * hits / total


def naive_hit_rate(count):
    """Unlimited memory, obviously: the set of all full prefixes seen."""
    seen, hits, total = set(), 0, 0
    for tokens, looked_up in requests(count):
        prefixes = [tuple(tokens[: i + BLOCK]) for i in range(0, len(tokens) // BLOCK * BLOCK, BLOCK)]
        reusable = prefixes[: (len(tokens) - 1) // BLOCK]
        hits += next((i for i, prefix in enumerate(reusable) if prefix not in seen), len(reusable))
        seen.update(prefixes)
        total += looked_up
    return 100 * hits / total


def test_with_room_for_all_every_known_prefix_is_found():
    count = sized(300, 2000)
    assert hit_rate(UNLIMITED, count=count) == naive_hit_rate(count)


def test_more_blocks_and_a_better_policy_find_more():
    rates = [hit_rate(blocks, count=sized(1500, 4000)) for blocks in (500, 2000, UNLIMITED)]
    assert rates == sorted(rates)
    assert rates[0] < rates[2]


@pytest.mark.skipif(not FULL, reason="the whole trace takes a while; OCTAVO_TEST_SIZE=full runs it")
@pytest.mark.parametrize(
    ("blocks", "expected"), [(1000, 4.5), (5000, 11.9), (10_000, 21.5), (30_000, 33.1), (UNLIMITED, 36.6)]
)
def test_lru_on_the_conversation_trace(blocks, expected):
    assert hit_rate(blocks) == pytest.approx(expected, abs=0.3)


@pytest.mark.skipif(not FULL, reason="the whole trace takes a while; OCTAVO_TEST_SIZE=full runs it")
@pytest.mark.parametrize("blocks", [5000, 10_000])
def test_the_cost_aware_policy_is_at_least_as_good(blocks):
    assert hit_rate(blocks, "cost") >= hit_rate(blocks, "lru")
