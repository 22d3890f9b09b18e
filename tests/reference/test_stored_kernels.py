"""Blocks in 8, 4 or 2 bits: what sealing keeps, and attention over them against torch on what was kept."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch

from octavo.cache.formats import block_format
from octavo.kernels import native, reference
from octavo.kernels.native import LayerCache, RowPlacement

DTYPES = [torch.float32, torch.bfloat16]
STORED = ["fp8", "int8", "int4", "int2"]
STEPS = {"int8": 255, "int4": 15, "int2": 3}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-3}


@pytest.fixture(params=native.paths(), autouse=True)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    best = native.path()
    native.select(request.param)
    yield request.param
    native.select(best)


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
        self.dtype, self.block_size, self.head_dim, self.kv_heads = dtype, block_size, head_dim, kv_heads
        compute = "bf16" if dtype == torch.bfloat16 else "f32"
        keys, values = (compute if name == "own" else name for name in (keys, values))
        layers, layer = 2, 1
        format = block_format(keys if keys == values else f"k={keys},v={values}")
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


@pytest.mark.parametrize("name", [*STORED, "k=int8,v=int4", "k=bf16,v=int2", "bf16"])
@pytest.mark.parametrize(("block_size", "head_dim"), [(32, 64), (16, 80), (256, 32)])
def test_kernels_and_layout_count_the_same_bytes(name: str, block_size: int, head_dim: int) -> None:
    format = block_format(name)
    counted = native.stored_head_bytes(torch.bfloat16, format, block_size, head_dim)
    assert counted == format.head_bytes(block_size, head_dim, head_dim)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", STORED)
@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_sealed_numbers_are_within_half_a_step(dtype: torch.dtype, format: str, head_dim: int) -> None:
    torch.manual_seed(1)
    stored = Stored([160], format, format, head_dim=head_dim, dtype=dtype, scale=3.0)
    k, v = stored.read(0)
    size = stored.block_size
    assert torch.equal(k[:size], stored.k[0][:size].float())  # the first block stays as it was
    assert torch.equal(v[:size], stored.v[0][:size].float())
    for block in range(1, 5):
        rows = slice(block * size, (block + 1) * size)
        for got, given, axis in (
            (k[rows], stored.k[0][rows].float(), 0),
            (v[rows], stored.v[0][rows].float(), 2),
        ):
            if format == "fp8":
                torch.testing.assert_close(got, given, rtol=1 / 15, atol=float(given.abs().max()) / 448 / 512)
                continue
            step = (given.amax(axis, keepdim=True) - given.amin(axis, keepdim=True)) / STEPS[format]
            assert ((got - given).abs() <= 0.54 * step + 1e-6).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("keys", "values", "q_heads", "kv_heads", "head_dim", "block_size"),
    [
        *((f, f, 9, 3, 64, 32) for f in STORED),
        ("int8", "int4", 4, 4, 32, 16),
        ("own", "int4", 13, 1, 48, 64),
        ("int8", "own", 12, 4, 80, 32),
        ("int4", "int2", 2, 1, 256, 256),
    ],
)
def test_attention_over_stored_blocks_agrees(
    dtype: torch.dtype, keys: str, values: str, q_heads: int, kv_heads: int, head_dim: int, block_size: int
) -> None:
    torch.manual_seed(2)
    stored = Stored(
        [1, 31, 300, 700],
        keys,
        values,
        kv_heads=kv_heads,
        q_heads=q_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
    )
    chunks = [(0, 0, 1), (1, 0, 31), (2, 255, 300), (3, 699, 700)]
    for window, softcap in [(None, 0.0), (None, 5.0), (100, 0.0), (5, 0.0)]:
        for chunk, out in zip(chunks, stored.attend(chunks, window, softcap), strict=True):
            torch.testing.assert_close(
                out.float(),
                stored.expected(chunk, window, softcap).float(),
                rtol=TOLERANCE[dtype],
                atol=TOLERANCE[dtype],
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", STORED)
@pytest.mark.parametrize("window", [None, 70])
def test_bits_do_not_depend_on_how_a_step_is_cut(dtype: torch.dtype, format: str, window: int | None) -> None:
    torch.manual_seed(3)
    stored = Stored([600, 333], format, format, q_heads=9, kv_heads=3, dtype=dtype)
    whole = stored.attend([(0, 0, 600), (1, 0, 333)], window)
    cuts = [0, 1, 16, 31, 32, 33, 100, 256, 257, 320, 511, 512, 513, 599, 600]
    for sequence, length in ((0, 600), (1, 333)):
        for a, b in pairwise([c for c in cuts if c < length] + [length]):
            together = stored.attend([(1 - sequence, 3, 200), (sequence, a, b)], window)[1]
            assert torch.equal(together, whole[sequence][a:b])
    single = stored.attend([(0, p, p + 1) for p in range(0, 600, 37)], window)
    assert torch.equal(torch.cat(single), whole[0][::37])


def test_rows_that_read_the_same_stored_span_are_computed_together() -> None:
    torch.manual_seed(4)
    stored = Stored([600, 600], "int4", "int4", q_heads=9, kv_heads=3)
    alone = stored.attend([(1, 599, 600)])[0]
    stored.tables[1][:16] = stored.tables[0][:16]  # the first two spans
    shared = stored.attend([(0, 599, 600), (1, 599, 600)])
    assert torch.equal(shared[0], stored.attend([(0, 599, 600)])[0])
    assert not torch.equal(shared[1], alone)
    assert torch.equal(shared[1], stored.attend([(1, 599, 600)])[0])


@pytest.mark.parametrize("format", STORED)
@pytest.mark.parametrize("case", ["zeros", "constant channel", "outlier", "huge", "tiny"])
def test_whatever_is_finite_stays_finite(format: str, case: str) -> None:
    torch.manual_seed(5)
    stored = Stored([128], format, format)
    k, v = stored.k[0], stored.v[0]
    if case == "zeros":
        k.zero_(), v.zero_()
    elif case == "constant channel":
        k[:, :, 3], v[:, :, 5] = 7.0, -3.0
    elif case == "outlier":
        k[:, :, 3] += 50.0
    elif case == "huge":
        k *= 1e30
        v *= 1e37
        stored.q[0] *= 1e-30
    else:
        k *= 1e-38
        v *= 1e-38
    at = np.arange(128, dtype=np.int32)
    native.cache_write(stored.cache, RowPlacement.of(stored.open[0][at // 32], at), k, v)
    native.seal(torch.bfloat16, stored.cache, np.stack([stored.open[0][1:], stored.tables[0][1:]], axis=1))
    assert all(x.isfinite().all() for x in stored.read(0))
    out = stored.attend([(0, 100, 128)])[0]
    assert out.isfinite().all()
    if case in ("constant channel", "outlier") and format != "fp8":
        got = stored.read(0)[0][32:, :, 3]
        torch.testing.assert_close(
            got, k[32:, :, 3].float(), rtol=2e-2, atol=2.5 if format == "int2" else 0.4
        )
