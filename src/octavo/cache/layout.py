"""Byte arithmetic of the cache: what a block is made of and what a sequence holds.

Planner, allocator, runner and simulator all use these functions; nothing else computes a size or an offset.

    block of group g   = its layers, one after the other
    layer              = its KV heads, one after the other
    KV head            = K panel [block_size x head_dim], then V panel [block_size x value_dim]

A block is open, at compute precision, while it fills, and sealed in its format when it is full; the first block of a
sequence stays at compute precision. For formats of the compute types all blocks of a group have one size.
"""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from functools import cached_property

from octavo.cache.dropping import DropRule
from octavo.cache.formats import LEAST_STORED_BLOCK, BlockFormat, block_format
from octavo.errors import ConfigError


@dataclass(frozen=True)
class LayerGroup:
    """Layers with the same KV shape and span. `window=None` is full attention; with a window w the query at
    position p reads positions p-w+1 .. p.

    `value_dim` is the length of a value where it is not that of a key: 0 for latent attention (MLA), which keeps one
    vector per position that keys and values are both computed from.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    value_dim: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ConfigError(f"window={self.window} must be at least 1", param="window")

    @property
    def values(self) -> int:
        """Numbers of one value of one KV head."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class CacheLayout:
    """How the K and V of one model lie in blocks. Sizes are bytes, lengths are tokens.

    `format` is that of sealed blocks, in every group unless `overrides` names one for each; `compute` is that of open
    ones: the same where `format` is a compute type itself. `ladder` names the forms, each smaller than the one before,
    that sealed blocks may be folded to.
    """

    groups: tuple[LayerGroup, ...]
    block_size: int
    format: str
    compute: str = "bf16"
    overrides: tuple[str, ...] = ()
    ladder: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if block_format(self.format).is_compute:
            object.__setattr__(self, "compute", self.format)
        if not self.groups:
            raise ConfigError("groups=() must hold at least one layer group", param="groups")
        if self.overrides and len(self.overrides) != len(self.groups):
            raise ConfigError(
                f"overrides={self.overrides!r} must name {len(self.groups)} formats, one per layer group",
                param="kv_cache_dtype_overrides",
            )
        for g in range(len(self.groups)):
            for format in (self.sealed_format(g), *map(block_format, self.ladder)):
                self._check_format(g, format)
        self._check_ladder()

    def _check_format(self, g: int, format: BlockFormat) -> None:
        group = self.groups[g]
        if format.is_compute:
            return
        if self.block_size < LEAST_STORED_BLOCK:
            raise ConfigError(
                f"block_size={self.block_size} is less than the {LEAST_STORED_BLOCK} positions {format.name} takes",
                param="block_size",
            )
        unit = max(format.keys.unit, format.values.unit)
        if group.head_dim % unit or group.values % unit:
            param = "compress_under_pressure" if format.name in self.ladder else "kv_cache_dtype"
            raise ConfigError(
                f"{param}={format.name!r} stores heads whose size is a multiple of {unit}, and this model's is "
                f"{group.head_dim}; int8 or fp8 work with every even size",
                param=param,
            )

    def _check_ladder(self) -> None:
        reached = [self.sealed_format(g) for g in range(len(self.groups))]
        for name in self.ladder:
            below = [self.smaller(g, format) for g, format in enumerate(reached)]
            if all(format is None or format.name != name for format in below):
                raise ConfigError(
                    f"compress_under_pressure={','.join(self.ladder)!r}: {name} is no smaller than what comes before "
                    f"it, {reached[0].name}; leave it out",
                    param="compress_under_pressure",
                )
            reached = [
                format if format is not None and format.name == name else before
                for before, format in zip(reached, below, strict=True)
            ]

    def smaller(self, g: int, format: BlockFormat) -> BlockFormat | None:
        """What a block of group `g` that is stored as `format` is folded to; None if nothing is smaller."""
        now = self.format_bytes(g, format)
        steps = map(block_format, self.ladder)
        return next((step for step in steps if self.format_bytes(g, step) < now), None)

    @property
    def open_format(self) -> BlockFormat:
        """How open blocks, and the first of each sequence, are stored."""
        return block_format(self.compute)

    def sealed_format(self, g: int) -> BlockFormat:
        """How the other sealed blocks of group `g` are stored."""
        return block_format(self.overrides[g] if self.overrides else self.format)

    @cached_property
    def is_stored(self) -> bool:
        """Whether any block is sealed in another form than it is filled in."""
        return any(not self.sealed_format(g).is_compute for g in range(len(self.groups)))

    def block_format(self, g: int, i: int) -> BlockFormat:
        """How block `i` of a sequence is stored in group `g` once it is sealed."""
        return self.sealed_format(g) if i else self.open_format

    @property
    def name(self) -> str:
        """What decides the bits of a block, for a namespace: formats by group, and the block size where it matters."""
        if not self.is_stored:
            return self.format
        formats = "/".join(self.sealed_format(g).name for g in range(len(self.groups)))
        return f"{self.compute}:{formats}:{self.block_size}"

    def formats_of(self, tokens: int) -> Counter[str]:
        """How many of a sequence's first `tokens` positions are stored in which format, full attention taken."""
        stored = max(0, tokens // self.block_size - 1) * self.block_size
        counts = Counter({self.format: stored})
        counts[self.compute] += tokens - stored
        return +counts

    @property
    def item_bytes(self) -> int:
        """Bytes of one number at compute precision."""
        return self.open_format.keys.bits // 8

    def head_bytes(self, g: int) -> int:
        """Bytes of one KV head of one layer in an open block of group `g`: its K panel, then its V panel."""
        return self._head_bytes(g, self.open_format)

    def _head_bytes(self, g: int, format: BlockFormat) -> int:
        group = self.groups[g]
        return format.head_bytes(self.block_size, group.head_dim, group.values)

    def layer_bytes(self, g: int) -> int:
        """Bytes of one layer in an open block of group `g`."""
        return self.groups[g].num_kv_heads * self.head_bytes(g)

    def block_bytes(self, g: int) -> int:
        """Bytes of one open block of group `g`."""
        return self.block_sizes_bytes[g]

    @cached_property
    def block_sizes_bytes(self) -> tuple[int, ...]:
        """`block_bytes` of every group."""
        return tuple(self.format_bytes(g, self.open_format) for g in range(len(self.groups)))

    @cached_property
    def sealed_sizes_bytes(self) -> tuple[int, ...]:
        """Bytes of one sealed block, not the first of its sequence, of every group."""
        return tuple(self.format_bytes(g, self.sealed_format(g)) for g in range(len(self.groups)))

    def format_bytes(self, g: int, format: BlockFormat) -> int:
        """Bytes of one block of group `g` that is stored as `format`."""
        group = self.groups[g]
        return len(group.layers) * group.num_kv_heads * self._head_bytes(g, format)

    def layer_offset(self, g: int, layer: int) -> int:
        """Byte offset of `layer` (its number in the model) inside a block of group `g`."""
        return self.groups[g].layers.index(layer) * self.layer_bytes(g)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one position takes in sealed blocks while every layer group keeps it, rounded up."""
        return -(-sum(self.sealed_sizes_bytes) // self.block_size)

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
        """Bytes of cache that a sequence growing to `tokens` tokens, one by one, holds at most at a time, in whole
        blocks of every group: the first and the open one at compute precision, those between them sealed."""
        if self._is_stored_behind_windows and drops is None:
            return self._peak(self.num_blocks(tokens) - 1)
        total = 0
        for g, (whole, sealed) in enumerate(
            zip(self.block_sizes_bytes, self.sealed_sizes_bytes, strict=True)
        ):
            blocks = self.blocks_held(g, tokens, drops)
            total += min(blocks, 2) * whole + max(0, blocks - 2) * sealed
            if sealed < whole and blocks < self.num_blocks(tokens):
                total += sealed  # the newest block is sealed while the oldest is still read
        return total

    @cached_property
    def _is_stored_behind_windows(self) -> bool:
        """Whether the first block, which is never small, may go before the last one comes."""
        return self.is_stored and any(group.window is not None for group in self.groups)

    def _peak(self, newest: int) -> int:
        """The most bytes held until block `newest` is open. Within a block they are most when it is opened, or when it
        is sealed and so there in both forms; from where windows have left the first block they only grow."""
        early = self._early_peaks
        if newest < len(early):
            return early[newest]
        return max(early[-1], self._held(newest), self._held_at_seal(newest - 1))

    @cached_property
    def _early_peaks(self) -> list[int]:
        """`_peak` of the blocks until windows have left the first one."""
        windows = [group.window for group in self.groups if group.window is not None]
        peaks = [self._held(0)]
        for newest in range(1, self.num_blocks(max(windows)) + 2):
            peaks.append(max(peaks[-1], self._held(newest), self._held_at_seal(newest - 1)))
        return peaks

    def _held(self, newest: int, position: int | None = None) -> int:
        """Bytes of the blocks that the query at `position` of block `newest`, its first one, needs."""
        at, total = newest * self.block_size if position is None else position, 0
        for g, (whole, sealed) in enumerate(
            zip(self.block_sizes_bytes, self.sealed_sizes_bytes, strict=True)
        ):
            before = newest - self.first_block(g, at)
            is_first_there = before == newest > 0
            total += whole + before * sealed + is_first_there * (whole - sealed)
        return total

    def _held_at_seal(self, block: int) -> int:
        """Bytes while the last position of `block` is computed and the block sealed."""
        held = self._held(block, (block + 1) * self.block_size - 1)
        if not block:
            return held
        sealed = enumerate(self.sealed_sizes_bytes)
        return held + sum(size for g, size in sealed if not self.sealed_format(g).is_compute)

    def sequences_that_fit(self, budget: int, tokens: int) -> int:
        """How many sequences of `tokens` tokens fit `budget` bytes with no block in common."""
        return budget // self.sequence_bytes(tokens)

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
