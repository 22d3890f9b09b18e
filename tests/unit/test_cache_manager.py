import pytest

from octavo.cache.hashing import Namespace
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cache.manager import CacheManager
from octavo.errors import BooksDoNotBalance, ConfigError
from support.cache_world import FULL_GROUP, Clock, World, words

B = 4
SPACE = Namespace("model")
WINDOW = LayerGroup((1,), 1, 16, window=6)


def manager(blocks=16, groups=(FULL_GROUP,), **options):
    layout = CacheLayout(groups, B, "bf16")
    return CacheManager(layout, blocks * sum(layout.block_sizes_bytes), clock=Clock(), **options)


def store(cache, token_ids, namespace=SPACE, priority=0, keep=False):
    """Compute `token_ids` in the cache as a request would; with `keep`, the lease is not released."""
    lease = cache.lease(namespace, priority=priority)
    cache.match(lease, token_ids)
    assert cache.extend(lease, len(token_ids))
    cache.commit(lease, token_ids, len(token_ids))
    if not keep:
        cache.release(lease)
    cache.check()
    return lease


def found(cache, token_ids, namespace=SPACE, **options):
    return cache.find(cache.lease(namespace, **options), token_ids).depth


@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B - 1, 3 * B, 3 * B + 1])
def test_a_hit_covers_full_blocks_and_leaves_one_token(length):
    cache = manager()
    store(cache, words(1, length))
    assert found(cache, words(1, length)) == (length - 1) // B
    assert found(cache, words(1, 40)) == length // B
    assert found(cache, words(2, length)) == 0


def test_blocks_are_found_only_after_their_step():
    cache, tokens = manager(), words(1, 9)
    lease = cache.lease(SPACE)
    cache.match(lease, tokens)
    cache.extend(lease, 9)
    assert found(cache, tokens) == 0
    cache.commit(lease, tokens, 9)
    assert found(cache, tokens) == 2
    cache.check()


def test_the_same_content_is_stored_once():
    cache, tokens = manager(), words(1, 8)
    one, two = cache.lease(SPACE), cache.lease(SPACE)
    for lease in (one, two):
        cache.match(lease, tokens)
        cache.extend(lease, 8)
    assert len(cache.pool.blocks) == 4
    cache.commit(one, tokens, 8)
    cache.commit(two, tokens, 8)
    cache.check()
    assert len(cache.pool.blocks) == 2
    assert one.tables[0].entries == two.tables[0].entries


def test_a_full_pool_reclaims_the_oldest_tail_first():
    cache = manager(blocks=4)
    store(cache, words(1, 8))
    store(cache, words(2, 8))
    store(cache, words(3, 4))
    assert [found(cache, words(i, 9)) for i in (1, 2, 3)] == [1, 2, 1]
    kinds = [(event.kind, event.reason) for event in cache.events()]
    assert kinds == [("stored", "sealed")] * 4 + [("reclaimed", "pressure"), ("stored", "sealed")]
    assert cache.events() == []


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_important_blocks_outlive_others_and_share_their_importance(policy):
    cache = manager(blocks=4, policy=policy)
    store(cache, words(1, 8), priority=5)
    store(cache, words(1, 4) + words(9, 4), priority=0)
    store(cache, words(2, 4), priority=5)
    store(cache, words(3, 8), priority=0)
    assert found(cache, words(1, 9)) == 1
    assert found(cache, words(1, 4) + words(9, 5)) == 2
    assert found(cache, words(2, 5)) == 0


@pytest.mark.parametrize("policy", ["lru", "cost"])
def test_running_blocks_are_never_reclaimed(policy):
    cache = manager(blocks=4, policy=policy)
    held = store(cache, words(1, 8), keep=True)
    assert not cache.extend(cache.lease(SPACE), 3 * B)
    cache.check()
    store(cache, words(2, 8))
    store(cache, words(3, 8))
    assert found(cache, words(1, 9)) == 2
    cache.release(held)
    cache.check()


