"""Folding under pressure: blocks that nobody reads are stored in a smaller form before any of them is thrown away.

A folded block is found as before, but is exact no longer. The small form is written aside first, because a full arena
has no room for it beside the large one, and many blocks are folded at a time, because the arena slides together for
them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from octavo.cache.arena import Arena
from octavo.cache.blocks import Block
from octavo.cache.formats import BlockFormat, block_format
from octavo.cache.idle import Idle
from octavo.cache.layout import CacheLayout

SHARE = 64

Step = tuple[Block, BlockFormat]
"""A block, and the format that it is about to have or had before."""


def aside_bytes(layout: CacheLayout, bytes_total: int) -> int:
    """Bytes beside an arena of `bytes_total` that folding writes to: a part of it, and at least one block."""
    groups = range(len(layout.groups))
    blocks = [layout.format_bytes(g, block_format(step)) for g in groups for step in layout.ladder]
    return max(*blocks, bytes_total // SHARE) if blocks else 0


class Folding:
    """Folds idle blocks in place. `slide` compacts the arena. `folded` counts blocks by the format they were folded
    to."""

    def __init__(self, layout: CacheLayout, arena: Arena, idle: Idle, slide: Callable[[], None]) -> None:
        self.folded: Counter[str] = Counter()
        self._layout = layout
        self._arena = arena
        self._idle = idle
        self._slide = slide
        self._room = aside_bytes(layout, arena.bytes_total)

    def fold(self, wanted: int) -> list[Step]:
        """Free `wanted` bytes, or as many as one round can, by making the coldest blocks smaller.

        Returns the blocks and what they were stored as; none if nothing can be made smaller.
        """
        steps = self._choose(wanted)
        before = [(block, block.format) for block, _ in steps]
        asides = self._encode(steps)
        for block, _ in steps:
            self._arena.free(block.offset)
        for (block, format), aside in zip(steps, asides, strict=True):
            self._idle.shrink(block, format, self._layout.format_bytes(block.group, format))
            block.offset = self._place(block.nbytes, len(steps))
            if self._arena.memory is not None:
                self._arena.memory.place(aside, block.offset, block.nbytes)
            self.folded[format.name] += 1
        return before

    def _choose(self, wanted: int) -> list[Step]:
        steps: list[Step] = []
        foldable, gain, aside = self._idle.foldable, 0, 0
        while gain < wanted and (step := foldable.first()) is not None:
            block, format = step
            nbytes = self._layout.format_bytes(block.group, format)
            aside += nbytes
            if aside > self._room:
                break
            foldable.remove(block)
            gain += block.nbytes - nbytes
            steps.append(step)
        return steps

    def _encode(self, steps: list[Step]) -> list[int]:
        """Write the blocks aside in their new form; returns where."""
        pairs: dict[int, list[tuple[int, int]]] = {}
        asides, aside = [], 0
        for block, format in steps:
            pairs.setdefault(block.group, []).append((block.entry, aside | format.tag))
            asides.append(aside)
            aside += self._layout.format_bytes(block.group, format)
        if self._arena.memory is not None:
            for group, from_to in pairs.items():
                self._arena.memory.encode(group, from_to)
        return asides

    def _place(self, nbytes: int, blocks: int) -> int:
        offset = self._arena.allocate(nbytes, blocks)
        if offset is None:
            self._slide()
            offset = self._arena.allocate(nbytes, blocks)
        assert offset is not None
        return offset
