"""Pins: blocks kept for a time after their request, within a byte budget."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from octavo.cache.blocks import Block
from octavo.cache.policy import LRU

SPARE = 64
"""Entries for blocks that are pinned no longer, beyond as many as are, before they are dropped."""


class Pins:
    """Which blocks are pinned, and the idle ones among them (reclaimed only when nothing else is left)."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes_pinned = 0
        self.idle = LRU()
        self._expiry: list[tuple[float, int, Block]] = []  # one for each pinned block, and for some that were
        self._count, self._pinned = 0, 0

    def bytes_added(self, blocks: Sequence[Block]) -> int:
        """Bytes that pinning `blocks` would add."""
        return sum(block.nbytes for block in blocks if not block.pinned_until)

    def add(self, blocks: Sequence[Block], until: float) -> None:
        """Pin `blocks` (in use, children first) until the clock reads `until`, or longer where they already
        are."""
        for block in blocks:
            if not block.pinned_until:
                self.bytes_pinned += block.nbytes
                self._pinned += 1
                self._expect(until, block)
            block.pinned_until = max(block.pinned_until, until)

    def remove(self, block: Block) -> None:
        """`block` is pinned no longer."""
        block.pinned_until = 0.0
        self.bytes_pinned -= block.nbytes
        self._pinned -= 1
        if len(self._expiry) > 2 * self._pinned + SPARE:
            pinned = {entry[2]: entry for entry in self._expiry if entry[2].pinned_until}
            self._expiry = sorted(pinned.values())

    def expire(self, now: float, unpinned: Callable[[Block], None]) -> None:
        """End every pin that is due; idle blocks are handed to `unpinned`."""
        due: list[Block] = []
        while self._expiry and self._expiry[0][0] <= now:
            due.append(heapq.heappop(self._expiry)[2])
        for block in sorted(due, key=lambda b: -b.index):
            if 0 < block.pinned_until <= now:
                self.remove(block)
                if not block.refs:
                    self.idle.remove(block)
                    unpinned(block)
            elif block.pinned_until:
                self._expect(block.pinned_until, block)

    def _expect(self, until: float, block: Block) -> None:
        self._count += 1
        heapq.heappush(self._expiry, (until, self._count, block))
