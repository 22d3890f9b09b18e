"""Which blocks can be folded, and to what: the steps of the layout's `ladder`.

The coldest block takes one step down (bf16 to int8, say), and none its second step while one is left that has not taken
its first. The first block of a sequence stays as it is: everything attends to it.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator

from octavo.cache.blocks import Block, Lease
from octavo.cache.formats import BlockFormat, block_format
from octavo.cache.layout import CacheLayout


def folded_positions(layout: CacheLayout, lease: Lease, start: int = 0) -> Counter[str]:
    """How many positions of `lease` from block `start` on are read from folded blocks, by their format (in one layer
    group at least)."""
    counts: Counter[str] = Counter()
    for i in range(start, start if lease.pedigree else lease.sealed):
        for g, table in enumerate(lease.tables):
            block = table.blocks[i]
            if block is not None and block.format != layout.block_format(g, i):
                counts[block.format.name] += layout.block_size
                break
    return counts


class Foldable:
    """The idle blocks that can be made smaller, by the step that comes next for them, the coldest first."""

    def __init__(self, layout: CacheLayout) -> None:
        self._layout = layout
        self._steps: dict[tuple[int, BlockFormat], BlockFormat | None] = {}
        self._waiting: dict[str, OrderedDict[Block, None]] = {step: OrderedDict() for step in layout.ladder}

    def step(self, block: Block) -> BlockFormat | None:
        """What `block` is folded to next."""
        if not block.index or not self._waiting:
            return None
        key = block.group, block.format
        if key not in self._steps:
            self._steps[key] = self._layout.smaller(*key)
        return self._steps[key]

    def add(self, block: Block) -> None:
        """`block` has no reader any more."""
        step = self.step(block)
        if step is not None:
            self._waiting[step.name][block] = None

    def remove(self, block: Block) -> None:
        """`block` is used again, or gone."""
        step = self.step(block)
        if step is not None:
            del self._waiting[step.name][block]

    def first(self) -> tuple[Block, BlockFormat] | None:
        """The block to fold next, and to what; None if there is none."""
        for name, blocks in self._waiting.items():
            if blocks:
                return next(iter(blocks)), block_format(name)
        return None

    def __iter__(self) -> Iterator[Block]:
        for blocks in self._waiting.values():
            yield from blocks
