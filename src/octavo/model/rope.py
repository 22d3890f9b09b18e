"""Rotation tables, computed by the model's own transformers module."""

from __future__ import annotations

from typing import Any

import torch

from octavo.kernels.native import Rope

_CHUNK = 1024


def rope_tables(rotary: Any, positions: int) -> Rope:
    """Cosines and sines of positions 0 .. `positions` - 1 and a little beyond, float32 `[.., head_dim / 2]`.

    Always in chunks of one size, so that an entry's bits do not depend on how long the table is.
    """
    cos, sin = [], []
    for start in range(0, positions, _CHUNK):
        at = torch.arange(start, start + _CHUNK)[None]
        c, s = rotary(torch.empty(0, dtype=torch.float32), at)
        half = c.shape[-1] // 2
        cos.append(c[0, :, :half])
        sin.append(s[0, :, :half])
    return Rope(torch.cat(cos).float().contiguous(), torch.cat(sin).float().contiguous())