def test_forks_share_sealed_blocks_and_copy_the_open_one():
    world = World(blocks=5)
    cache, tokens = world.cache, words(1, 10)
    lease = store(cache, tokens, keep=True)
    child = cache.fork(lease)
    cache.check()
    assert child.tables[0].blocks[:2] == lease.tables[0].blocks[:2]
    assert child.tables[0].blocks[2] is not lease.tables[0].blocks[2]
    assert world.memory.copies == 1
    assert len(cache.pool.blocks) == 4
    assert cache.fork(child) is not None
    assert cache.fork(lease) is None
    cache.check()


def test_sharing_off_matches_nothing_and_keeps_nothing():
    cache = manager(enable_prefix_caching=False)
    lease = store(cache, words(1, 9), keep=True)
    assert found(cache, words(1, 9)) == 0
    assert cache.fork(lease).tables[0].blocks[0] is lease.tables[0].blocks[0]
    for each in list(cache.leases):
        cache.release(each)
    assert cache.stats().bytes_free == cache.stats().bytes_total
    cache.check()


@pytest.mark.parametrize(
    ("namespace", "shares"),
    [
        (Namespace("model", salt=None), True),
        (Namespace("model", salt=""), False),
        (Namespace("model", salt="a"), False),
        (Namespace("model", tenant="t"), False),
        (Namespace("other"), False),
    ],
)
def test_namespaces_do_not_see_each_other(namespace, shares):
    cache = manager()
    store(cache, words(1, 9))
    assert found(cache, words(1, 9), namespace) == (2 if shares else 0)


