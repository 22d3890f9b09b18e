"""Byte arithmetic of the cache: what a block is made of and what a sequence holds.

Planner, allocator, runner and simulator all use these functions; nothing else computes a size or an offset.

    block of group g   = its layers, one after the other
    layer              = its KV heads, one after the other
    KV head            = K panel [block_size x head_dim], then V panel [block_size x head_dim]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property

from octavo.cache.dropping import DropRule
from octavo.errors import ConfigError

ITEM_BYTES = {"bf16": 2, "f32": 4}


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same KV shape and span. `window=None` is full attention; with a window w the query at
    position p reads positions p-w+1 .. p."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1", param="window")


@dataclass(frozen=True)
class CacheLayout:
    """How the K and V of one model lie in blocks. Sizes are bytes, lengths are tokens."""

    groups: tuple[LayerGroup, ...]
    block_size: int
    format: str

    def __post_init__(self) -> None:
        if self.format not in ITEM_BYTES:
            known = ", ".join(ITEM_BYTES)
            raise ConfigError(f"format={self.format!r} is not one of {known}", param="kv_cache_dtype")
        if not self.groups:
            raise ConfigError("groups=() must hold at least one layer group", param="groups")

    @property
    def item_bytes(self) -> int:
        """Bytes of one number."""
        return ITEM_BYTES[self.format]

    def head_bytes(self, g: int) -> int:
        """Bytes of one KV head of one layer in a block of group `g`: its K panel, then its V panel."""
        return 2 * self.block_size * self.groups[g].head_dim * self.item_bytes

    def layer_bytes(self, g: int) -> int:
        """Bytes of one layer in a block of group `g`."""
        return self.groups[g].num_kv_heads * self.head_bytes(g)

    def block_bytes(self, g: int) -> int:
        """Bytes of one block of group `g`."""
        return self.block_sizes_bytes[g]

    @cached_property
    def block_sizes_bytes(self) -> tuple[int, ...]:
        """`block_bytes` of every group."""
        return tuple(len(group.layers) * self.layer_bytes(g) for g, group in enumerate(self.groups))

    def layer_offset(self, g: int, layer: int) -> int:
        """Byte offset of `layer` (its number in the model) inside a block of group `g`."""
        return self.groups[g].layers.index(layer) * self.layer_bytes(g)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position takes while every layer group keeps it."""
        return sum(self.block_sizes_bytes) // self.block_size

    def num_blocks(self, tokens: int) -> int:
        """Blocks, of one group, that `tokens` positions from 0 touch."""
        return -(-tokens // self.block_size)

    def first_block(self, g: int, position: int) -> int:
        """Index of the first block of group `g` that a query at `position` reads; earlier ones can be
        freed."""
        window = self.groups[g].window
        return 0 if window is None else max(0, position - window + 1) // self.block_size

    def blocks_held(self, g: int, tokens: int, drops: DropRule | None = None) -> int:
        """The most blocks of group `g` that a sequence growing to `tokens` tokens, one by one, holds at a
        time."""
        blocks, window = self.num_blocks(tokens), self.groups[g].window
        if drops is not None:
            blocks = drops.kept_blocks(tokens)
        return blocks if window is None else min(blocks, self.num_blocks(window - 1) + 1)

    def sequence_bytes(self, tokens: int, drops: DropRule | None = None) -> int:
        """Bytes of cache that a sequence of `tokens` tokens holds, in whole blocks of every group."""
        return sum(self.blocks_held(g, tokens, drops) * size for g, size in enumerate(self.block_sizes_bytes))

    def longest_sequence(self, budget: int) -> int:
        """Most tokens of one sequence whose blocks fit `budget` bytes; `sys.maxsize` if windows bound them
        all."""
        if self.sequence_bytes(sys.maxsize) <= budget:
            return sys.maxsize
        low, high = 0, 1
        while self.sequence_bytes(high * self.block_size) <= budget:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.sequence_bytes(middle * self.block_size) <= budget:
                low = middle
            else:
                high = middle
        return low * self.block_size
