import random

import pytest

from octavo.cache.arena import SLAB_BLOCKS, Arena
from octavo.errors import BooksDoNotBalance
from support.cache_world import NAN, Bytes


def fill(arena: Arena, nbytes: int) -> list[int]:
    offsets = []
    while (offset := arena.allocate(nbytes)) is not None:
        offsets.append(offset)
    return offsets


@pytest.mark.parametrize("blocks", [1, 2, SLAB_BLOCKS - 1, SLAB_BLOCKS, SLAB_BLOCKS + 1, 1000])
@pytest.mark.parametrize("tail", [0, 1, 95])
def test_a_budget_of_n_blocks_holds_exactly_n(blocks, tail):
    arena = Arena(blocks * 96 + tail)
    assert sorted(fill(arena, 96)) == list(range(0, 96 * blocks, 96))
    assert arena.bytes_free == tail
    assert len(arena.check()) == blocks
    assert arena.compactions == 0


def test_free_bytes_of_one_class_serve_another():
    arena = Arena(12 * 100)
    small = fill(arena, 100)
    for offset in small:
        arena.free(offset)
    assert len(fill(arena, 300)) == 4
    arena.check()


def test_scattered_bytes_are_slid_together_and_content_moves_along():
    memory = Bytes(16 * 8)
    arena = Arena(16 * 8, memory)
    offsets = fill(arena, 8)
    content = {offset: bytes([i]) * 8 for i, offset in enumerate(offsets)}
    for offset, data in content.items():
        memory.data[offset : offset + 8] = data
    for offset in offsets[::2]:
        arena.free(offset)
    assert arena.allocate(16) is None
    moved = arena.compact()
    for offset in offsets[1::2]:
        new = moved.get(offset, offset)
        assert memory.data[new : new + 8] == content[offset]
    assert len(fill(arena, 16)) == 4
    arena.check()


def test_freed_and_new_blocks_are_poisoned():
    memory = Bytes(64)
    arena = Arena(64, memory, poison=True)
    offset = arena.allocate(32)
    assert memory.data[offset : offset + 32] == NAN * 32
    memory.data[offset : offset + 32] = bytes(32)
    arena.free(offset)
    assert memory.data[offset : offset + 32] == NAN * 32


@pytest.mark.parametrize("seed", range(20))
def test_an_allocation_fails_only_for_want_of_bytes(seed):
    """Against the obvious account: a dictionary of blocks, and content that must survive every move."""
    rng = random.Random(seed)
    total, sizes = 1000, (24, 40, 56)
    memory = Bytes(total)
    arena = Arena(total, memory)
    blocks: dict[int, tuple[int, bytes]] = {}
    for _ in range(600):
        size = rng.choice(sizes)
        if blocks and rng.random() < 0.48:
            offset = rng.choice(sorted(blocks))
            del blocks[offset]
            arena.free(offset)
        elif total - sum(n for n, _ in blocks.values()) >= size:
            offset = arena.allocate(size)
            if offset is None:
                moved = arena.compact()
                blocks = {moved.get(o, o): kept for o, kept in blocks.items()}
                offset = arena.allocate(size)
            assert offset is not None
            assert offset not in blocks
            data = rng.randbytes(size)
            memory.data[offset : offset + size] = data
            blocks[offset] = (size, data)
        assert arena.check() == blocks.keys()
        for offset, (size, data) in blocks.items():
            assert memory.data[offset : offset + size] == data


def test_lost_bytes_are_noticed():
    arena = Arena(64)
    arena.allocate(32)
    arena.bytes_free += 1
    with pytest.raises(BooksDoNotBalance):
        arena.check()
