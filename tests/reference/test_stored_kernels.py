"""Blocks in 8, 4 or 2 bits: what sealing keeps, and attention over them against torch on what was kept."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from octavo.cache.formats import block_format
from octavo.kernels import native, reference
from octavo.kernels.native import RowPlacement
from support.stored import Stored

pytestmark = pytest.mark.usefixtures("isa")

DTYPES = [torch.float32, torch.bfloat16]
STORED = ["fp8", "int8", "int4", "int2"]
STEPS = {"int8": 255, "int4": 15, "int2": 3}
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-3}


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
            if format in ("int4", "int2"):
                got, given = reference.turn(got), reference.turn(given)
            step = (given.amax(axis, keepdim=True) - given.amin(axis, keepdim=True)) / STEPS[format]
            assert ((got - given).abs() <= 0.54 * step + 1e-6).all()


def test_turning_keeps_lengths_and_twice_is_not_at_all() -> None:
    torch.manual_seed(7)
    x = torch.randn(3, 80)
    torch.testing.assert_close(reference.turn(reference.turn(x)), x)
    torch.testing.assert_close(reference.turn(x).norm(dim=-1), x.norm(dim=-1))


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
