"""Real memory: the arena's buffer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from octavo.cache.folding import aside_bytes
from octavo.cache.layout import CacheLayout
from octavo.kernels import _native, native
from octavo.kernels.native import HugeBuffer, LayerCache

_LINE = 64


class ArenaMemory:
    """The bytes behind `cache.arena`: a huge-page buffer that starts at `address`, and what folding needs beside it."""

    def __init__(self, nbytes: int, layout: CacheLayout) -> None:
        self._aside = -(-nbytes // _LINE) * _LINE
        self._buffer = HugeBuffer(self._aside + aside_bytes(layout, nbytes))
        self._layout = layout
        self._dtype = torch.bfloat16 if layout.compute == "bf16" else torch.float32
        self.address = self._buffer.address

    def move(self, src: int, dst: int, nbytes: int) -> None:
        """Move `nbytes`; the ranges may overlap."""
        _native.move(self.address + dst, self.address + src, nbytes)

    copy = move

    def encode(self, group: int, from_to: Sequence[tuple[int, int]]) -> None:
        """Write blocks of a layer group in other formats aside: entries of source and target, whose offset counts from
        the end of the arena."""
        pairs = np.array(from_to, dtype=np.int64)
        pairs[:, 1] += self._aside
        shape = self._layout.groups[group]
        for layer in shape.layers:
            place = LayerCache(
                self.address,
                self._layout.layer_offset(group, layer),
                self._layout.block_size,
                shape.num_kv_heads,
                shape.head_dim,
                shape.num_kv_heads,
            )
            native.seal(self._dtype, place, pairs)

    def place(self, aside: int, dst: int, nbytes: int) -> None:
        """Copy what was written aside to a block."""
        self.move(self._aside + aside, dst, nbytes)

    def poison(self, offset: int, nbytes: int) -> None:
        """Fill with bytes that are a NaN in every float type."""
        _native.fill(self.address + offset, 0xFF, nbytes)
