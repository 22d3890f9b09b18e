"""Sequences in a cache of their own whose blocks are stored in a smaller form."""

from __future__ import annotations

import numpy as np
import torch

from octavo.cache.formats import block_format
from octavo.kernels import native, reference
from octavo.kernels.native import LayerCache, RowPlacement


class Stored:
    """Sequences whose full blocks but the first are sealed; open twins of all blocks are there too, and between them
    nothing but NaN."""

    def __init__(
        self,
        lengths: list[int],
        keys: str,
        values: str,
        *,
        kv_heads: int = 2,
        q_heads: int = 6,
        head_dim: int = 64,
        block_size: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        scale: float = 1.0,
    ) -> None:
        self.dtype, self.block_size, self.head_dim = dtype, block_size, head_dim
        self.kv_heads, self.q_heads = kv_heads, q_heads
        compute = "bf16" if dtype == torch.bfloat16 else "f32"
        keys, values = (compute if name == "own" else name for name in (keys, values))
        layers = 2
        self.layer = layer = 1
        self.format = format = block_format(keys if keys == values else f"k={keys},v={values}")
        whole = kv_heads * block_format(compute).head_bytes(block_size, head_dim, head_dim)
        small = kv_heads * format.head_bytes(block_size, head_dim, head_dim)
        counts = [-(-n // block_size) for n in lengths]
        self.buffer = native.HugeBuffer(sum(counts) * layers * (whole + small) + 4096)
        native._native.fill(self.buffer.address, 0xFF, self.buffer.nbytes)
        self.cache = LayerCache(self.buffer.address, layer * whole, block_size, kv_heads, head_dim, q_heads)
        self.k = [scale * torch.randn(n, kv_heads, head_dim).to(dtype) for n in lengths]
        self.v = [scale * torch.randn(n, kv_heads, head_dim).to(dtype) for n in lengths]
        self.q = [torch.randn(n, q_heads, head_dim).to(dtype) for n in lengths]
        offset, self.open, self.tables = 0, [], []
        for i, n in enumerate(lengths):
            blocks = np.arange(counts[i]) * layers * whole + offset
            offset += counts[i] * layers * whole
            at = np.arange(n, dtype=np.int32)
            native.cache_write(
                self.cache, RowPlacement.of(blocks[at // block_size], at), self.k[i], self.v[i]
            )
            full = np.arange(1, n // block_size)
            sealed = (full - 1) * layers * small + offset
            offset += len(full) * layers * small
            table = blocks.copy()
            table[full] = sealed | format.tag
            if len(full):
                native.seal(dtype, self.cache, np.stack([blocks[full], table[full]], axis=1))
            self.open.append(blocks)
            self.tables.append(table)

    def attend(
        self, chunks: list[tuple[int, int, int]], window: int | None = None, softcap: float = 0.0
    ) -> list[torch.Tensor]:
        """Attention of chunks (sequence, start, stop), all in one step."""
        size, segments, tables, own, rows, start = self.block_size, [], [], [], 0, 0
        for sequence, first, stop in chunks:
            table = self.tables[sequence].copy()
            if window is not None:
                table[: max(0, first + 1 - window) // size] = -1
            segments.append((rows, stop - first, first, start, len(table), 0))
            tables.append(table)
            own.append(self.open[sequence][first // size : (stop - 1) // size + 1])
            rows, start = rows + stop - first, start + len(table)
        plan = native.make_plan(
            np.array(segments, dtype=np.int64),
            np.concatenate(tables),
            np.zeros(rows, dtype=np.int32),
            size,
            window,
            self.kv_heads,
            np.concatenate(own),
        )
        q = torch.cat([self.q[s][a:b] for s, a, b in chunks])
        out = torch.empty_like(q)
        native.attention(self.cache, plan, q, out, self.head_dim**-0.5, softcap)
        return list(out.split([b - a for _, a, b in chunks]))

    def read(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are stored, float32 `[positions, kv_heads, head_dim]`."""
        k, v = native.unseal(self.dtype, self.cache, self.tables[sequence])
        count = len(self.k[sequence])
        return tuple(x.transpose(1, 2).reshape(-1, self.kv_heads, self.head_dim)[:count] for x in (k, v))  # type: ignore[return-value]

    def expected(
        self, chunk: tuple[int, int, int], window: int | None = None, softcap: float = 0.0
    ) -> torch.Tensor:
        """In torch: each row reads its own block as it was, the others as they are stored."""
        s, a, b = chunk
        k, v = self.read(s)
        size, rows = self.block_size, []
        for own in range(a // size * size, b, size):
            first, last = max(a, own), min(b, own + size)
            rows.append(
                reference.span_attention(
                    self.q[s][first:last].float(),
                    torch.cat([k[:own], self.k[s][own:last].float()]),
                    torch.cat([v[:own], self.v[s][own:last].float()]),
                    torch.arange(first, last),
                    self.head_dim**-0.5,
                    window,
                    softcap,
                )
            )
        return torch.cat(rows)
