"""The formats of a block, and the bytes that each takes.

A block of `positions` positions holds, for one KV head of one layer, a key panel `[positions x key_dim]` and a value
panel `[positions x value_dim]` (none where the values are part of the keys, as in latent attention). A format stores a
panel's numbers in `bits` bits and a few numbers that give them their scale. `native/stored.h` says how they lie.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from octavo.errors import ConfigError, show

_PAIR = 4  # a scale in bf16, and a zero point of 16 bits in sixteenths of it
_SCALE = 4  # a float32
_ALIGNMENT = 64  # where the head of a stored block begins

Metadata = Callable[[int, int], int]
"""Bytes beside the numbers of a panel `[positions x dims]`."""


def _nothing(positions: int, dims: int) -> int:
    return 0


def _per_panel(positions: int, dims: int) -> int:
    return _SCALE


def _per_channel(positions: int, dims: int) -> int:
    return dims * _PAIR


def _per_position(positions: int, dims: int) -> int:
    return positions * _PAIR


@dataclass(frozen=True)
class Format:
    """One way to store a panel. `code` is its number in block tables; `unit` divides the dimensions it can store."""

    name: str
    code: int
    bits: int
    key_metadata: Metadata
    value_metadata: Metadata
    unit: int = 1

    @property
    def is_compute(self) -> bool:
        """Whether blocks are open and sealed in the same form."""
        return self.code == 0


# Keys are quantised per channel within the block and values per token (KIVI, arXiv 2402.02750), asymmetric; fp8 (e4m3)
# has one scale per block and head.
FORMATS = {
    f.name: f
    for f in (
        Format("bf16", 0, 16, _nothing, _nothing),
        Format("f32", 0, 32, _nothing, _nothing),
        Format("fp8", 1, 8, _per_panel, _per_panel, unit=2),
        Format("int8", 2, 8, _per_channel, _per_position, unit=2),
        Format("int4", 3, 4, _per_channel, _per_position, unit=4),
        Format("int2", 4, 2, _per_channel, _per_position, unit=8),
    )
}
"""By name."""

FIRST_STORED = 1 << 56
"""Entries of block tables from here on are of blocks that are stored in another form than they are filled in."""

LEAST_STORED_BLOCK = 16
"""Positions of the smallest block that can be stored in another form than it is filled in."""


@dataclass(frozen=True)
class BlockFormat:
    """How a block is stored: its keys, and its values."""

    keys: Format
    values: Format

    @property
    def name(self) -> str:
        """`int8`, or `k=int8,v=int4`."""
        same = self.keys == self.values
        return self.keys.name if same else f"k={self.keys.name},v={self.values.name}"

    @property
    def is_compute(self) -> bool:
        """Whether blocks are open and sealed in the same form."""
        return self.keys.is_compute and self.values.is_compute

    @property
    def block_size(self) -> int:
        """The default where the format is chosen."""
        return 16 if self.is_compute else 32

    @property
    def tag(self) -> int:
        """What a block table's entry has above its offset."""
        return (self.keys.code | self.values.code << 3) * FIRST_STORED

    def head_bytes(self, positions: int, key_dim: int, value_dim: int) -> int:
        """Bytes of one KV head of one layer in a block of `positions` positions, scales included."""
        nbytes = positions * key_dim * self.keys.bits // 8 + self.keys.key_metadata(positions, key_dim)
        if value_dim:
            nbytes += positions * value_dim * self.values.bits // 8
            nbytes += self.values.value_metadata(positions, value_dim)
        return nbytes if self.is_compute else -(-nbytes // _ALIGNMENT) * _ALIGNMENT


_PARTS = re.compile(r"k=(\w+),v=(\w+)")


@lru_cache
def block_format(name: str) -> BlockFormat:
    """The format called `name`: one of `FORMATS` for keys and values alike, or `k=int8,v=int4`.

    Raises `ConfigError` for one that there is not.
    """
    parts = _PARTS.fullmatch(name)
    keys, values = parts.groups() if parts else (name, name)
    if keys not in FORMATS or values not in FORMATS:
        raise ConfigError(
            f"kv_cache_dtype={show(name)} is not one of {', '.join(FORMATS)}, or two of them as k=int8,v=int4",
            param="kv_cache_dtype",
        )
    return BlockFormat(FORMATS[keys], FORMATS[values])
