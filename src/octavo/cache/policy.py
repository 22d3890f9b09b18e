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

    def put_back(self, block: Block) -> None:
        """`block` was removed to become smaller, and is no more or less recent for that."""

    def victim(self, nbytes: int) -> Block | None:
        """Take out the block to reclaim when `nbytes` are wanted; None if there is none."""

    def __iter__(self) -> Iterator[Block]: ...


class LRU:
    """Least recently used. One linked list by priority and size class, so that every operation is O(1).

    A parent is added after its idle children, so the oldest block of a priority has none. A block of the wanted size is
    preferred if it has none either, which keeps the size classes of the arena in place. `rank` numbers the additions.
    """

    def __init__(self) -> None:
        self._lists: dict[int, dict[int, OrderedDict[Block, None]]] = {}
        self._disordered: set[tuple[int, int]] = set()
        self._added = 0

    def add(self, block: Block) -> None:
        self._added += 1
        block.rank = self._added
        self.put_back(block)

    def put_back(self, block: Block) -> None:
        sizes = self._lists.get(block.priority)
        if sizes is None:
            sizes = self._lists[block.priority] = {}
        blocks = sizes.get(block.nbytes)
        if blocks is None:
            blocks = sizes[block.nbytes] = OrderedDict()
        elif next(reversed(blocks)).rank > block.rank:
            self._disordered.add((block.priority, block.nbytes))
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
        block = self._oldest(priority, nbytes) if nbytes in sizes else None
        if block is None or block.idle_children:
            block = min((self._oldest(priority, size) for size in sizes), key=lambda b: b.rank)
        self.remove(block)
        return block

    def _oldest(self, priority: int, nbytes: int) -> Block:
        blocks = self._lists[priority][nbytes]
        if (priority, nbytes) in self._disordered:
            self._disordered.remove((priority, nbytes))
            blocks = OrderedDict.fromkeys(sorted(blocks, key=lambda b: b.rank))
            self._lists[priority][nbytes] = blocks
        return next(iter(blocks))

    def _forget(self, priority: int, nbytes: int) -> None:
        self._disordered.discard((priority, nbytes))
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

    put_back = add

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