def test_a_cut_hash_never_gives_a_wrong_block():
    """Against brute force over all stored token lists, with 256 digests for far more prefixes."""
    cache = manager(blocks=100, hash_bits=8)
    stored = []
    for i in range(300):
        tokens = words(i % 7, 4) + words(i, 5)
        best = max((common(tokens, other) for other in stored), default=0)
        assert found(cache, tokens) <= min(best // B, (len(tokens) - 1) // B)
        store(cache, tokens)
        stored.append(tokens)
    assert cache.index.collisions > 0


def test_a_rejected_digest_leaves_no_empty_namespace():
    """Found by the state machine: the root was made before the collision was seen."""
    cache = manager(blocks=2000, hash_bits=8)
    for i in range(400):
        store(cache, words(i, 5), Namespace("model", salt=str(i)))
    assert cache.index.collisions > 0
    assert len(cache.index.roots) == len(cache.index.nodes) < 400


def test_the_index_agrees_with_brute_force():
    """With room for everything, a hit is the longest common prefix with any stored sequence, in full blocks."""
    cache, stored = manager(blocks=600), []
    for i in range(200):
        tokens = [(i * i >> shift) % 2 for shift in range(i % 23 + 1)]
        best = max((common(tokens, other) for other in stored), default=0)
        assert found(cache, tokens) == min(best // B, (len(tokens) - 1) // B)
        store(cache, tokens)
        stored.append(tokens[: len(tokens) // B * B])


def common(one, other):
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def test_a_window_group_frees_what_no_query_reads_again():
    cache, tokens = manager(groups=(WINDOW,), blocks=8), words(1, 24)
    lease = cache.lease(SPACE)
    for stop in range(1, 25):
        assert cache.extend(lease, stop)
        cache.commit(lease, tokens, stop)
        cache.check()
        reads = range(max(0, stop - 6 + 1), stop)
        assert all(lease.tables[0].entries[p // B] >= 0 for p in reads)
        assert sum(block is not None for block in lease.tables[0].blocks) <= 3
    assert lease.tables[0].entries[0] == -1


def test_a_window_needs_only_the_blocks_it_reaches():
    cache = manager(groups=(FULL_GROUP, WINDOW), blocks=8)
    lease = store(cache, words(1, 20), keep=True)
    assert [b is None for b in lease.tables[1].blocks] == [True] * 3 + [False] * 2
    cache.release(lease)
    window_blocks = [node.blocks[1] for node in cache.find(cache.lease(SPACE), words(1, 21)).nodes]
    cache.idle.remove(window_blocks[0])
    cache.pool.unpublish(window_blocks[0], "test")
    cache.pool.free(window_blocks[0])
    cache.check()
    assert found(cache, words(1, 21)) == 5
    assert found(cache, words(1, 5)) == 0
    assert found(cache, words(1, 17)) == 4


def test_reset_forgets_what_idles_and_detaches_what_runs():
    cache = manager()
    store(cache, words(1, 9))
    held = store(cache, words(2, 9), keep=True)
    assert cache.reset() == 4
    cache.check()
    assert found(cache, words(1, 9)) == found(cache, words(2, 9)) == 0
    tokens = words(2, 14)
    cache.extend(held, 14)
    cache.commit(held, tokens, 14)
    assert found(cache, tokens) == 0
    cache.release(held)
    cache.check()
    assert cache.stats().bytes_free == cache.stats().bytes_total


def test_pins_keep_blocks_for_their_time():
    cache = manager(blocks=4, max_pinned=10**6)
    lease = store(cache, words(1, 8), keep=True)
    outcome = cache.pin(lease, 60.0, "r")
    assert (outcome.blocks, outcome.refused) == (2, None)
    cache.release(lease)
    store(cache, words(2, 8))
    store(cache, words(3, 8))
    assert [found(cache, words(i, 9)) for i in (1, 2, 3)] == [2, 0, 2]
    cache.clock.now = 60.0
    cache.expire()
    cache.check()
    assert cache.stats().bytes_pinned == 0
    store(cache, words(4, 12))
    assert found(cache, words(1, 9)) == 1
    store(cache, words(5, 16))
    assert found(cache, words(1, 9)) == 0


def test_a_pin_over_budget_is_refused_as_a_whole():
    size = manager().layout.block_bytes(0)
    cache = manager(max_pinned=3 * size)
    for seed, refused in ((1, False), (2, True)):
        lease = store(cache, words(seed, 8), keep=True)
        assert (cache.pin(lease, 60.0).refused is not None) == refused
        cache.release(lease)
        cache.check()
    assert cache.stats().bytes_pinned == 2 * size
    assert [e.kind for e in cache.events() if "pin" in e.kind] == ["pinned", "pin_refused"]
    lease = store(cache, words(1, 8), keep=True)
    assert cache.pin(lease, 90.0).refused is None


def test_pins_give_way_before_a_running_sequence_does():
    cache = manager(blocks=4, max_pinned=10**6)
    lease = store(cache, words(1, 16), keep=True)
    cache.pin(lease, 60.0)
    cache.release(lease)
    store(cache, words(2, 8))
    assert found(cache, words(1, 17)) == 2
    assert {event.reason for event in cache.events() if event.kind == "reclaimed"} == {"pressure on pins"}


def test_blocks_of_two_sizes_share_every_byte():
    """A slide moves blocks under a running lease; tables follow."""
    wide = LayerGroup((1, 2, 3), 1, 16, window=8)
    world = World(blocks=6, groups=(FULL_GROUP, wide))
    for seed in range(40):
        request = world.add(words(seed, 3 + 5 * seed % 17), 3)
        world.run()
        world.verify(request)
    assert world.scheduler.totals.preemptions == 0


def test_start_up_needs_one_block_per_layer_group():
    layout = CacheLayout((FULL_GROUP, WINDOW), B, "bf16")
    least = sum(layout.block_sizes_bytes)
    CacheManager(layout, least).check()
    with pytest.raises(ConfigError, match=str(least)):
        CacheManager(layout, least - 1)
    with pytest.raises(ConfigError, match="fifo"):
        CacheManager(layout, least, policy="fifo")


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache, lease: setattr(lease.tables[0].blocks[0], "refs", 2),
        lambda cache, lease: lease.tables[0].entries.__setitem__(0, 64),
        lambda cache, lease: setattr(cache.idle, "bytes", 64),
        lambda cache, lease: setattr(lease.tables[0].blocks[0], "idle_children", 1),
        lambda cache, lease: cache.pool.blocks.discard(lease.tables[0].blocks[0]),
        lambda cache, lease: setattr(lease.tables[0].blocks[0], "sealed", False),
        lambda cache, lease: cache.index.nodes.popitem(),
        lambda cache, lease: setattr(cache.pins, "bytes_pinned", 1),
    ],
)
def test_every_kind_of_damage_is_noticed(damage):
    cache = manager()
    lease = store(cache, words(1, 9), keep=True)
    damage(cache, lease)
    with pytest.raises(BooksDoNotBalance):
        cache.check()
