"""The blocks there are: made, read, idle, folded, taken back, each byte of them counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from octavo.cache.arena import Arena, Memory
from octavo.cache.blocks import Block, Lease
from octavo.cache.events import Event, EventLog
from octavo.cache.folding import Folding
from octavo.cache.formats import BlockFormat
from octavo.cache.idle import Idle
from octavo.cache.layout import CacheLayout
from octavo.cache.pins import Pins
from octavo.cache.policy import POLICIES
from octavo.cache.prefix import PrefixIndex

COMPACTION_RESERVE = 64


class BlockPool:
    """Blocks in `bytes_total` bytes, and the `leases` that hold them.

    `policy` is a name in `POLICIES`, `max_pinned` the byte budget of pins. `formats` counts blocks by format,
    `reclaimed` published ones that were taken back, by reason.
    """

    def __init__(
        self,
        layout: CacheLayout,
        bytes_total: int,
        policy: str,
        max_pinned: int,
        memory: Memory | None,
        poison: bool,
        hash_bits: int,
        clock: Callable[[], float],
    ) -> None:
        self.layout = layout
        self.clock = clock
        self.arena = Arena(bytes_total, memory, poison)
        self.index = PrefixIndex(layout, hash_bits)
        self.pins = Pins(max_pinned)
        self.idle = Idle(POLICIES[policy](), self.pins, self.index)
        self.folding = Folding(layout, self.arena, self.idle, self._slide)
        self.log = EventLog()
        self.blocks: set[Block] = set()
        self.blocks_open = 0
        self.formats: Counter[str] = Counter()
        self.reclaimed: Counter[str] = Counter()
        self.leases: set[Lease] = set()

    @property
    def bytes_available(self) -> int:
        """Bytes that running sequences could still get: free ones and idle blocks, pinned or not."""
        return self.arena.bytes_free + self.idle.bytes

    def new(self, g: int, i: int, lease: Lease, format: BlockFormat) -> Block:
        """An open block, number `i` of `lease` in group `g`. There must be room, if idle blocks are taken back;
        others may be moved for it."""
        size = self.layout.block_sizes_bytes[g] if format.is_compute else self.layout.sealed_sizes_bytes[g]
        while self.arena.bytes_free < size:
            self._make_room(size)
        offset = self.arena.allocate(size)
        if offset is None:
            offset = self._compact(size)
        block = Block(offset, size, g, i, format, lease.priority, lease.pedigree, lease.owner)
        self.blocks.add(block)
        self.formats[format.name] += 1
        self.blocks_open += 1
        return block

    def take(self, block: Block, lease: Lease) -> None:
        """`lease` reads the published `block` from now on."""
        if not block.refs:
            self.idle.remove(block)
        block.refs += 1
        block.uses += 1
        if lease.priority < block.priority:
            block.priority = lease.priority
        if not block.exact:
            lease.pedigree = False

    def let_go(self, block: Block) -> None:
        """One reader less; the last one leaves it idle or, where nobody could find it, free."""
        block.refs -= 1
        if block.refs:
            return
        block.used_at = self.clock()
        if block.node is None:
            self.free(block)
        else:
            self.idle.add(block)

    def unpublish(self, block: Block, reason: str) -> None:
        """`block` is found no longer, and pinned no longer."""
        if block.pinned_until:
            self.pins.remove(block)
        self.reclaimed[reason] += 1
        self.note("reclaimed", reason, block)
        self.index.drop(block)

    def free(self, block: Block) -> None:
        """Nobody needs `block`, which is neither published nor idle: its bytes are free."""
        self.blocks.remove(block)
        self.formats[block.format.name] -= 1
        if not block.sealed:
            self.blocks_open -= 1
        self.arena.free(block.offset)

    def note(self, kind: str, reason: str, block: Block) -> None:
        """Log what happens to a published block."""
        assert block.node is not None
        digest, size = block.node.digest, self.layout.block_size
        self.log.add(Event(self.clock(), kind, reason, None, 0, block.group, digest, size, block.owner))

    def _compact(self, nbytes: int) -> int:
        """Slide the blocks together. Makes a little more room than needed first, so that this stays rare."""
        reserve = self.arena.bytes_total // COMPACTION_RESERVE
        while self.arena.bytes_free < reserve and self.idle.bytes > self.pins.bytes_pinned:
            self._make_room(nbytes)
        offset = self.arena.allocate(nbytes)
        if offset is not None:
            return offset
        self._slide()
        offset = self.arena.allocate(nbytes)
        assert offset is not None
        return offset

    def _slide(self) -> None:
        moved = self.arena.compact()
        for block in self.blocks:
            block.offset = moved.get(block.offset, block.offset)
        for lease in self.leases:
            for table in lease.tables:
                table.refresh()

    def _make_room(self, nbytes: int) -> None:
        """Fold idle blocks or, where none is left to fold, take one back: `nbytes` are wanted."""
        reserve = self.arena.bytes_total // COMPACTION_RESERVE
        steps = self.folding.fold(max(nbytes - self.arena.bytes_free, reserve))
        for block, before in steps:
            self.formats[before.name] -= 1
            self.formats[block.format.name] += 1
            self.note("folded", f"pressure, {before.name} to {block.format.name}", block)
        if not steps:
            self._reclaim(nbytes)

    def _reclaim(self, nbytes: int) -> None:
        block, reason = self.idle.victim(nbytes)
        for lease in self.leases:
            if lease.drops is not None:
                self._cut(lease, block, reason)
        self.unpublish(block, reason)
        self.free(block)

    def _cut(self, lease: Lease, block: Block, reason: str) -> None:
        """`lease` may have dropped `block` and hold what is found through it: then only for itself from now on."""
        assert block.node is not None
        if lease.digests[block.index : block.index + 1] != [block.node.digest]:
            return
        for below in reversed(lease.tables[block.group].blocks[block.index + 1 : len(lease.digests)]):
            if below is not None and below.node is not None:
                self.unpublish(below, reason)
