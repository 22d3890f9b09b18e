"""Sequences that drop context (`context_policy="window"`): blocks, books and chunks, without a model."""

import random

import pytest

from octavo.cache.blocks import Block, Lease
from octavo.cache.dropping import DropRule
from octavo.cache.hashing import Namespace
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cache.manager import CacheManager
from octavo.cache.pool import BlockPool
from octavo.errors import InvalidRequest
from octavo.schedule.request import Status
from support.cache_world import FULL_GROUP, Clock, World, words
from support.sizes import sized

B = 4
SPACE = Namespace("model")
RULE = DropRule(4, 12, B)
POLICIES = pytest.mark.parametrize("policy", ["lru", "cost"])


def manager(blocks: int = 16, **options: object) -> CacheManager:
    layout = CacheLayout((FULL_GROUP,), B, "bf16")
    return CacheManager(layout, blocks * layout.block_bytes(0), clock=Clock(), **options)  # type: ignore[arg-type]


def grow(cache: CacheManager, lease: Lease, token_ids: list[int], step: int = B) -> Lease:
    """Compute the rest of `token_ids` in steps."""
    if lease not in cache.leases:
        cache.match(lease, token_ids)
    while lease.computed < len(token_ids):
        stop = min(lease.computed + step, len(token_ids))
        assert cache.extend(lease, stop)
        cache.commit(lease, token_ids, stop)
        cache.check()
    return lease


def found(cache: CacheManager, token_ids: list[int], drops: DropRule | None = None) -> int:
    return cache.find(cache.lease(SPACE, drops=drops), token_ids).depth


def held(lease: Lease) -> list[int]:
    return [i for i, block in enumerate(lease.tables[0].blocks) if block is not None]


