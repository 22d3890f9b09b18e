"""Rotation tables, computed by the model's own transformers module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK = 1024


class RopeTable:
    """Cosines and sines by position, float32 `[positions, head_dim / 2]`, at least as many as asked for.

    Made in chunks of one size, so that an entry's bits do not depend on how long the table is.
    """

    def __init__(self, rotary: Any, positions: int) -> None:
        self._rotary = rotary
        self.cos, self.sin = self._chunk(0)
        self.reach(positions)

    @property
    def nbytes(self) -> int:
        """Bytes of both tables."""
        return self.cos.nbytes + self.sin.nbytes

    def reach(self, positions: int) -> None:
        """Make sure that positions 0 .. `positions` - 1 are there."""
        have = len(self.cos)
        if positions <= have:
            return
        chunks = [self._chunk(start) for start in range(have, positions, _CHUNK)]
        self.cos = torch.cat([self.cos, *(c for c, _ in chunks)])
        self.sin = torch.cat([self.sin, *(s for _, s in chunks)])

    def _chunk(self, start: int) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(
            torch.empty(0, dtype=torch.float32), torch.arange(start, start + _CHUNK)[None]
        )
        half = cos.shape[-1] // 2
        return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()
