"""Blocks, and who holds them.

Lease        what one sequence holds: a BlockTable by layer group, and where its chain stands in the index
BlockTable   block i holds positions i * block_size ..; entries mirror the blocks for the kernels
Block        one block of the arena; open while it is filled, then sealed and, once published, on a Node
Node         (prefix.py) the identity of a sealed block: parent and token ids, shared by all layer groups
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

from octavo.cache.dropping import DropRule
from octavo.cache.formats import BlockFormat
from octavo.cache.hashing import Namespace

if TYPE_CHECKING:
    from octavo.cache.prefix import Node

FREED = -1


class Owner(NamedTuple):
    """For whom a block was computed: a tenant, the label the request was given, and the request."""

    tenant: str
    label: str | None = None
    request_id: str | None = None


class Block:
    """One block. `refs` counts the leases that hold it, `idle_children` the blocks without one that need it to
    be found.

    `priority` is that of its most important user so far, so a parent is never less important than its child.
    `exact` says that everything it was computed from was exact. `pinned_until` is a clock time, 0 when
    unpinned. `uses` counts the leases that ever held it and its parent; `rank` belongs to the eviction policy.
    `used_at` is when its last reader left, on the cache's clock. Nothing is decided by `owner`. `format` is how its
    bytes lie; an open block is at compute precision.
    """

    __slots__ = (
        "exact",
        "format",
        "group",
        "idle_children",
        "index",
        "nbytes",
        "node",
        "offset",
        "owner",
        "pinned_until",
        "priority",
        "rank",
        "refs",
        "sealed",
        "used_at",
        "uses",
    )

    def __init__(
        self,
        offset: int,
        nbytes: int,
        group: int,
        index: int,
        format: BlockFormat,
        priority: int,
        exact: bool,
        owner: Owner,
    ) -> None:
        self.offset = offset
        self.nbytes = nbytes
        self.group = group
        self.index = index
        self.format = format
        self.priority = priority
        self.exact = exact
        self.owner = owner
        self.sealed = False
        self.refs = 1
        self.uses = 1
        self.idle_children = 0
        self.node: Node | None = None
        self.pinned_until = 0.0
        self.used_at = 0.0
        self.rank = 0.0

    @property
    def entry(self) -> int:
        """What a block table has for it: its offset, and how it is stored."""
        return self.offset | self.format.tag

    def __repr__(self) -> str:
        state = "sealed" if self.sealed else "open"
        return f"<Block {self.group}:{self.index} {state} at {self.offset} refs={self.refs}>"


class BlockTable:
    """The blocks of one sequence in one layer group. `entries[i]` is what the kernels read of block i: byte offset and
    format, -1 once it was freed behind the window or dropped.

    Blocks that the next step fills and that are stored in a smaller form have a target for it in `targets`; the kernels
    read that, and the block itself is where the rows stand in.
    """

    __slots__ = ("blocks", "entries", "first", "targets")

    def __init__(self) -> None:
        self.blocks: list[Block | None] = []
        self.entries = array("q")
        self.targets: dict[int, Block] = {}
        self.first = 0

    def append(self, block: Block | None) -> None:
        self.blocks.append(block)
        self.entries.append(FREED if block is None else block.entry)

    def replace(self, i: int, block: Block | None) -> None:
        self.blocks[i] = block
        self.entries[i] = FREED if block is None else block.entry

    def aim(self, i: int, target: Block) -> None:
        """Block `i` is to be sealed into `target`."""
        self.targets[i] = target
        self.entries[i] = target.entry

    def unaim(self, i: int) -> Block:
        """Block `i` is not, or no longer; returns the target."""
        block = self.blocks[i]
        self.entries[i] = FREED if block is None else block.entry
        return self.targets.pop(i)

    def own(self, first: int, last: int) -> array[int]:
        """Entries of blocks `first .. last - 1` as they are filled."""
        return array("q", [FREED if block is None else block.entry for block in self.blocks[first:last]])

    def refresh(self) -> None:
        """Take over the offsets of blocks that were moved."""
        for i, block in enumerate(self.blocks):
            if block is not None:
                self.entries[i] = self.targets.get(i, block).entry

    def clear(self) -> None:
        self.blocks.clear()
        self.targets.clear()
        del self.entries[:]
        self.first = 0

    def __len__(self) -> int:
        return len(self.blocks)


class Lease:
    """What one sequence holds of the cache. Survives a preemption: tables empty, hashes kept.

    `computed` positions have their K and V written, `sealed` blocks of them are full. `tip` is the node of
    the last published block (None: none yet). `attached` ends for good when a block could not be published,
    because no later block can then be found through it. `pedigree` is False once something it reads is not
    exact. A lease with `reuse=False` matches nothing but still publishes. `drops` is the rule by which it drops
    context; what it computes after that is its own. `owner` is written on the blocks it makes.
    """

    __slots__ = (
        "attached",
        "computed",
        "digests",
        "drops",
        "exact",
        "keys",
        "namespace",
        "owner",
        "pedigree",
        "priority",
        "reuse",
        "sealed",
        "tables",
        "tip",
    )

    def __init__(
        self,
        groups: int,
        namespace: Namespace,
        priority: int = 0,
        exact: bool = False,
        reuse: bool = True,
        drops: DropRule | None = None,
        owner: Owner | None = None,
    ) -> None:
        self.namespace = namespace
        self.owner = owner or Owner(namespace.tenant)
        self.priority = priority
        self.exact = exact
        self.reuse = reuse
        self.drops = drops
        self.tables = tuple(BlockTable() for _ in range(groups))
        self.keys: list[bytes] = []
        self.digests: list[bytes] = []
        self.clear()

    computed: int
    sealed: int
    tip: Node | None
    attached: bool
    pedigree: bool

    def shared(self, tokens: int) -> int:
        """How many of its first `tokens` positions are the same as those of a sequence that drops nothing."""
        return tokens if self.drops is None else min(tokens, self.drops.kept)

    @property
    def gone(self) -> range:
        """Indices of the blocks that were dropped."""
        return range(0) if self.drops is None else self.drops.gone(self.computed)

    def clear(self) -> None:
        """Forget the blocks; the caller has given them back."""
        for table in self.tables:
            table.clear()
        self.computed = 0
        self.sealed = 0
        self.tip = None
        self.attached = True
        self.pedigree = True