@pytest.mark.parametrize("rule", [RULE, DropRule(0, B, B), DropRule(8, 8, B)])
def test_the_oldest_block_after_the_sinks_goes_when_the_length_exceeds_both(rule: DropRule) -> None:
    kept: list[int] = []
    for position in range(60):
        kept.append(position)
        if len(kept) > rule.sinks + rule.window:
            del kept[rule.sinks : rule.sinks + B]
        dropped = rule.dropped(position)
        assert kept == [*range(min(rule.sinks, position + 1)), *range(rule.sinks + dropped, position + 1)]
        assert [i for i in range(60 // B) if i in rule.gone(position)] == sorted(
            {p // B for p in range(position) if p not in kept}
        )
        assert rule.reach(position) - dropped == rule.kept


@pytest.mark.parametrize("rule", [RULE, DropRule(0, B, B), DropRule(8, 8, B)])
def test_a_sequence_holds_what_the_rule_keeps(rule: DropRule) -> None:
    cache, tokens = manager(blocks=40), words(1, 60)
    lease, most = cache.lease(SPACE, drops=rule), 0
    cache.match(lease, tokens)
    for stop in range(1, 61):
        assert cache.extend(lease, stop)
        most = max(most, len(held(lease)))
        assert most <= rule.kept_blocks(stop)
        assert most * cache.layout.block_bytes(0) <= cache.layout.sequence_bytes(stop, rule)
        cache.commit(lease, tokens, stop)
        assert [i for i, offset in enumerate(lease.tables[0].entries) if offset == -1] == list(
            rule.gone(stop)
        )
        assert cache.bytes_owed(lease, 60) == (rule.kept_blocks(60) - len(held(lease))) * 256
        cache.check()
    assert most == rule.kept // B
    cache.release(lease)
    assert cache.bytes_available == cache.arena.bytes_total


def test_what_was_computed_after_a_drop_is_nobody_elses() -> None:
    cache, tokens = manager(blocks=40), words(1, 40)
    grow(cache, cache.lease(SPACE, drops=RULE), tokens)
    assert found(cache, tokens) == RULE.kept // B
    assert len(cache.index.nodes) == RULE.kept // B


def test_a_hit_ends_where_dropping_begins() -> None:
    cache, tokens = manager(blocks=40), words(1, 40)
    cache.release(grow(cache, cache.lease(SPACE), tokens))
    assert found(cache, tokens) == 9
    lease = cache.lease(SPACE, drops=RULE)
    match = cache.find(lease, tokens)
    assert match.depth == RULE.kept // B - 1
    miss = cache.why(lease, tokens, match)
    assert (miss.reason, miss.at_token) == ("exactness", RULE.kept - B)
    short = cache.lease(SPACE, drops=RULE)
    assert cache.why(short, tokens[:14], cache.find(short, tokens[:14])).reason == "tail"
    cache.acquire(lease, match)
    grow(cache, lease, tokens)
    assert found(cache, tokens) == 9


@POLICIES
def test_a_dropped_block_stays_findable_until_its_memory_is_wanted(policy: str) -> None:
    cache, tokens = manager(blocks=8, policy=policy), words(1, 40)
    lease = grow(cache, cache.lease(SPACE, drops=RULE), tokens[:20])
    assert held(lease) == [0, 3, 4]
    assert found(cache, tokens) == 4
    other = cache.lease(SPACE)
    cache.match(other, words(2, 20))
    assert cache.extend(other, 12)
    assert found(cache, tokens) == 4
    assert cache.extend(other, 16)
    assert found(cache, tokens) == 2
    assert lease.tables[0].blocks[3].node is None
    cache.check()
    assert cache.extend(other, 20)
    assert found(cache, tokens) == 1
    assert not cache.extend(other, 24)
    cache.check()
    kinds = [event.kind for event in cache.events()]
    assert kinds == ["stored"] * 4 + ["reclaimed"] * 3
    cache.release(lease)
    cache.release(other)
    cache.check()


@POLICIES
def test_a_parent_that_was_dropped_first_is_reclaimed_after_its_children(policy: str) -> None:
    cache, tokens = manager(blocks=8, policy=policy), words(1, 40)
    cache.release(grow(cache, cache.lease(SPACE, drops=RULE), tokens[:20]))
    cache.check()
    left = []
    other = cache.lease(SPACE)
    cache.match(other, words(2, 32))
    for stop in range(16, 33, B):
        assert cache.extend(other, stop)
        left.append(found(cache, tokens))
        cache.check()
    assert left == [4, 3, 2, 1, 0]


@POLICIES
def test_a_dropped_block_outlives_idle_blocks_that_hang_on_one_in_use(policy: str) -> None:
    cache, tokens = manager(blocks=16, policy=policy), words(1, 40)
    longer = grow(cache, cache.lease(SPACE, drops=DropRule(4, 20, B)), tokens[:28])
    shorter = grow(cache, cache.lease(SPACE, drops=RULE), tokens[:20])
    assert held(longer) == [0, 3, 4, 5, 6]
    assert held(shorter) == [0, 3, 4]
    forks = [cache.fork(longer) for _ in range(3)]
    for lease in (longer, *forks):
        cache.release(lease)
        cache.check()
    other = cache.lease(SPACE)
    cache.match(other, words(2, 60))
    left = []
    for stop in range(9 * B, 14 * B, B):
        assert cache.extend(other, stop)
        left.append(found(cache, tokens))
        cache.check()
    assert left == [6, 5, 4, 2, 1]


@POLICIES
def test_a_dropped_block_that_is_read_again_is_no_longer_first_in_line(policy: str) -> None:
    cache, tokens = manager(blocks=12, policy=policy), words(1, 40)
    lease = grow(cache, cache.lease(SPACE, drops=RULE), tokens[:24])
    reader = grow(cache, cache.lease(SPACE), tokens[:17])
    assert held(reader) == [0, 1, 2, 3, 4]
    other = cache.lease(SPACE)
    cache.match(other, words(2, 40))
    assert not cache.extend(other, 24)
    assert cache.extend(other, 20)
    cache.check()
    cache.release(reader)
    cache.release(lease)
    assert cache.extend(other, 36)
    cache.check()
    assert found(cache, tokens) == 3


def test_only_what_is_left_of_the_prefix_is_pinned() -> None:
    cache, tokens = manager(blocks=40, max_pinned=10_000), words(1, 40)
    lease = grow(cache, cache.lease(SPACE, drops=RULE), tokens[:20])
    assert cache.pin(lease, 5.0).blocks == 1
    cache.release(lease)
    cache.check()
    short = grow(cache, cache.lease(SPACE, drops=RULE), words(2, 15))
    assert cache.pin(short, 5.0).blocks == 3
    cache.release(short)
    cache.check()


@POLICIES
def test_pinned_children_of_a_reclaimed_block_are_pinned_no_longer(policy: str) -> None:
    cache, tokens = manager(blocks=8, policy=policy, max_pinned=10_000), words(1, 40)
    whole = grow(cache, cache.lease(SPACE), tokens[:16])
    assert cache.pin(whole, 5.0).blocks == 4
    lease = grow(cache, cache.lease(SPACE, drops=RULE), tokens[:20])
    cache.release(whole)
    cache.check()
    other = cache.lease(SPACE)
    cache.match(other, words(2, 20))
    assert cache.extend(other, 20)
    cache.check()
    assert cache.pins.bytes_pinned == 256
    cache.release(lease)
    cache.clock.now = 6.0
    cache.expire()
    cache.check()


def test_a_fork_after_a_drop_drops_on() -> None:
    cache, tokens = manager(blocks=40), words(1, 40)
    lease = grow(cache, cache.lease(SPACE, drops=RULE), tokens[:22])
    child = cache.fork(lease)
    cache.check()
    assert held(child) == held(lease) == [0, 3, 4, 5]
    grow(cache, child, [*tokens[:22], *words(3, 18)])
    grow(cache, lease, tokens)
    assert held(child) == held(lease) == [0, 8, 9]


@pytest.mark.parametrize("blocks", [4, 5, 7, 30])
@pytest.mark.parametrize("budget", [1, 3, 4, 30])
def test_a_chunk_is_what_the_pool_has_room_for(blocks: int, budget: int) -> None:
    world = World(blocks=blocks, max_num_batched_tokens=budget, max_model_len=16, enable_prefix_caching=False)
    request = world.generate(words(1, 13), 60, drops=RULE)
    assert request.receipt.dropped == [(4, 4 + 56 - 1, "window")]
    assert request.receipt.exact is False
    assert request.receipt.preemptions == 0
    again = world.add(words(2, 13), 60, drops=RULE)
    while len(again.sequences[0].token_ids) < 50:
        world.step()
    world.scheduler.preempt(again.sequences[0])
    largest = 0
    while again.sequences[0].status is not Status.FINISHED:
        [chunk] = world.step().chunks
        largest = max(largest, chunk.stop - chunk.start)
    world.verify(again)
    assert largest == min(budget, blocks * B, 50)


def test_a_chunk_leaves_what_others_are_owed() -> None:
    world = World(blocks=12, max_num_batched_tokens=40, enable_prefix_caching=False)
    plain = world.add(words(1, 18), 14)
    world.step()
    world.step()
    dropping = world.add(words(2, 44), 10, drops=RULE, priority=5)
    assert [(c.start, c.stop) for c in world.step().chunks if c.sequence.request is dropping] == [(0, 28)]
    world.run()
    world.verify(plain)
    world.verify(dropping)
    assert plain.receipt.preemptions == dropping.receipt.preemptions == 0


def test_rivals_that_drop_share_a_pool_without_a_preemption() -> None:
    """Each needs what its rule keeps and not a block more, however long it gets."""
    world = World(blocks=12, max_num_batched_tokens=40, enable_prefix_caching=False)
    rivals = [world.add(words(seed, 17 + seed), 100, drops=RULE) for seed in range(3)]
    world.run()
    for rival in rivals:
        world.verify(rival)
    assert world.scheduler.totals.preemptions == 0


def test_copies_that_arrive_together_compute_what_they_share_once() -> None:
    world = World(blocks=64, max_num_batched_tokens=8)
    copies = [world.add(words(1, 43), 1, drops=RULE) for _ in range(3)]
    world.run()
    assert [copy.receipt.reused_tokens for copy in copies] == [0, 12, 12]
    assert copies[1].receipt.miss.reason == "exactness"
    assert world.computed == 43 + 2 * (43 - 12)


@POLICIES
def test_requests_that_drop_and_others_share_prefixes_in_a_tight_pool(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = 0
    unpublish = BlockPool.unpublish

    def counting(pool: BlockPool, block: Block, reason: str) -> None:
        nonlocal cut
        cut += bool(block.refs)
        unpublish(pool, block, reason)

    monkeypatch.setattr(BlockPool, "unpublish", counting)
    for seed in range(sized(20, 200)):
        rng = random.Random(seed)
        groups = (FULL_GROUP,) if seed % 2 else (FULL_GROUP, LayerGroup((1, 2), 1, 16))
        world = World(
            rng.randint(7, 14),
            groups=groups,
            max_num_batched_tokens=rng.choice([3, 8, 30]),
            policy=policy,
            max_pinned=rng.choice([0, 1_000]),
            hash_bits=rng.choice([8, 256, 256]),
        )
        requests = []
        for _ in range(25):
            drops = DropRule(4 * rng.randrange(3), 4 * rng.randint(1, 4), B) if rng.random() < 0.6 else None
            prompt = [
                *words(rng.randrange(2), rng.randint(1, 20)),
                *words(rng.randrange(2), rng.randint(0, 5)),
            ]
            fields = {"n": rng.choice([1, 1, 2]), "priority": rng.randrange(2), "drops": drops}
            ttl = rng.choice([None, 5.0])
            requests.append(world.add(prompt, rng.randint(1, 40 if drops else 3), cache_ttl=ttl, **fields))
            for _ in range(rng.randrange(8)):
                world.step()
                world.clock.now += 0.1
                if world.scheduler.running and rng.random() < 0.1:
                    world.scheduler.preempt(rng.choice(world.scheduler.running))
        world.run()
        for request in requests:
            world.verify(request)
    assert cut > 20


@pytest.mark.parametrize(
    ("sinks", "window", "param", "message"),
    [
        (3, 8, "sinks", "sinks=3 .*block_size=4.*sinks=4 works"),
        (4, 0, "window", "window=0 .*at least 4; window=4 works"),
        (4, 10, "window", "window=10 .*window=12 works"),
        (4, 64, "window", "window=64 .* at most 32; window=28 works"),
        (32, 8, "sinks", "sinks=32 .* at most 32; sinks=24 with window=8 works"),
        (64, 64, "sinks", "sinks=64 .* at most 32; sinks=0 with window=32 works"),
    ],
)
def test_a_rule_that_cannot_be_kept_is_refused(sinks: int, window: int, param: str, message: str) -> None:
    world = World(blocks=8)
    with pytest.raises(InvalidRequest, match=message) as error:
        world.add(words(1, 5), 5, drops=DropRule(sinks, window, B))
    assert error.value.param == param
    assert not world.scheduler.has_work


def test_the_prompt_must_fit_as_everybody_elses() -> None:
    world = World(blocks=8)
    with pytest.raises(InvalidRequest, match="prompt has 32"):
        world.add(words(1, 32), 5, drops=RULE)
    request = world.generate(words(1, 31), 70, drops=RULE)
    assert len(request.sequences[0].token_ids) == 101
