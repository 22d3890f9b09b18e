"""Pins, by themselves: what is kept of them, and when each ends."""

from __future__ import annotations

from octavo.cache.blocks import Block, Owner
from octavo.cache.formats import block_format
from octavo.cache.pins import SPARE, Pins


def block(index: int) -> Block:
    return Block(index * 64, 64, 0, index, block_format("bf16"), 0, True, Owner("t"))


def test_pinning_again_keeps_one_entry_and_the_later_end() -> None:
    pins, blocks = Pins(1000), [block(i) for i in range(3)]
    for one in blocks:
        one.refs = 1
    for until in range(10, 1010):
        pins.add(blocks, until)
    assert len(pins._expiry) == 3
    pins.expire(1008, lambda _: None)
    assert pins.bytes_pinned == 3 * 64
    assert len(pins._expiry) == 3
    pins.expire(1009, lambda _: None)
    assert pins.bytes_pinned == 0
    assert not pins._expiry


def test_what_is_no_longer_pinned_is_forgotten_before_its_time() -> None:
    pins, kept = Pins(10_000), block(0)
    pins.add([kept], 5.0)
    for i in range(1, 10 * SPARE):
        one = block(i)
        pins.add([one], 1e9)
        pins.remove(one)
    assert len(pins._expiry) <= SPARE + 2
    ended: list[Block] = []
    kept.refs = 1
    pins.expire(5.0, ended.append)
    assert pins.bytes_pinned == 0
