"""Pins: blocks kept for a time after their request, within a byte budget."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from octavo.cache.blocks import Block
from octavo.cache.policy import LRU


class Pins:
    """Which blocks are pinned, and the idle ones among them (reclaimed only when nothing else is left)."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.bytes_pinned = 0
        self.idle = LRU()
        self._expiry: list[tuple[float, int, Sequence[Block]]] = []
        self._count = 0

    def bytes_added(self, blocks: Sequence[Block]) -> int:
        """Bytes that pinning `blocks` would add."""
        return sum(block.nbytes for block in blocks if not block.pinned_until)

    def add(self, blocks: Sequence[Block], until: float) -> None:
        """Pin `blocks` (in use, children first) until the clock reads `until`, or longer where they already
        are."""
        self.bytes_pinned += self.bytes_added(blocks)
        for block in blocks:
            block.pinned_until = max(block.pinned_until, until)
        self._count += 1
        heapq.heappush(self._expiry, (until, self._count, blocks))

    def remove(self, block: Block) -> None:
        """`block` is pinned no longer."""
        block.pinned_until = 0.0
        self.bytes_pinned -= block.nbytes

    def expire(self, now: float, unpinned: Callable[[Block], None]) -> None:
        """End every pin that is due; idle blocks are handed to `unpinned`."""
        due: list[Block] = []
        while self._expiry and self._expiry[0][0] <= now:
            due.extend(heapq.heappop(self._expiry)[2])
        for block in sorted(due, key=lambda b: -b.index):
            if 0 < block.pinned_until <= now:
                self.remove(block)
                if not block.refs:
                    self.idle.remove(block)
                    unpinned(block)
