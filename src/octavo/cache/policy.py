"""Which idle block goes first. One class per policy; a new one joins the test matrix through `POLICIES`.

Every policy obeys the design's order: lowest priority (largest number) first, and a block never before the
indexed blocks that are found through it. Policies differ in what comes between.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from octavo.cache.blocks import Block


class Policy(Protocol):
    """Holds the idle blocks: sealed, indexed, held by no lease."""

    def add(self, block: Block) -> None:
        """`block` became idle, or is added again after blocks that are found through it."""

    def remove(self, block: Block) -> None:
        """`block` is used again."""

    def victim(self, nbytes: int) -> Block | None:
        """Take out the block to reclaim when `nbytes` are wanted; None if there is none."""

    def __iter__(self) -> Iterator[Block]: ...


class LRU:
    """Least recently used. Every operation is O(1): one linked list by priority and size class.

    A parent is added after its idle children, so list order alone reclaims leaves first. Blocks of the wanted
    size are preferred within the lowest priority, which keeps the size classes of the arena in place.
    """

    def __init__(self) -> None:
        self._lists: dict[int, dict[int, OrderedDict[Block, None]]] = {}

    def add(self, block: Block) -> None:
        sizes = self._lists.get(block.priority)
        if sizes is None:
            sizes = self._lists[block.priority] = {}
        blocks = sizes.get(block.nbytes)
        if blocks is None:
            blocks = sizes[block.nbytes] = OrderedDict()
        blocks[block] = None

    def remove(self, block: Block) -> None:
        blocks = self._lists[block.priority][block.nbytes]
        del blocks[block]
        if not blocks:
            self._forget(block.priority, block.nbytes)

    def victim(self, nbytes: int) -> Block | None:
        if not self._lists:
            return None
        priority = max(self._lists)
        sizes = self._lists[priority]
        size = nbytes if nbytes in sizes else max(sizes)
        block, _ = sizes[size].popitem(last=False)
        if not sizes[size]:
            self._forget(priority, size)
        return block

    def _forget(self, priority: int, nbytes: int) -> None:
        del self._lists[priority][nbytes]
        if not self._lists[priority]:
            del self._lists[priority]

    def __iter__(self) -> Iterator[Block]:
        for sizes in self._lists.values():
            for blocks in sizes.values():
                yield from blocks


class CostAware:
    """Least recompute cost saved per byte, aged: Greedy-Dual-Size-Frequency (Cherkasova, HPL-98-69, 1998).

    rank = age + uses / bytes, where age is the rank of the last block reclaimed. Every block is worth the
    same number of tokens; that attention makes late tokens dearer is left out on purpose, because it favours
    the blocks that are reused least (on the Mooncake conversation trace it loses more hits than LRU).
    Operations are O(log n).
    """

    def __init__(self) -> None:
        self._idle: dict[Block, int] = {}
        self._heaps: dict[int, list[tuple[int, float, int, Block]]] = {}
        self._age = 0.0
        self._added = 0

    def add(self, block: Block) -> None:
        self._added += 1
        self._idle[block] = self._added
        block.rank = self._age + block.uses / block.nbytes
        if not block.idle_children:
            self._push(block)

    def remove(self, block: Block) -> None:
        del self._idle[block]

    def victim(self, nbytes: int) -> Block | None:
        tops = {size: heap[0][:2] for size, heap in self._heaps.items() if self._settle(heap)}
        if not tops:
            return None
        size = min(tops, key=lambda s: (tops[s][0], s != nbytes, tops[s][1]))
        _, rank, _, block = heapq.heappop(self._heaps[size])
        self._age = max(self._age, rank)
        del self._idle[block]
        parent = block.node.parent.blocks[block.group] if block.node and block.node.parent else None
        if parent in self._idle and parent.idle_children == 1:
            self._push(parent)
        return block

    def _push(self, block: Block) -> None:
        heap = self._heaps.setdefault(block.nbytes, [])
        if len(heap) > 2 * len(self._idle) + 64:
            heap[:] = [entry for entry in heap if self._idle.get(entry[3]) == entry[2]]
            heapq.heapify(heap)
        heapq.heappush(heap, (-block.priority, block.rank, self._idle[block], block))

    def _settle(self, heap: list[tuple[int, float, int, Block]]) -> bool:
        """Drop entries of blocks that were used since; whether one is left."""
        while heap and self._idle.get(heap[0][3]) != heap[0][2]:
            heapq.heappop(heap)
        return bool(heap)

    def __iter__(self) -> Iterator[Block]:
        return iter(self._idle)


POLICIES: dict[str, type[Policy]] = {"lru": LRU, "cost": CostAware}
