"""The idle blocks: findable, held by no lease, first in line when memory is wanted."""

from __future__ import annotations

from octavo.cache.blocks import Block
from octavo.cache.formats import BlockFormat
from octavo.cache.ladder import Foldable
from octavo.cache.pins import Pins
from octavo.cache.policy import Policy
from octavo.cache.prefix import PrefixIndex


class Idle:
    """The policy's blocks and, taken only when no other is left, the pinned ones. `bytes` is what all take, `foldable`
    are those that can be made smaller."""

    def __init__(self, policy: Policy, pins: Pins, index: PrefixIndex) -> None:
        self.policy = policy
        self.pins = pins
        self.foldable = Foldable(index.layout)
        self.bytes = 0
        self._index = index

    def add(self, block: Block) -> None:
        """`block` has no reader any more."""
        self._list_of(block).add(block)
        self.foldable.add(block)
        self._count(block, +1)

    def renew(self, block: Block) -> None:
        """Idle ancestors of `block` go after it and what is found through it: they were dropped before."""
        parent = self._index.parent_of(block)
        while parent is not None:
            if not parent.refs:
                self._list_of(parent).remove(parent)
                self._list_of(parent).add(parent)
            parent = self._index.parent_of(parent)

    def remove(self, block: Block) -> None:
        """`block` is used again."""
        self._list_of(block).remove(block)
        self.foldable.remove(block)
        self._count(block, -1)

    def shrink(self, block: Block, format: BlockFormat, nbytes: int) -> None:
        """`block`, which `foldable` has given away, is stored as `format` from now on and keeps its turn."""
        self._list_of(block).remove(block)
        change = nbytes - block.nbytes
        self.bytes += change
        if block.pinned_until:
            self.pins.bytes_pinned += change
        block.format, block.nbytes, block.exact = format, nbytes, False
        self._list_of(block).put_back(block)
        self.foldable.add(block)

    def victim(self, nbytes: int) -> tuple[Block, str]:
        """Take out the block to reclaim when `nbytes` are wanted, of which at least one must be there; and why."""
        block, reason = self.policy.victim(nbytes), "pressure"
        if block is None:
            block, reason = self.pins.idle.victim(nbytes), "pressure on pins"
        assert block is not None
        self.foldable.remove(block)
        self._count(block, -1)
        return block, reason

    def _list_of(self, block: Block) -> Policy:
        return self.pins.idle if block.pinned_until else self.policy

    def _count(self, block: Block, change: int) -> None:
        self.bytes += change * block.nbytes
        parent = self._index.parent_of(block)
        if parent is not None:
            parent.idle_children += change
