"""Folding in the cache alone: what is folded, when, to what, and that the books balance after every step."""

import pytest

from octavo.cache.folding import aside_bytes
from octavo.cache.formats import block_format
from octavo.cache.hashing import Namespace
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cache.manager import CacheManager
from octavo.config import EngineConfig, parse_ladder
from octavo.errors import ConfigError
from support.cache_world import Clock, words

B = 16
SPACE = Namespace("model")
GROUP = LayerGroup((0, 1), 2, 64)


def layout_of(*ladder, format="bf16", groups=(GROUP,), **options):
    return CacheLayout(groups, B, format, ladder=ladder, **options)


def manager(layout, blocks, **options):
    return CacheManager(layout, blocks * sum(layout.block_sizes_bytes), clock=Clock(), **options)


def store(cache, token_ids, keep=False, exact=False, **options):
    """Compute `token_ids` as a request would, block by block. Returns the lease and the positions it found."""
    lease = cache.lease(SPACE, exact=exact, **options)
    reused = cache.match(lease, token_ids)
    for stop in (*range(reused + B, len(token_ids), B), len(token_ids)):
        assert cache.extend(lease, stop)
        cache.check()
        cache.commit(lease, token_ids, stop)
    if not keep:
        cache.release(lease)
    cache.check()
    return lease, reused


def found(cache, token_ids, **options):
    return cache.find(cache.lease(SPACE, **options), token_ids).depth


def test_nothing_is_thrown_away_while_something_can_be_made_smaller():
    cache = manager(layout_of("int8", "int4"), 12)
    for i in range(1, 5):  # 4 blocks each: 16 blocks in an arena of 12
        store(cache, words(i, 4 * B))
    assert not cache.pool.reclaimed
    assert cache.pool.folding.folded["int8"] > 0
    assert [found(cache, words(i, 4 * B + 1)) for i in range(1, 5)] == [4, 4, 4, 4]
    for i in range(5, 9):
        store(cache, words(i, 4 * B))
    assert cache.pool.folding.folded["int4"] > 0
    store(cache, words(9, 12 * B))
    assert cache.pool.reclaimed["pressure"] > 0


def test_without_a_ladder_nothing_is_folded():
    cache = manager(layout_of(), 12)
    for i in range(1, 5):
        store(cache, words(i, 4 * B))
    assert cache.pool.reclaimed["pressure"] > 0
    assert not cache.pool.folding.folded


def test_the_coldest_go_first_and_the_first_block_of_a_sequence_stays_as_it_is():
    cache = manager(layout_of("int8"), 8)
    store(cache, words(1, 4 * B))
    store(cache, words(2, 4 * B))
    store(cache, words(3, B))
    formats = {(i, b.index): b.format.name for i, b in by_conversation(cache, 1, 2)}
    # One block was wanted, and three give half of themselves for it.
    assert formats == {
        (1, 0): "bf16",
        **{(1, i): "int8" for i in (1, 2, 3)},
        **{(2, i): "bf16" for i in range(4)},
    }
    for i, block in by_conversation(cache, 1, 2):
        assert block.exact == (i == 2 or block.index == 0)
    events = [e for e in cache.events() if e.kind == "folded"]
    assert [e.reason for e in events] == ["pressure, bf16 to int8"] * 3
    assert [e.digest for e in events] == digests(cache, words(1, 4 * B))[:0:-1]


def by_conversation(cache, *numbers):
    for i in numbers:
        for node in cache.find(cache.lease(SPACE), words(i, 4 * B + 1)).nodes:
            yield i, node.blocks[0]


def digests(cache, token_ids):
    lease = cache.lease(SPACE)
    cache.find(lease, token_ids)
    return lease.digests


def test_no_second_step_while_a_first_one_is_left():
    cache = manager(layout_of("int8", "int4"), 12)
    for i in range(1, 7):
        store(cache, words(i, 4 * B))
        reasons = [e.reason for e in cache.events() if e.kind == "folded"]
        assert reasons == sorted(reasons)  # bf16 to int8 comes before int8 to int4
    assert cache.pool.folding.folded["int4"] > 0


def test_what_is_read_is_never_folded():
    cache = manager(layout_of("int8"), 8)
    lease, _ = store(cache, words(1, 5 * B), keep=True)
    store(cache, words(2, 3 * B))
    assert not cache.extend(cache.lease(SPACE), 4 * B)
    store(cache, words(3, 3 * B))
    assert {b.format.name for b in lease.tables[0].blocks} == {"bf16"}
    assert lease.pedigree


