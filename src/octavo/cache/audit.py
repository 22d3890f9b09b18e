"""The conservation law of the cache, executable."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NoReturn

from octavo.cache.blocks import FREED, Block
from octavo.cache.formats import BlockFormat
from octavo.errors import BooksDoNotBalance

if TYPE_CHECKING:
    from octavo.cache.manager import CacheManager


def check(cache: CacheManager) -> None:
    """free + open + sealed = total, references equal live readers, index, pins and policy agree with the
    blocks.

    Raises `BooksDoNotBalance` with the first thing that does not hold.
    """
    _check_arena(cache)
    _check_leases(cache)
    _check_index(cache)
    _check_idle(cache)


def _check_arena(cache: CacheManager) -> None:
    live = cache.arena.check()
    offsets = {block.offset for block in cache.pool.blocks}
    if len(offsets) != len(cache.pool.blocks) or offsets != live:
        _fail(f"{len(cache.pool.blocks)} blocks, {len(offsets)} offsets, {len(live)} in use in the arena")
    held = sum(block.nbytes for block in cache.pool.blocks)
    if held + cache.arena.bytes_free != cache.arena.bytes_total:
        _fail(f"{held} bytes held + {cache.arena.bytes_free} free != {cache.arena.bytes_total}")
    formats = Counter(block.format.name for block in cache.pool.blocks)
    if formats != +cache.pool.formats:
        _fail(f"blocks by format are {dict(formats)}, counted {dict(cache.pool.formats)}")
    for block in cache.pool.blocks:
        if block.nbytes != cache.layout.format_bytes(block.group, block.format):
            _fail(f"{block} is {block.format.name} and takes {block.nbytes} bytes")
        if block.sealed:
            _check_format(cache, block)
    still_open = sum(not block.sealed for block in cache.pool.blocks)
    if still_open != cache.pool.blocks_open:
        _fail(f"{still_open} open blocks, counted {cache.pool.blocks_open}")


def _check_format(cache: CacheManager, block: Block) -> None:
    """A sealed block is stored as the layout says or, exact no longer, as one of the steps below that."""
    step: BlockFormat | None = cache.layout.block_format(block.group, block.index)
    if block.format == step:
        return
    while step is not None and step != block.format:
        step = cache.layout.smaller(block.group, step)
    if step is None or block.exact or not block.index:
        _fail(f"{block} is stored as {block.format.name}, and {'' if block.exact else 'not '}exact")


def _check_leases(cache: CacheManager) -> None:
    readers: Counter[Block] = Counter()
    for lease in cache.leases:
        for g, table in enumerate(lease.tables):
            for i, block in enumerate(table.blocks):
                target = table.targets.get(i, block)
                if table.entries[i] != (FREED if target is None else target.entry):
                    _fail(f"table entry {i} of group {g} reads {table.entries[i]}, block is {target}")
                if block is None:
                    if cache.layout.groups[g].window is None and i not in lease.gone:
                        _fail(f"block {i} of full-attention group {g} is gone while it is read")
                    continue
                if i in lease.gone:
                    _fail(f"{block} was dropped and is still held")
                readers[block] += 1
                if block.sealed != (i < lease.sealed) or (block.group, block.index) != (g, i):
                    _fail(f"{block} stands at index {i} of group {g} with {lease.sealed} blocks sealed")
                if not block.sealed and block.format != cache.layout.open_format:
                    _fail(f"{block} is open and stored as {block.format.name}")
            for i, target in table.targets.items():
                if i < lease.sealed or target.sealed or (target.group, target.index) != (g, i):
                    _fail(f"{target} is to take block {i} of group {g} with {lease.sealed} blocks sealed")
                readers[target] += 1
            if len(table.blocks) < cache.layout.num_blocks(lease.computed):
                _fail(f"{lease.computed} positions computed into {len(table.blocks)} blocks")
    for block in cache.pool.blocks:
        if block.refs != readers[block]:
            _fail(f"{block} has {readers[block]} readers")
        if not block.sealed and block.refs != 1:
            _fail(f"{block} is open and shared")
    if readers.keys() - cache.pool.blocks:
        _fail("a lease holds blocks that were freed")


def _check_index(cache: CacheManager) -> None:
    indexed: set[Block] = set()
    idle_children: Counter[Block] = Counter()
    below: Counter[int] = Counter()
    for digest, node in cache.index.nodes.items():
        if node.digest != digest or node.parent is None:
            _fail(f"node {digest.hex()} is filed under a wrong digest")
        below[id(node.parent)] += 1
        for g, block in enumerate(node.blocks):
            if block is None:
                continue
            indexed.add(block)
            if (
                not block.sealed
                or block.node is not node
                or (block.group, block.index + 1) != (g, node.depth)
            ):
                _fail(f"{block} is indexed at depth {node.depth} of group {g}")
            if cache.layout.groups[g].window is None and node.parent.parent is not None:
                parent = node.parent.blocks[g]
                if parent is None:
                    _fail(f"{block} outlived its parent")
                idle_children[parent] += not block.refs
    if indexed != {block for block in cache.pool.blocks if block.node is not None}:
        _fail("indexed blocks and blocks that think so differ")
    for block in indexed:
        if block.idle_children != idle_children[block]:
            _fail(f"{block} counts {block.idle_children} idle children, has {idle_children[block]}")
    for node in [*cache.index.nodes.values(), *cache.index.roots.values()]:
        if node.children != below[id(node)]:
            _fail(f"node {node.digest.hex()} counts {node.children} children, has {below[id(node)]}")
        if not node.children and not any(node.blocks):
            _fail(f"node {node.digest.hex()} holds nothing")


def _check_idle(cache: CacheManager) -> None:
    plain, pinned = list(cache.idle.policy), list(cache.pins.idle)
    idle = {block for block in cache.pool.blocks if not block.refs}
    if len(plain) + len(pinned) != len(idle) or {*plain, *pinned} != idle:
        _fail(f"{len(idle)} blocks have no reader, the policies hold {len(plain)} + {len(pinned)}")
    if any(block.node is None for block in idle):
        _fail("an idle block cannot be found")
    if any(block.pinned_until for block in plain) or not all(block.pinned_until for block in pinned):
        _fail("a block waits in the wrong list for its pin")
    foldable = list(cache.idle.foldable)
    if len(foldable) != len(set(foldable)) or set(foldable) != {
        block for block in idle if cache.idle.foldable.step(block) is not None
    }:
        _fail(f"{len(foldable)} blocks wait to be folded, not the idle ones that could be")
    if sum(block.nbytes for block in idle) != cache.idle.bytes:
        _fail(f"{cache.idle.bytes} bytes counted as idle")
    kept = sum(block.nbytes for block in cache.pool.blocks if block.pinned_until)
    if kept != cache.pins.bytes_pinned or kept > cache.pins.budget:
        _fail(f"{kept} bytes pinned, counted {cache.pins.bytes_pinned} of {cache.pins.budget}")


def _fail(what: str) -> NoReturn:
    raise BooksDoNotBalance(f"cache: {what}")
