"""Eight-bit codes meet queries and weights as integers: the kernel against torch that rounds both the same way."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.kernels import native
from support.stored import Stored

pytestmark = pytest.mark.usefixtures("isa")

MOST = 32767


def codes_of(stored: Stored, entry: int, head: int) -> tuple[Tensor, ...]:
    """Codes, scales and zeros of a sealed int8 block: of its keys `[positions, head_dim]`, `[head_dim]` twice, and of
    its values `[positions, head_dim]`, `[positions]` twice."""
    size, dim = stored.block_size, stored.head_dim
    count = native.stored_head_bytes(stored.dtype, stored.format, size, dim)
    offset = (entry & ((1 << 56) - 1)) + (stored.layer * stored.kv_heads + head) * count
    raw = np.frombuffer(ctypes.string_at(stored.buffer.address + offset, count), dtype=np.int8)
    keys, values = raw[: size * dim], raw[size * dim : 2 * size * dim]
    meta = torch.from_numpy(raw[2 * size * dim :].copy())

    def scales(start: int, many: int) -> tuple[Tensor, Tensor]:
        scale = meta[start : start + 2 * many].view(torch.bfloat16).float()
        return scale, meta[start + 2 * many : start + 4 * many].view(torch.int16).float() / 16

    k = torch.from_numpy(
        keys.reshape(size // 16, dim // 2, 16, 2).transpose(0, 2, 1, 3).reshape(size, dim).copy()
    )
    v = torch.from_numpy(values.reshape(size // 2, dim, 2).transpose(0, 2, 1).reshape(size, dim).copy())
    return k.float(), *scales(0, dim), v.float(), *scales(4 * dim, size)


def rounded(x: Tensor) -> Tensor:
    """Rows of `x` as whole multiples of a 32767th of their largest."""
    unit = x.abs().amax(-1, keepdim=True) / MOST
    return torch.where(unit > 0, (x / unit).round() * unit, 0)


def expected(stored: Stored, position: int) -> Tensor:
    """The answer of the last row, `[q_heads, head_dim]`: the first block and its own are as they were."""
    size, group = stored.block_size, stored.q_heads // stored.kv_heads
    table, k, v = stored.tables[0], stored.k[0].float(), stored.v[0].float()
    sealed = range(1, position // size)
    out = []
    for row in range(stored.q_heads):
        q, head = stored.q[0][position, row].float(), row // group
        scores = k[: position + 1, head] @ q
        blocks = {b: codes_of(stored, int(table[b]), head) for b in sealed}
        for b, (codes, scale, zero, *_) in blocks.items():
            scores[b * size : (b + 1) * size] = codes @ rounded(q * scale) + (q * scale * zero).sum()
        weights = (scores * stored.head_dim**-0.5).softmax(0)
        total = torch.zeros(stored.head_dim)
        for b in range(position // size + 1):
            rows = slice(b * size, min((b + 1) * size, position + 1))
            if b in blocks:
                codes, scale, zero = blocks[b][3:]
                total += rounded(weights[rows] * scale) @ codes + (weights[rows] * scale * zero).sum()
            else:
                total += weights[rows] @ v[rows, head]
        out.append(total)
    return torch.stack(out)


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 32), (80, 16), (256, 64)])
def test_products_are_those_of_rounded_rows(head_dim: int, block_size: int) -> None:
    torch.manual_seed(6)
    stored = Stored([420], "int8", "int8", head_dim=head_dim, block_size=block_size, dtype=torch.float32)
    out = stored.attend([(0, 419, 420)])[0]
    torch.testing.assert_close(
        out.reshape(stored.q_heads, head_dim), expected(stored, 419), rtol=2e-5, atol=2e-5
    )