def test_an_exact_request_recomputes_what_was_folded_and_leaves_it_whole():
    cache = manager(layout_of("int8"), 14)
    tokens = words(1, 4 * B + 1)
    store(cache, tokens)
    for i in (2, 3, 4):
        store(cache, words(i, 4 * B))
    match = cache.find(lease := cache.lease(SPACE, exact=True), tokens)
    assert (match.depth, match.blocked) == (1, True)
    assert cache.why(lease, tokens, match).reason == "exactness"
    plain, reused = store(cache, tokens, keep=True)
    assert reused == 4 * B
    assert not plain.pedigree
    assert cache.folded_positions(plain) == {"int8": 3 * B}
    cache.release(plain)
    _, reused = store(cache, tokens, exact=True)
    assert reused == B
    assert found(cache, tokens, exact=True) == 4
    assert cache.pool.reclaimed == {"recomputed": 3}


def test_what_others_read_folded_keeps_its_place():
    cache = manager(layout_of("int8"), 14)
    tokens = words(1, 4 * B + 1)
    for i in (1, 2, 3, 4):
        store(cache, words(i, 4 * B))
    reader, _ = store(cache, tokens, keep=True)
    exact, _ = store(cache, tokens, keep=True, exact=True)
    assert not exact.attached
    assert exact.pedigree
    for lease in (reader, exact):
        cache.release(lease)
        cache.check()
    assert found(cache, tokens, exact=True) == 1
    assert found(cache, tokens) == 4


def test_what_was_computed_from_folded_blocks_is_not_exact():
    cache = manager(layout_of("int8"), 14)
    for i in (1, 2, 3, 4):
        store(cache, words(i, 4 * B))
    longer = [*words(1, 4 * B), *words(9, 2 * B)]
    store(cache, longer)
    assert found(cache, [*longer, 0]) == 6
    last = cache.find(cache.lease(SPACE), [*longer, 0]).nodes[5].blocks[0]
    assert last.format.name == "bf16"
    assert not last.exact


def test_pinned_blocks_may_be_folded_and_stay():
    cache = manager(layout_of("int8"), 12, max_pinned=10**9)
    lease, _ = store(cache, words(1, 4 * B), keep=True)
    cache.pin(lease, 60.0)
    before = cache.pins.bytes_pinned
    cache.release(lease)
    for i in range(2, 9):
        store(cache, words(i, 4 * B))
    assert cache.pins.bytes_pinned < before
    assert found(cache, words(1, 4 * B + 1)) == 4
    cache.clock.now += 100
    cache.expire()
    cache.check()
    assert cache.pins.bytes_pinned == 0


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_two_groups_and_a_cache_that_is_small_already(policy):
    groups = (GROUP, LayerGroup((2,), 1, 64, window=40))
    layout = layout_of("int8", "int4", groups=groups, format="bf16", overrides=("bf16", "int8"))
    cache = manager(layout, 14, policy=policy)
    for i in range(1, 9):
        store(cache, words(1 + i % 6, 5 * B))
    assert cache.pool.folding.folded["int8"] > 0
    assert cache.pool.folding.folded["int4"] > 0
    cache.reset()
    cache.check()
    assert cache.arena.bytes_free == cache.arena.bytes_total


def test_room_aside_is_a_part_of_the_arena_and_at_least_one_block():
    layout = layout_of("int8", "int4")
    int8 = layout.format_bytes(0, block_format("int8"))
    assert aside_bytes(layout, 10 * int8) == int8
    assert aside_bytes(layout, 6400 * int8) == 100 * int8
    assert aside_bytes(layout_of(), 10**9) == 0


def test_ladders_are_parsed():
    assert parse_ladder("int8,int4") == ("int8", "int4")
    assert parse_ladder("k=int8,v=int4,int2") == ("k=int8,v=int4", "int2")
    assert parse_ladder(["fp8"]) == ("fp8",)
    assert EngineConfig.create("m", compress_under_pressure="int8").block_size == 32
    assert EngineConfig.create("m", compress_under_pressure=None).block_size == 16


@pytest.mark.parametrize("value", ["int3", "int8,,int4", 8, ["int8", 4]])
def test_impossible_steps_are_refused(value):
    with pytest.raises(ConfigError, match="compress_under_pressure="):
        EngineConfig("m", compress_under_pressure=value)


def test_ladders_that_do_nothing_are_refused():
    with pytest.raises(ConfigError, match="prefix caching"):
        EngineConfig("m", compress_under_pressure=("int8",), enable_prefix_caching=False)
    for ladder, options in (
        (("int4", "int8"), {}),
        (("int8", "int8"), {}),
        (("bf16",), {}),
        (("int8",), {"format": "int8"}),
        (("int4",), {"format": "int2"}),
    ):
        with pytest.raises(ConfigError, match="no smaller"):
            layout_of(*ladder, **options)
    with pytest.raises(ConfigError, match="block_size=8"):
        CacheLayout((GROUP,), 8, "bf16", ladder=("int8",))
    with pytest.raises(ConfigError, match="compress_under_pressure='int2'"):
        layout_of("int2", groups=(LayerGroup((0,), 1, 12),))
