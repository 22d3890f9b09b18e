"""The picture of the arena says what the books say."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.cache.blocks import Owner
from octavo.cache.hashing import Namespace
from octavo.cache.layout import LayerGroup
from octavo.cache.picture import STATES, Picture, Row, take
from octavo.errors import InvalidRequest
from support.cache_world import FULL_GROUP, World, words
from support.sizes import sized

GROUPS = {
    "full": (FULL_GROUP,),
    "two sizes": (FULL_GROUP, LayerGroup((1, 2), 1, 16)),
    "mixed": (FULL_GROUP, LayerGroup((1, 2), 1, 16, window=6)),
}
SPACE = Namespace("m", "acme")


def picture(world: World) -> Picture:
    """Every running sequence under its `repr`."""
    return take(world.cache, ((name_of(s), s.lease) for s in world.scheduler.running))


def name_of(sequence: Any) -> str:
    return f"{sequence.request.request_id}#{sequence.index}"


def check(world: World) -> dict[int, Row]:
    """The picture of `world`, if it agrees with its books."""
    shot = picture(world)
    rows, cache = shot.rows, world.cache
    assert rows.keys() == {block.offset for block in cache.pool.blocks}
    states = Counter(row.state for row in rows.values())
    assert states.keys() <= set(STATES)
    assert states["open"] == cache.stats().blocks["open"]
    assert states.total() - states["open"] == cache.stats().blocks["sealed"]

    def held(*kinds: str) -> int:
        return sum(row.nbytes for row in rows.values() if row.state in kinds)

    assert held(*STATES) + shot.stats.bytes_free == shot.stats.bytes_total
    assert held("cached", "pinned") == shot.stats.bytes_cached
    assert held("open", "running") == shot.stats.bytes_running
    assert sum(r.nbytes for r in rows.values() if r.pinned_until is not None) == shot.stats.bytes_pinned
    check_readers(world, rows)
    for row in rows.values():
        assert len(row.holders) == row.refs
        assert (row.used_at is None) == (row.refs > 0)
        assert (row.filled == cache.layout.block_size) or row.state == "open"
        if row.parent is not None:
            parent = rows[row.parent]
            assert parent.group == row.group
            assert parent.depth < row.depth
    covered = {
        offset + i * nbytes: nbytes
        for offset, nbytes, count in shot.slabs
        for i in range(count)
        if offset + i * nbytes in rows
    }
    assert covered == {offset: row.nbytes for offset, row in rows.items()}
    return rows


def check_readers(world: World, rows: dict[int, Row]) -> None:
    for sequence in world.scheduler.running:
        for table in sequence.tables:
            for i, offset in enumerate(table.entries):
                if offset < 0:
                    continue
                row = rows[offset]
                assert name_of(sequence) in row.holders
                assert row.depth == i
                if i and table.entries[i - 1] >= 0:
                    assert row.parent == table.entries[i - 1]


def test_a_block_through_its_life() -> None:
    world = World(blocks=8, max_pinned=10_000)
    request = world.add(words(1, 10), 3, namespace=SPACE, cache_ttl=5.0, label="mail")
    assert check(world) == {}
    world.step()
    rows = sorted(check(world).values(), key=lambda row: row.depth)
    assert [row.state for row in rows] == ["running", "running", "open"]
    assert [row.filled for row in rows] == [4, 4, 2]
    assert [row.parent for row in rows] == [None, rows[0].offset, rows[1].offset]
    assert {row.owner for row in rows} == {Owner("acme", "mail", request.request_id)}
    assert {row.holders for row in rows} == {(f"{request.request_id}#0",)}
    world.clock.now = 2.0
    world.run()
    rows = sorted(check(world).values(), key=lambda row: row.depth)
    assert [(row.state, row.pinned_until, row.used_at, row.refs) for row in rows] == [
        ("pinned", 7.0, 2.0, 0)
    ] * 3
    world.clock.now = 7.0
    world.cache.expire()
    assert [row.state for row in check(world).values()] == ["cached"] * 3
    assert world.cache.reset() == 3
    assert check(world) == {}
    assert picture(world).reclaimed == {"reset": 3}


def test_shared_blocks_name_all_their_readers() -> None:
    world = World(blocks=16)
    world.generate(words(1, 8), 1)
    requests = [world.add([*words(1, 8), 5, i, *words(i + 2, 4)], 8) for i in range(3)]
    world.step()
    rows = check(world)
    shared = [row for row in rows.values() if row.refs == 3]
    assert [row.depth for row in sorted(shared)] == [0, 1]
    assert all(row.holders == tuple(f"{r.request_id}#0" for r in requests) for row in shared)
    assert all(row.uses == 4 for row in shared)
    followers = [row for row in rows.values() if row.depth == 2]
    assert len({row.parent for row in followers}) == 1


@settings(max_examples=sized(60, 400), deadline=None, derandomize=True, database=None)
@given(data=st.data())
@pytest.mark.parametrize("groups", GROUPS)
def test_the_picture_equals_the_books_at_any_time(groups: str, data: st.DataObject) -> None:
    world = World(
        data.draw(st.integers(6, 16)),
        groups=GROUPS[groups],
        spare_bytes=data.draw(st.sampled_from([0, 200])),
        max_num_batched_tokens=data.draw(st.sampled_from([4, 16])),
        max_num_seqs=4,
        max_pinned=4 * 256,
    )
    for _ in range(data.draw(st.integers(3, 14))):
        match data.draw(st.sampled_from(["add", "add", "step", "step", "preempt", "abort", "time"])):
            case "add":
                length, variant = data.draw(st.integers(1, 30)), data.draw(st.integers(0, 2))
                prompt = [(variant * i) // 8 % 2 for i in range(length)]
                fields = {
                    "n": data.draw(st.sampled_from([1, 2])),
                    "cache_ttl": data.draw(st.sampled_from([None, 3.0])),
                }
                try:
                    world.add(prompt, data.draw(st.integers(1, 12)), namespace=SPACE, **fields)
                except InvalidRequest:
                    assert length + 1 > world.scheduler.limit
            case "step":
                for _ in range(data.draw(st.integers(1, 6))):
                    world.step()
            case "preempt" if world.scheduler.running:
                world.scheduler.preempt(world.scheduler.running[-1])
            case "abort" if world.scheduler.requests:
                world.scheduler.abort(next(iter(world.scheduler.requests)))
            case _:
                world.clock.now += 2.0
                world.cache.expire()
        check(world)


def test_a_picture_does_not_change_afterwards() -> None:
    world = World(blocks=8)
    world.add(words(1, 9), 6)
    world.step()
    shot = picture(world)
    before = dict(shot.rows)
    other = picture(world)
    world.run()
    assert shot.rows == before == other.rows
    assert picture(world).rows != before
