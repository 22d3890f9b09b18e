"""A picture of the arena for people: every block, its state, whose it is, who reads it, what it follows.

Two halves, so that the engine is held up as little as possible: `take` copies what changes, between two steps, and
`Picture.rows` makes sense of it later, in any thread. No token ids leave the cache here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

from octavo.cache.blocks import FREED, Block, BlockTable, Lease, Owner
from octavo.cache.manager import CacheManager, CacheStats

STATES = ("open", "running", "cached", "pinned")
"""Being filled; full and read by a running request; full and read by nobody; the same, but kept for a time."""


class Row(NamedTuple):
    """One block. `offset` is its byte address and names it; moments are seconds on the cache's clock.

    `depth` counts the blocks before it in its sequence, `parent` is the offset of the one just before it, None if
    that is gone or there is none. `holders` are the running sequences that read it, `refs` their number, `uses` that
    of all who ever did. `filled` counts its positions that have been computed. `used_at` is None while it is read.
    """

    offset: int
    group: int
    state: str
    format: str
    owner: Owner
    holders: tuple[str, ...]
    parent: int | None
    nbytes: int
    depth: int
    filled: int
    refs: int
    uses: int
    priority: int
    exact: bool
    used_at: float | None
    pinned_until: float | None


class Held(NamedTuple):
    """What one running sequence holds: its `computed` positions and, by layer group, the offsets of its blocks."""

    name: str
    computed: int
    tables: tuple[list[int], ...]


_READ = attrgetter(
    "offset",
    "group",
    "format.name",
    "owner",
    "nbytes",
    "index",
    "sealed",
    "refs",
    "uses",
    "priority",
    "exact",
    "used_at",
    "pinned_until",
)


@dataclass(frozen=True)
class Picture:
    """The arena at one moment. `slabs` are (start, block bytes, count), by address."""

    now: float
    block_size: int
    stats: CacheStats
    slabs: tuple[tuple[int, int, int], ...]
    reclaimed: dict[str, int]
    held: tuple[Held, ...]
    blocks: list[tuple[Any, ...]]
    parents: list[int | None]

    @cached_property
    def rows(self) -> dict[int, Row]:
        """The blocks by offset, in no order."""
        holders: dict[int, list[str]] = {}
        before: dict[int, int] = {}
        filled: dict[int, int] = {}
        for name, computed, tables in self.held:
            for table in tables:
                last = None
                for offset in table:
                    if offset < 0:
                        continue
                    holders.setdefault(offset, []).append(name)
                    if last is not None:
                        before[offset] = last
                    last = offset
                for i in range(computed // self.block_size, len(table)):
                    filled[table[i]] = max(0, computed - i * self.block_size)
        rows = {}
        for block, parent in zip(self.blocks, self.parents, strict=True):
            offset, group, format, owner, nbytes, index, sealed, refs, uses, priority, exact, used, pinned = (
                block
            )
            rows[offset] = Row(
                offset,
                group,
                _state(sealed, refs, pinned),
                format,
                owner,
                tuple(holders[offset]) if refs and offset in holders else (),
                before.get(offset) if parent is None else parent,
                nbytes,
                index,
                self.block_size if sealed else filled.get(offset, 0),
                refs,
                uses,
                priority,
                exact,
                None if refs else used,
                pinned or None,
            )
        return rows


def take(cache: CacheManager, leases: Iterable[tuple[str, Lease]]) -> Picture:
    """The picture of `cache` now. `leases` names the running sequences' leases. Call it where the cache lives."""
    blocks = list(cache.pool.blocks)
    return Picture(
        now=cache.clock(),
        block_size=cache.layout.block_size,
        stats=cache.stats(),
        slabs=tuple((slab.start, slab.block_bytes, slab.count) for slab in cache.arena.slabs()),
        reclaimed=dict(cache.pool.reclaimed),
        held=tuple(
            Held(name, lease.computed, tuple(_offsets(table) for table in lease.tables))
            for name, lease in leases
        ),
        blocks=list(map(_READ, blocks)),
        parents=list(map(_parent, blocks)),
    )


def _offsets(table: BlockTable) -> list[int]:
    return [FREED if block is None else block.offset for block in table.blocks]


def _parent(block: Block) -> int | None:
    node = block.node
    if node is None or node.parent is None:
        return None
    parent = node.parent.blocks[block.group]
    return None if parent is None else parent.offset


def _state(sealed: bool, refs: int, pinned_until: float) -> str:
    if not sealed:
        return "open"
    if refs:
        return "running"
    return "pinned" if pinned_until else "cached"
