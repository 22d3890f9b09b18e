"""The arena: one buffer, byte offsets, blocks of several size classes.

    buffer   [ slab of class a | slab of class b | gap ........ ]
    slab     a run of blocks of one size, carved when the class runs out, as long as the gap allows
    gap      bytes that belong to no slab

A class takes and gives back blocks in O(1) from its slabs. A slab whose blocks are all free stays with its
class until another class needs the bytes. When free bytes lie scattered, `compact` slides every live block
towards 0, so an allocation fails only if fewer bytes are free than it asks for: slab tails and alignment
never cost a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from octavo.errors import BooksDoNotBalance

SLAB_BLOCKS = 64


class Memory(Protocol):
    """The buffer behind the offsets. The arena itself runs without one (accounting only)."""

    def move(self, src: int, dst: int, nbytes: int) -> None:
        """Move bytes; the ranges may overlap."""

    def copy(self, src: int, dst: int, nbytes: int) -> None:
        """Copy bytes between two blocks."""

    def encode(self, group: int, from_to: Sequence[tuple[int, int]]) -> None:
        """Write blocks of a layer group in other formats beside the buffer: entries of source and target, whose offset
        counts from where that begins."""

    def place(self, aside: int, dst: int, nbytes: int) -> None:
        """Copy what was written aside to a block."""

    def poison(self, offset: int, nbytes: int) -> None:
        """Fill with NaN, so that a read of memory nobody wrote shows."""


class Slab:
    """`count` blocks of `block_bytes` from byte `start`; `free` is the stack of free offsets."""

    __slots__ = ("block_bytes", "count", "free", "start")

    def __init__(self, start: int, block_bytes: int, count: int) -> None:
        self.start = start
        self.block_bytes = block_bytes
        self.count = count
        self.free: list[int] = []

    @property
    def end(self) -> int:
        return self.start + self.count * self.block_bytes

    @property
    def offsets(self) -> range:
        return range(self.start, self.end, self.block_bytes)


class Arena:
    """Hands out byte offsets in `[0, bytes_total)`. With `poison`, new and freed blocks are filled with
    NaN."""

    def __init__(self, bytes_total: int, memory: Memory | None = None, poison: bool = False) -> None:
        self.bytes_total = bytes_total
        self.bytes_free = bytes_total
        self.memory = memory
        self.compactions = 0
        self._poison = poison
        self._gaps: list[tuple[int, int]] = [(0, bytes_total)]
        self._slab_of: dict[int, Slab] = {}
        self._usable: dict[int, list[Slab]] = {}

    def allocate(self, nbytes: int, slab_blocks: int = SLAB_BLOCKS) -> int | None:
        """Offset of a block of `nbytes`; None if no slab or gap has room (then `compact`, if `bytes_free`
        allows). A new slab is of `slab_blocks` at most."""
        usable = self._usable.setdefault(nbytes, [])
        if not usable:
            slab = self._carve(nbytes, slab_blocks)
            if slab is None:
                return None
            usable.append(slab)
        free = usable[-1].free
        offset = free.pop()
        if not free:
            usable.pop()
        self.bytes_free -= nbytes
        if self._poison:
            self._fill(offset, nbytes)
        return offset

    def free(self, offset: int) -> None:
        """Take the block at `offset` back."""
        slab = self._slab_of[offset]
        if not slab.free:
            self._usable.setdefault(slab.block_bytes, []).append(slab)
        slab.free.append(offset)
        self.bytes_free += slab.block_bytes
        if self._poison:
            self._fill(offset, slab.block_bytes)

    def compact(self) -> dict[int, int]:
        """Slide all live blocks to the front, so that the free bytes are one gap. Returns new offset by
        old."""
        self.compactions += 1
        moved: dict[int, int] = {}
        live = self._live()
        self._slab_of.clear()
        self._usable.clear()
        slab, top = Slab(0, 0, 0), 0
        for offset, nbytes in live:
            if offset != top:
                moved[offset] = top
                if self.memory is not None:
                    self.memory.move(offset, top, nbytes)
            if slab.block_bytes != nbytes:
                slab = Slab(top, nbytes, 0)
            slab.count += 1
            self._slab_of[top] = slab
            top += nbytes
        self._gaps = [(top, self.bytes_total)] if top < self.bytes_total else []
        if self._poison:
            self._fill(top, self.bytes_total - top)
        return moved

    def slabs(self) -> list[Slab]:
        """All slabs, by address. What lies between them is free for any class."""
        return sorted({id(s): s for s in self._slab_of.values()}.values(), key=lambda s: s.start)

    def check(self) -> set[int]:
        """Offsets in use. Raises `BooksDoNotBalance` unless slabs and gaps tile the buffer and the free bytes
        agree."""
        slabs = {slab.start: slab for slab in self._slab_of.values()}
        top = 0
        for start, end in sorted([(s.start, s.end) for s in slabs.values()] + self._gaps):
            if start != top:
                raise BooksDoNotBalance(f"arena: byte {top} to {start} belongs to no slab or to two")
            top = end
        if top != self.bytes_total:
            raise BooksDoNotBalance(f"arena: slabs and gaps end at byte {top} of {self.bytes_total}")
        live = self._live()
        if sum(nbytes for _, nbytes in live) + self.bytes_free != self.bytes_total:
            raise BooksDoNotBalance(
                f"arena: {self.bytes_free} bytes counted as free do not fit the live blocks"
            )
        return {offset for offset, _ in live}

    def _carve(self, nbytes: int, most: int) -> Slab | None:
        for dissolved in (False, True):
            if dissolved:
                self._dissolve_empty_slabs()
            for i, (start, end) in enumerate(self._gaps):
                count = min((end - start) // nbytes, most, SLAB_BLOCKS)
                if count:
                    slab = Slab(start, nbytes, count)
                    slab.free.extend(reversed(slab.offsets))
                    self._slab_of.update(dict.fromkeys(slab.offsets, slab))
                    self._gaps[i : i + 1] = [(slab.end, end)] if slab.end < end else []
                    return slab
        return None

    def _dissolve_empty_slabs(self) -> None:
        for usable in self._usable.values():
            for slab in usable:
                if len(slab.free) == slab.count:
                    self._gaps.append((slab.start, slab.end))
                    for offset in slab.offsets:
                        del self._slab_of[offset]
            usable[:] = [slab for slab in usable if len(slab.free) < slab.count]
        merged: list[tuple[int, int]] = []
        for start, end in sorted(self._gaps):
            if merged and merged[-1][1] == start:
                merged[-1] = (merged[-1][0], end)
            else:
                merged.append((start, end))
        self._gaps = merged

    def _live(self) -> list[tuple[int, int]]:
        free = {offset for usable in self._usable.values() for slab in usable for offset in slab.free}
        return sorted((o, slab.block_bytes) for o, slab in self._slab_of.items() if o not in free)

    def _fill(self, offset: int, nbytes: int) -> None:
        if self.memory is not None and nbytes:
            self.memory.poison(offset, nbytes)
