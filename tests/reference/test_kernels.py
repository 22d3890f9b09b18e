"""The native kernels against the reference, on every instruction-set path this machine has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from octavo.cache.dropping import DropRule
from octavo.kernels import native, reference
from octavo.kernels.native import Epilogue, LayerCache, PackedLinear, Rope, RowPlacement, WeightPool

pytestmark = pytest.mark.usefixtures("isa")

DTYPES = [torch.bfloat16, torch.float32]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 2e-5}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    native.set_num_threads(request.param)
    yield request.param
    native.set_num_threads(1)


def packed(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedLinear:
    pool = WeightPool(native.packed_bytes(*weight.shape, weight.element_size()))
    return PackedLinear.pack(weight, bias, pool)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(96, 64), (100, 48), (17, 130)])
def test_linear_agrees_for_every_epilogue(dtype: torch.dtype, n: int, k: int, threads: int) -> None:
    torch.manual_seed(n)
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n)
    for rows in (1, 2, 5, 12, 13, 200):
        x = torch.randn(rows, k).to(dtype)
        expected = reference.linear(x, weight, bias)
        as_float = torch.empty(rows, n)
        packed(weight, bias)(x, as_float, Epilogue.STORE_FLOAT)
        torch.testing.assert_close(as_float, expected, rtol=1e-4, atol=1e-4)
        added = torch.ones(rows, n)
        packed(weight, bias)(x, added, Epilogue.ADD)
        assert torch.equal(added, as_float + 1)
        stored = torch.empty(rows, n, dtype=dtype)
        packed(weight, bias)(x, stored, Epilogue.STORE)
        assert torch.equal(stored, as_float.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 56])
def test_gated_activation_agrees(dtype: torch.dtype, width: int, threads: int) -> None:
    torch.manual_seed(1)
    gate, up, x = (torch.randn(r, 64).to(dtype) for r in (width, width, 9))
    rows = native.gate_up_rows(gate, up)
    weight = packed(rows)
    out = torch.full((9, width + 8), 7.0, dtype=dtype)
    narrow = torch.empty(9, rows.shape[0] // 2, dtype=dtype)
    weight(x, narrow, Epilogue.SILU_GATED)
    out[:, :width] = narrow[:, :width]
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(
        out[:, :width].float(), reference.silu_gated(x, gate, up), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_linear_does_not_depend_on_company(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    weight, x = packed(torch.randn(160, 256).to(dtype)), torch.randn(300, 256).to(dtype)
    native.set_num_threads(2)
    whole = torch.empty(300, 160)
    weight(x, whole, Epilogue.STORE_FLOAT)
    for threads in (1, 2):
        native.set_num_threads(threads)
        for first, rows in [(0, 1), (7, 2), (100, 3), (11, 17), (280, 20), (1, 299)]:
            part = torch.empty(rows, 160)
            weight(x[first : first + rows].contiguous(), part, Epilogue.STORE_FLOAT)
            assert torch.equal(part, whole[first : first + rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 40, 576])
def test_rms_norm_agrees_and_a_row_is_its_own(dtype: torch.dtype, dim: int, threads: int) -> None:
    torch.manual_seed(3)
    x, weight = torch.randn(33, dim), torch.randn(dim)
    out = torch.empty(33, dim, dtype=dtype)
    native.rms_norm(x, weight, 1e-5, out)
    torch.testing.assert_close(
        out.float(), reference.rms_norm(x, weight, 1e-5), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    one = torch.empty(1, dim, dtype=dtype)
    native.rms_norm(x[20:21].contiguous(), weight, 1e-5, one)
    assert torch.equal(one[0], out[20])


@dataclass
class Tables:
    cos: torch.Tensor
    sin: torch.Tensor


class Paged:
    """Sequences with random keys and values in a shuffled arena, everything else filled with NaN."""

    def __init__(
        self,
        lengths: list[int],
        *,
        kv_heads: int,
        q_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        layers: int = 2,
    ) -> None:
        self.dtype, self.block_size, self.head_dim = dtype, block_size, head_dim
        self.kv_heads, self.q_heads = kv_heads, q_heads
        self.layer_bytes = kv_heads * 2 * block_size * head_dim * dtype.itemsize
        self.block_bytes = layers * self.layer_bytes
        counts = [-(-n // block_size) for n in lengths]
        self.buffer = native.HugeBuffer((sum(counts) + 1) * self.block_bytes)
        size = self.buffer.nbytes
        native._native.fill(self.buffer.address, 0xFF, size)
        order = np.random.default_rng(0).permutation(sum(counts) + 1)[: sum(counts)] * self.block_bytes
        splits = np.cumsum(counts)[:-1]
        self.tables = [np.ascontiguousarray(t, dtype=np.int64) for t in np.split(order, splits)]
        self.cache = LayerCache(
            self.buffer.address, self.layer_bytes, block_size, kv_heads, head_dim, q_heads
        )
        self.k = [torch.randn(n, kv_heads, head_dim).to(dtype) for n in lengths]
        self.v = [torch.randn(n, kv_heads, head_dim).to(dtype) for n in lengths]
        self.q = [torch.randn(n, q_heads, head_dim).to(dtype) for n in lengths]
        for i, n in enumerate(lengths):
            native.cache_write(self.cache, self.placement(i, range(n)), self.k[i], self.v[i])

    def placement(self, sequence: int, positions: range) -> RowPlacement:
        at = np.arange(positions.start, positions.stop, dtype=np.int32)
        return RowPlacement.of(self.tables[sequence][at // self.block_size], at)

    def attend(
        self,
        chunks: list[tuple[int, int, int]],
        window: int | None = None,
        softcap: float = 0.0,
    ) -> list[torch.Tensor]:
        """Attention of chunks (sequence, start, stop), all in one step."""
        segments, tables, rows, start = [], [], 0, 0
        for sequence, first, stop in chunks:
            table = self.tables[sequence].copy()
            if window is not None:
                table[: max(0, first + 1 - window) // self.block_size] = -1
            segments.append((rows, stop - first, first, start, len(table), 0))
            tables.append(table)
            rows, start = rows + stop - first, start + len(table)
        plan = native.make_plan(
            np.array(segments, dtype=np.int64),
            np.concatenate(tables),
            np.zeros(rows, dtype=np.int32),
            self.block_size,
            window,
            self.kv_heads,
        )
        q = torch.cat([self.q[s][a:b] for s, a, b in chunks])
        out = torch.empty_like(q)
        native.attention(self.cache, plan, q, out, self.head_dim**-0.5, softcap)
        return list(out.split([b - a for _, a, b in chunks]))

    def expected(
        self, chunk: tuple[int, int, int], window: int | None = None, softcap: float = 0.0
    ) -> torch.Tensor:
        s, a, b = chunk
        return reference.span_attention(
            self.q[s][a:b],
            self.k[s][:b],
            self.v[s][:b],
            torch.arange(a, b),
            self.head_dim**-0.5,
            window,
            softcap,
        )


SHAPES = [
    pytest.param(9, 3, 64, id="grouped 9 over 3"),
    pytest.param(4, 4, 32, id="multi-head"),
    pytest.param(13, 1, 48, id="multi-query"),
    pytest.param(12, 4, 80, id="head_dim 80"),
    pytest.param(2, 1, 256, id="head_dim 256"),
    pytest.param(2, 2, 36, id="head_dim 36"),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), SHAPES)
def test_attention_agrees(
    dtype: torch.dtype, q_heads: int, kv_heads: int, head_dim: int, threads: int
) -> None:
    torch.manual_seed(4)
    lengths = [1, 31, 300, 700]
    paged = Paged(lengths, kv_heads=kv_heads, q_heads=q_heads, head_dim=head_dim, block_size=16, dtype=dtype)
    chunks = [(0, 0, 1), (1, 0, 31), (2, 255, 300), (3, 699, 700)]
    for window, softcap in [(None, 0.0), (None, 5.0), (100, 0.0), (5, 0.0)]:
        for chunk, out in zip(chunks, paged.attend(chunks, window, softcap), strict=True):
            torch.testing.assert_close(
                out.float(),
                paged.expected(chunk, window, softcap),
                rtol=TOLERANCE[dtype],
                atol=TOLERANCE[dtype],
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_agrees_where_scores_are_far_apart(dtype: torch.dtype, isa: str) -> None:
    """Weights from 1 down to what underflows, spans of which one outweighs all others."""
    torch.manual_seed(14)
    paged = Paged([600], kv_heads=1, q_heads=3, head_dim=64, block_size=16, dtype=dtype)
    paged.q[0] *= 40
    for chunk, out in zip([(0, 590, 600)], paged.attend([(0, 590, 600)]), strict=True):
        torch.testing.assert_close(
            out.float(), paged.expected(chunk).float(), rtol=1e-2, atol=10 * TOLERANCE[dtype]
        )
        assert out.isfinite().all()


def test_a_scale_that_is_not_above_0_is_refused() -> None:
    paged = Paged([8], kv_heads=1, q_heads=1, head_dim=32, block_size=8, dtype=torch.float32)
    out = torch.empty_like(paged.q[0])
    plan = native.make_plan(
        np.array([(0, 8, 0, 0, 1, 0)], dtype=np.int64),
        paged.tables[0],
        np.zeros(8, dtype=np.int32),
        8,
        None,
        1,
    )
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="must be above 0"):
            native.attention(paged.cache, plan, paged.q[0], out, scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 37, 256, 300])
def test_attention_bits_do_not_depend_on_how_a_step_is_cut(dtype: torch.dtype, window: int | None) -> None:
    answers = []
    for block_size in (4, 8, 16, 32, 128, 256):
        torch.manual_seed(5)
        paged = Paged([530, 90], kv_heads=2, q_heads=6, head_dim=64, block_size=block_size, dtype=dtype)
        native.set_num_threads(2)
        whole = paged.attend([(0, 0, 530)], window)[0]
        answers.append(whole)
        for threads in (1, 2):
            native.set_num_threads(threads)
            for size in (3, 8, 17, 100):
                parts = [
                    paged.attend([(1, 80, 90), (0, a, min(a + size, 530)), (1, 0, 5)], window)[1]
                    for a in range(0, 530, size)
                ]
                assert torch.equal(torch.cat(parts), whole)
    for answer in answers[1:]:
        assert torch.equal(answer, answers[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_read_one_physical_span_are_grouped_without_changing_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    paged = Paged([600, 600, 600], kv_heads=2, q_heads=6, head_dim=32, block_size=16, dtype=dtype)
    shared = 512 // 16
    for i in (1, 2):
        paged.tables[i][:shared] = paged.tables[0][:shared]
    chunks = [(0, 599, 600), (1, 550, 553), (2, 511, 512)]
    together = paged.attend(chunks)
    for chunk, out in zip(chunks, together, strict=True):
        assert torch.equal(paged.attend([chunk])[0], out)
    segments = np.array(
        [(0, 1, 599, 0, 38, 0), (1, 3, 550, 38, 38, 0), (4, 1, 511, 76, 38, 0)], dtype=np.int64
    )
    plan = native.make_plan(segments, np.concatenate(paged.tables), np.zeros(5, dtype=np.int32), 16, None, 2)
    assert plan.span_items == 2 + 2
    assert plan.span_members == (1 + 3 + 1) * 2 + 1 + 3


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_later_row_that_overflowed_does_not_reach_an_earlier_one(dtype: torch.dtype) -> None:
    torch.manual_seed(7)
    paged = Paged([40], kv_heads=1, q_heads=3, head_dim=32, block_size=16, dtype=dtype)
    clean = paged.attend([(0, 0, 40)])[0]
    bad = torch.full((1, 1, 32), float("inf"), dtype=dtype)
    native.cache_write(paged.cache, paged.placement(0, range(38, 39)), bad, bad)
    poisoned = paged.attend([(0, 0, 40)])[0]
    assert torch.equal(poisoned[:38], clean[:38])
    assert not poisoned[38].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [4, 16, 64])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_write_fills_the_cache_and_the_queries(
    dtype: torch.dtype, block_size: int, with_norm: bool
) -> None:
    torch.manual_seed(8)
    length, q_heads, kv_heads, dim = 70, 6, 2, 40
    paged = Paged(
        [length], kv_heads=kv_heads, q_heads=q_heads, head_dim=dim, block_size=block_size, dtype=dtype
    )
    qkv = torch.randn(length, (q_heads + 2 * kv_heads) * dim)
    cos, sin = torch.randn(length, dim // 2), torch.randn(length, dim // 2)
    norms = (torch.randn(dim), torch.randn(dim)) if with_norm else (None, None)
    q_out = torch.empty(length, q_heads, dim, dtype=dtype)
    native.rope_write(
        paged.cache, paged.placement(0, range(length)), qkv, Rope(Tables(cos, sin), *norms, eps=1e-6), q_out
    )
    heads = qkv.view(length, -1, dim)
    q, k, v = heads[:, :q_heads], heads[:, q_heads:-kv_heads], heads[:, -kv_heads:]
    if with_norm:
        q, k = (reference.rms_norm(x, w, 1e-6) for x, w in ((q, norms[0]), (k, norms[1])))
    arena = torch.frombuffer(
        (np.ctypeslib.ctypes.c_char * paged.buffer.nbytes).from_address(paged.buffer.address), dtype=dtype
    )
    stored = reference.read_cache(
        arena, paged.tables[0].tolist(), paged.layer_bytes, length, block_size, kv_heads, dim
    )
    tolerance = TOLERANCE[dtype]
    expected_k = reference.rotate(k, cos, sin)
    torch.testing.assert_close(q_out.float(), reference.rotate(q, cos, sin), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(stored[0].float(), expected_k, rtol=tolerance, atol=tolerance)
    assert torch.equal(stored[1], v.to(dtype))


def test_a_plan_that_reaches_outside_its_table_is_refused() -> None:
    segments = np.array([[0, 1, 32, 0, 2, 0]], dtype=np.int64)
    with pytest.raises(ValueError, match="outside its block table"):
        native.make_plan(segments, np.zeros(2, dtype=np.int64), np.zeros(1, dtype=np.int32), 16, None, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks", [0, 16, 272])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_rows_that_dropped_positions_see_the_sinks_moved_up(
    dtype: torch.dtype, sinks: int, rows: int
) -> None:
    torch.manual_seed(10)
    length, q_heads, kv_heads, dim, block = 600, 6, 2, 32, 16
    paged = Paged(
        [length, 90], kv_heads=kv_heads, q_heads=q_heads, head_dim=dim, block_size=block, dtype=dtype
    )
    raw_q, raw_k = torch.randn(length, q_heads, dim), torch.randn(length, kv_heads, dim)
    angles = torch.arange(length)[:, None] * torch.logspace(0, -3, dim // 2)
    table = Tables(angles.cos(), angles.sin())
    qkv = torch.cat([raw_q, raw_k, paged.v[0].float()], dim=1).flatten(1)
    rule = DropRule(sinks, 64, block)
    first = length - rows
    native.rope_write(
        paged.cache,
        paged.placement(0, range(length)),
        qkv,
        Rope(table),
        torch.empty(length, q_heads, dim, dtype=dtype),
    )
    positions = np.arange(first, length, dtype=np.int32)
    dropped = rule.dropped_by_row(positions)
    assert dropped.tolist() == [rule.dropped(int(p)) for p in positions]
    placement = RowPlacement.of(paged.tables[0][positions // block], positions, dropped)
    q = torch.empty(2 * rows, q_heads, dim, dtype=dtype)
    native.rope_write(paged.cache, placement, qkv[first:].contiguous(), Rope(table), q)
    blocks = paged.tables[0].copy()
    blocks[sinks // block : (sinks + dropped[0]) // block] = -1
    segments = np.array([[0, rows, first, 0, len(blocks), sinks]], dtype=np.int64)
    plan = native.make_plan(segments, blocks, dropped, block, None, kv_heads)
    out = torch.empty(rows, q_heads, dim, dtype=dtype)
    native.attention(paged.cache, plan, q, out, dim**-0.5)
    for i, (position, gone) in enumerate(zip(positions.tolist(), dropped.tolist(), strict=True)):
        kept = [*range(sinks), *range(sinks + gone, position + 1)]
        at = torch.tensor([*range(gone, gone + sinks), *range(sinks + gone, position + 1)])
        k = reference.rotate(raw_k[kept], table.cos[at], table.sin[at]).to(dtype)
        query = reference.rotate(raw_q[position][None], table.cos[position][None], table.sin[position][None])
        expected = reference.attention(query, k, paged.v[0][kept], torch.tensor([len(kept) - 1]), dim**-0.5)
        torch.testing.assert_close(
            out[i].float(), expected[0], rtol=3 * TOLERANCE[dtype], atol=3 * TOLERANCE[dtype]
        )


def test_the_span_reference_agrees_with_plain_attention() -> None:
    torch.manual_seed(9)
    q, k, v = torch.randn(20, 4, 32), torch.randn(600, 2, 32), torch.randn(600, 2, 32)
    at = torch.arange(580, 600)
    for window in (None, 50):
        torch.testing.assert_close(
            reference.span_attention(q, k, v, at, 0.2, window, 3.0),
            reference.attention(q, k, v, at, 0.2, window, 3.0),
        )
