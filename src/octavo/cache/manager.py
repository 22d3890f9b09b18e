"""The cache manager: the only one who moves blocks between free, open, sealed and idle.

    extend    free   -> open     before the step that writes them
    commit    open   -> sealed   after that step; published in the prefix index, freed behind the window
    release   sealed -> idle     still findable, first in line when memory is wanted
    acquire   idle   -> sealed   a match
    fold      idle   -> idle     smaller, inside extend and fork
    reclaim   idle   -> free     the same, where nothing can be folded

It knows no request and no step plan. `check` is the law that all of this keeps.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from octavo.cache import audit
from octavo.cache.arena import Arena, Memory
from octavo.cache.blocks import Block, BlockTable, Lease, Owner
from octavo.cache.dropping import DropRule
from octavo.cache.events import Event
from octavo.cache.hashing import Namespace
from octavo.cache.idle import Idle
from octavo.cache.ladder import folded_positions
from octavo.cache.layout import CacheLayout
from octavo.cache.pins import Pins
from octavo.cache.policy import POLICIES
from octavo.cache.pool import BlockPool
from octavo.cache.prefix import Match, Node, PrefixIndex
from octavo.cache.receipt import Miss, Pinned
from octavo.errors import ConfigError


@dataclass(frozen=True)
class CacheStats:
    """Bytes by use, blocks by state, sealed and open blocks by format."""

    bytes_total: int
    bytes_free: int
    bytes_running: int
    bytes_cached: int
    bytes_pinned: int
    blocks: dict[str, int]
    formats: dict[str, int]


class CacheManager:
    """Blocks of one model in `bytes_total` bytes.

    `max_pinned` is the byte budget of pins, `policy` a name in `POLICIES`. Raises `ConfigError` if not even
    one block per layer group fits.
    """

    def __init__(
        self,
        layout: CacheLayout,
        bytes_total: int,
        *,
        enable_prefix_caching: bool = True,
        policy: str = "lru",
        max_pinned: int = 0,
        memory: Memory | None = None,
        poison: bool = False,
        hash_bits: int = 256,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if policy not in POLICIES:
            raise ConfigError(f"policy={policy!r} is not one of {', '.join(POLICIES)}", param="policy")
        least = sum(layout.block_sizes_bytes)
        if bytes_total < least:
            raise ConfigError(
                f"kv_cache_memory={bytes_total} bytes cannot hold one block per layer group; "
                f"give at least {least}",
                param="kv_cache_memory",
            )
        self.layout = layout
        self.enabled = enable_prefix_caching
        self.clock = clock
        self.pool = BlockPool(layout, bytes_total, policy, max_pinned, memory, poison, hash_bits, clock)
        self._sizes = layout.block_sizes_bytes
        self._stored = [g for g in range(len(layout.groups)) if not layout.sealed_format(g).is_compute]
        self._windowed = [g for g, group in enumerate(layout.groups) if group.window is not None]

    @property
    def arena(self) -> Arena:
        """The pool's."""
        return self.pool.arena

    @property
    def index(self) -> PrefixIndex:
        """The pool's."""
        return self.pool.index

    @property
    def idle(self) -> Idle:
        """The pool's."""
        return self.pool.idle

    @property
    def pins(self) -> Pins:
        """The pool's."""
        return self.pool.pins

    @property
    def leases(self) -> set[Lease]:
        """The pool's."""
        return self.pool.leases

    @property
    def bytes_available(self) -> int:
        """Bytes that running sequences could still get: free ones and idle blocks, pinned or not."""
        return self.pool.bytes_available

    def lease(
        self,
        namespace: Namespace,
        *,
        priority: int = 0,
        exact: bool = False,
        reuse: bool = True,
        drops: DropRule | None = None,
        owner: Owner | None = None,
    ) -> Lease:
        """A lease that holds nothing yet. With `reuse=False` it never matches (its blocks are still
        published)."""
        return Lease(len(self._sizes), namespace, priority, exact, reuse and self.enabled, drops, owner)

    def find(self, lease: Lease, token_ids: Sequence[int]) -> Match:
        """What of `token_ids` the cache holds. Changes nothing; the match is good until the next change."""
        return self.index.find(lease, token_ids) if self.enabled else Match()

    def why(self, lease: Lease, token_ids: Sequence[int], match: Match) -> Miss:
        """Why `match` reaches no further."""
        return self.index.why(lease, token_ids, match)

    def acquire(self, lease: Lease, match: Match) -> int:
        """Give the matched blocks to `lease`, which holds nothing. Returns the positions that need no
        computing."""
        self.leases.add(lease)
        depth = match.depth
        for g, table in enumerate(lease.tables):
            table.first = self.layout.first_block(g, depth * self.layout.block_size)
            for i, node in enumerate(match.nodes):
                block = node.blocks[g] if i >= table.first else None
                if block is not None:
                    self.pool.take(block, lease)
                table.append(block)
        if depth:
            lease.tip = match.nodes[-1]
        lease.sealed = depth
        lease.computed = depth * self.layout.block_size
        return lease.computed

    def match(self, lease: Lease, token_ids: Sequence[int]) -> int:
        """`find` and `acquire` at once."""
        return self.acquire(lease, self.find(lease, token_ids))

    def bytes_shared(self, match: Match) -> int:
        """Bytes by which the matched blocks use up less than new ones: others are reading them, or they are folded."""
        position = match.depth * self.layout.block_size
        return sum(
            self._unfolded_bytes(block) - (0 if block.refs else block.nbytes)
            for g in range(len(self._sizes))
            for node in match.nodes[self.layout.first_block(g, position) :]
            if (block := node.blocks[g]) is not None
        )

    def _unfolded_bytes(self, block: Block) -> int:
        return max(block.nbytes, self.layout.sealed_sizes_bytes[block.group])

    def bytes_missing(self, lease: Lease, stop: int) -> int:
        """Bytes of the blocks that `lease` lacks for positions up to `stop`."""
        want = self.layout.num_blocks(stop)
        missing = sum(
            max(0, want - len(t.blocks)) * size for t, size in zip(lease.tables, self._sizes, strict=True)
        )
        for g in self._stored:
            targets = lease.tables[g].targets
            wanted = sum(i not in targets for i in self._to_be_sealed(lease, stop))
            missing += wanted * self.layout.sealed_sizes_bytes[g]
        return missing

    def bytes_owed(self, lease: Lease, tokens: int) -> int:
        """Bytes that `lease` will still take on its way to `tokens` tokens, what it drops meanwhile set off."""
        if self._stored:
            return max(0, self.layout.sequence_bytes(tokens, lease.drops) - self.bytes_held(lease))
        if lease.drops is None:
            return self.bytes_missing(lease, tokens)
        want = lease.drops.kept_blocks(tokens) + len(lease.gone)
        return self.bytes_missing(lease, want * self.layout.block_size)

    def bytes_held(self, lease: Lease) -> int:
        """Bytes of the blocks that `lease` holds, alone or with others, folded ones taken as they were."""
        return sum(
            self._unfolded_bytes(block)
            for table in lease.tables
            for block in (*table.blocks, *table.targets.values())
            if block is not None
        )

    def folded_positions(self, lease: Lease, start: int = 0) -> Counter[str]:
        """How many positions of `lease` from block `start` on are read from folded blocks, by their format."""
        return folded_positions(self.layout, lease, start)

    def reach(self, lease: Lease, nbytes: int) -> int:
        """Up to which position the blocks of `lease` and `nbytes` more would do, if no layer has a window."""
        each = sum(self._sizes) + sum(self.layout.sealed_sizes_bytes[g] for g in self._stored)
        return (len(lease.tables[0]) + nbytes // each) * self.layout.block_size

    def extend(self, lease: Lease, stop: int) -> bool:
        """Make open blocks for positions up to `stop`, and targets for those that are full then, reclaiming idle ones
        if needed. All of them or, with False, none. Moves blocks in the rare case that free bytes are scattered."""
        want, aims = self.layout.num_blocks(stop), self._to_be_sealed(lease, stop)
        if self.bytes_missing(lease, stop) > self.bytes_available:
            return False
        self.leases.add(lease)
        for g, table in enumerate(lease.tables):
            for i in range(len(table.blocks), want):
                table.append(self.pool.new(g, i, lease, self.layout.open_format))
        for g in self._stored:
            table = lease.tables[g]
            for i in [i for i in table.targets if i not in aims]:  # of a step that was never made
                self.pool.free(table.unaim(i))
            for i in aims:
                if i not in table.targets:
                    table.aim(i, self.pool.new(g, i, lease, self.layout.sealed_format(g)))
        return True

    def _to_be_sealed(self, lease: Lease, stop: int) -> range:
        """Blocks that are full once positions up to `stop` are computed, and that are then stored in a smaller form."""
        return range(max(1, lease.sealed), stop // self.layout.block_size)

    def commit(self, lease: Lease, token_ids: Sequence[int], stop: int) -> int:
        """Positions before `stop` have been computed: seal and publish full blocks, free those behind the
        window and those dropped. Returns the number of blocks sealed. Call it after the step, never before."""
        size = self.layout.block_size
        full, sealed, gone = stop // size, lease.sealed, len(lease.gone)
        lease.computed = stop
        for g in self._stored:
            self._take_targets(lease.tables[g], full)
        if full > sealed:
            if self.enabled:
                self.index.hash(lease, token_ids, lease.shared(stop) // size)
            for i in range(sealed, full):
                self._seal(lease, i)
            lease.sealed = full
        for g in self._windowed:
            table = lease.tables[g]
            first = min(self.layout.first_block(g, stop), full)
            self._free_entries(table, range(table.first, first))
            table.first = max(table.first, first)
        if lease.drops is not None:
            for table in lease.tables:
                self._free_entries(table, lease.gone[gone:])
        return (full - sealed) * len(self._sizes)

    def _take_targets(self, table: BlockTable, full: int) -> None:
        """The step has written the targets of blocks before `full`: they take the place of what was filled."""
        for i in [i for i in table.targets if i < full]:
            block, target = table.blocks[i], table.unaim(i)
            assert block is not None
            table.replace(i, target)
            self.pool.free(block)

    def fork(self, lease: Lease) -> Lease | None:
        """A second reader of everything `lease` holds: sealed blocks shared, open ones copied at compute
        precision. None, and nothing changed, if there is no room for the copies."""
        start = lease.sealed
        need = sum((len(t.blocks) - start) * size for t, size in zip(lease.tables, self._sizes, strict=True))
        if need > self.bytes_available:
            return None
        child = Lease(
            len(self._sizes),
            lease.namespace,
            lease.priority,
            lease.exact,
            lease.reuse,
            lease.drops,
            lease.owner,
        )
        child.keys, child.digests = list(lease.keys), list(lease.digests)
        child.computed, child.sealed, child.tip = lease.computed, lease.sealed, lease.tip
        child.attached, child.pedigree = lease.attached, lease.pedigree
        self.leases.add(child)
        for g, (table, copy) in enumerate(zip(lease.tables, child.tables, strict=True)):
            copy.first = table.first
            for block in table.blocks[:start]:
                if block is not None:
                    block.refs += 1
                    block.uses += not lease.gone  # never more than the parent's
                copy.append(block)
            for i in range(start, len(table.blocks)):
                twin = self.pool.new(g, i, child, self.layout.open_format)
                source = table.blocks[i]
                assert source is not None
                if self.arena.memory is not None:
                    self.arena.memory.copy(source.offset, twin.offset, twin.nbytes)
                copy.append(twin)
        return child

    def release(self, lease: Lease) -> None:
        """Take all blocks of `lease` back, tails first. Published ones stay findable until they are
        reclaimed."""
        behind_gap = lease.gone.stop if lease.gone else None
        for table in lease.tables:
            for target in table.targets.values():
                self.pool.free(target)
            for i, block in reversed(list(enumerate(table.blocks))):
                if block is not None:
                    self.pool.let_go(block)
                    if i == behind_gap:
                        self.idle.renew(block)
        lease.clear()
        self.leases.discard(lease)

    def pin(
        self, lease: Lease, ttl_s: float, request_id: str | None = None, limit: int | None = None
    ) -> Pinned:
        """Keep the published blocks of `lease` (of its first `limit` positions) for `ttl_s` seconds, all of them or,
        over budget, none. Those behind a gap are not pinned: they are found only as long as what was dropped is
        there."""
        end = lease.gone.start if lease.gone else lease.sealed
        if limit is not None:
            end = min(end, limit // self.layout.block_size)
        blocks = [
            b
            for table in lease.tables
            for b in reversed(table.blocks[:end])
            if b is not None and b.node is not None
        ]
        nbytes = sum(block.nbytes for block in blocks)
        tokens = end * self.layout.block_size
        over = self.pins.bytes_pinned + self.pins.bytes_added(blocks) - self.pins.budget
        if not self.enabled:
            outcome = Pinned(ttl_s, 0, 0, "prefix caching is disabled")
        elif over > 0:
            outcome = Pinned(ttl_s, 0, 0, f"over max_pinned={self.pins.budget} bytes by {over}")
        else:
            outcome = Pinned(ttl_s, len(blocks), nbytes, tokens=tokens)
            self.pins.add(blocks, self.clock() + ttl_s)
        kind, reason = (
            ("pinned", "cache_ttl") if outcome.refused is None else ("pin_refused", outcome.refused)
        )
        self.pool.log.add(Event(self.clock(), kind, reason, request_id, tokens=tokens, owner=lease.owner))
        return outcome

    def expire(self) -> None:
        """End the pins whose time is over."""
        self.pins.expire(self.clock(), self.idle.policy.add)

    def reset(self) -> int:
        """Forget every published block; idle ones are freed, those in use stay with their readers. Returns
        how many were forgotten."""
        published = [block for block in self.pool.blocks if block.node is not None]
        for block in sorted(published, key=lambda b: -b.index):
            if not block.refs:
                self.idle.remove(block)
            self.pool.unpublish(block, "reset")
            if not block.refs:
                self.pool.free(block)
        for lease in self.leases:
            lease.attached = False
        return len(published)

    def events(self) -> list[Event]:
        """What happened since the last call."""
        return self.pool.log.drain()

    def stats(self) -> CacheStats:
        arena, sealed = self.arena, len(self.pool.blocks) - self.pool.blocks_open
        return CacheStats(
            bytes_total=arena.bytes_total,
            bytes_free=arena.bytes_free,
            bytes_running=arena.bytes_total - self.bytes_available,
            bytes_cached=self.idle.bytes,
            bytes_pinned=self.pins.bytes_pinned,
            blocks={"open": self.pool.blocks_open, "sealed": sealed},
            formats=dict(+self.pool.formats),
        )

    def check(self) -> None:
        """Raises `BooksDoNotBalance` unless every byte, reference and index entry is accounted for."""
        audit.check(self)

    def _seal(self, lease: Lease, i: int) -> None:
        for table in lease.tables:
            block = table.blocks[i]
            assert block is not None
            block.sealed = True
            self.pool.blocks_open -= 1
        end = (i + 1) * self.layout.block_size
        lease.attached &= lease.shared(end) == end
        if not (self.enabled and lease.attached):
            return
        node = self.index.publish(lease, i)
        if node is None or not self._supersede(node, lease, i):
            lease.attached = False
            return
        lease.tip = node
        for g, table in enumerate(lease.tables):
            block, twin = table.blocks[i], node.blocks[g]
            assert block is not None
            if twin is None:
                self.index.put(node, block)
                self.pool.note("stored", "sealed", block)
            elif twin is not block:
                self.pool.take(twin, lease)
                table.replace(i, twin)
                self.pool.let_go(block)

    def _supersede(self, node: Node, lease: Lease, i: int) -> bool:
        """Where block `i` of `lease` is exact and what is found in its place is not, take that place. False, and
        nothing changed, if a request reads or a pin keeps what is there."""
        worse = [twin for twin in node.blocks if twin is not None and twin.exact < lease.pedigree]
        if any(twin.refs or twin.pinned_until for twin in worse):
            return False
        for twin in worse:
            block = lease.tables[twin.group].blocks[i]
            assert block is not None
            self.idle.remove(twin)
            self.pool.reclaimed["recomputed"] += 1
            self.pool.note("reclaimed", "recomputed", twin)
            self.index.swap(twin, block)
            self.pool.free(twin)
            self.pool.note("stored", "sealed", block)
        return True

    def _free_entries(self, table: BlockTable, indices: range) -> None:
        for i in indices:
            block = table.blocks[i]
            if block is not None:
                table.replace(i, None)
                self.pool.let_go(block)
                self.idle.renew(block)
