"""The formats of a sealed block, and the bytes that each takes.

A block of `positions` positions holds, for one KV head of one layer, a key panel `[positions x key_dim]` and a value
panel `[positions x value_dim]` (none where the values are part of the keys, as in latent attention). A format stores a
panel's numbers in `bits` bits and a few numbers that give them their scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_PAIR = 4  # a scale and a zero point, bf16 each
_SMALL_PAIR = 2  # the same in 8 bits each, relative to the pair of the whole panel
_SCALE = 4  # a float32
_RUN = 32  # numbers under one small pair

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


def _per_channel_run(positions: int, dims: int) -> int:
    return dims * -(-positions // _RUN) * _SMALL_PAIR + _PAIR


def _per_position_run(positions: int, dims: int) -> int:
    return positions * -(-dims // _RUN) * _SMALL_PAIR + _PAIR


@dataclass(frozen=True)
class Format:
    """One way to store a sealed block. `in_engine`: the engine stores it; others can be planned, not served."""

    name: str
    bits: int
    key_metadata: Metadata
    value_metadata: Metadata
    block_size: int
    in_engine: bool

    @property
    def is_compute(self) -> bool:
        """Whether blocks are open and sealed in the same form."""
        return self.bits >= 16

    def head_bytes(self, positions: int, key_dim: int, value_dim: int) -> int:
        """Bytes of one KV head of one layer in a sealed block of `positions` positions, scales included."""
        numbers = positions * (key_dim + value_dim) * self.bits // 8
        values = self.value_metadata(positions, value_dim) if value_dim else 0
        return numbers + self.key_metadata(positions, key_dim) + values


# Keys are quantised per channel within the block and values per token (KIVI, arXiv 2402.02750), asymmetric; fp8 (e4m3)
# has one scale per block and head; two bits need smaller scales, which are themselves scaled.
FORMATS = {
    f.name: f
    for f in (
        Format("bf16", 16, _nothing, _nothing, block_size=16, in_engine=True),
        Format("f32", 32, _nothing, _nothing, block_size=16, in_engine=True),
        Format("fp8", 8, _per_panel, _per_panel, block_size=32, in_engine=False),
        Format("int8", 8, _per_channel, _per_position, block_size=32, in_engine=False),
        Format("int4", 4, _per_channel, _per_position, block_size=32, in_engine=False),
        Format("int2", 2, _per_channel_run, _per_position_run, block_size=32, in_engine=False),
    )
}
"""By name. `block_size` is the default where the format is chosen."""
