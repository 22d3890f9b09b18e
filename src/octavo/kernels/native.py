"""The native kernels, for torch tensors.

torch is imported before the native module, so that both run on one OpenMP pool (the same libgomp). Shapes are
the caller's promise on the hot path: what could write outside a buffer is asserted where buffers are made.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.cache.formats import BlockFormat
from octavo.config import Environment
from octavo.errors import ConfigError, OctavoError
from octavo.kernels import _native

PANEL = 32
"""Output columns of a packed weight's panel."""

MAX_HEAD_DIM = 512
"""Dimensions of a head at most: the kernels keep one on their stack (`kMaxHeadDim` in `native/rows.h`)."""

AttentionPlan = _native.AttentionPlan
HugeBuffer = _native.HugeBuffer

MODULE_FILE = Path(str(_native.__file__))
"""The compiled module."""

_DTYPES = {torch.float32: 0, torch.bfloat16: 1}


@cache
def module_digest() -> str:
    """SHA-256 of the compiled module: what was found out about a kernel holds until it is rebuilt."""
    return hashlib.sha256(MODULE_FILE.read_bytes()).hexdigest()


class Epilogue(IntEnum):
    """What becomes of a product: stored in the compute type or as float32, added to float32, gated by SiLU."""

    STORE = 0
    STORE_FLOAT = 1
    ADD = 2
    SILU_GATED = 3


def path() -> str:
    """The instruction-set path in use: `generic`, `avx2`, `avx512` or `avx512bf16`."""
    return _native.path()


def paths() -> list[str]:
    """The paths this machine can run, best last."""
    return _native.paths()


def select(name: str) -> None:
    """Use the path `name`. Raises `ConfigError` if this machine cannot run it."""
    if name not in paths():
        raise ConfigError(f"OCTAVO_ISA={name!r} cannot run here; this machine has {', '.join(paths())}")
    _native.select(name)


if (_forced := Environment.read().isa) is not None:
    select(_forced)


_pool_owner: int | None = None
"""The process in which the threads of the pool were started."""


def check_pool() -> None:
    """Raise `OctavoError` in a forked child: the pool's threads stay with the parent, and work would wait forever."""
    if _pool_owner is not None and _pool_owner != os.getpid():
        raise OctavoError(
            f"this process was forked from {_pool_owner} after the threads of the kernels had started, and they did "
            "not come along; start it with multiprocessing's 'spawn' method, or use num_threads=1 in both"
        )


def set_num_threads(count: int) -> None:
    """Use `count` threads in these kernels and in torch; raises `ConfigError` if the pool gives fewer, and
    `OctavoError` in a forked child (see `check_pool`)."""
    global _pool_owner
    if count > 1:
        check_pool()
        _pool_owner = os.getpid()
    torch.set_num_threads(count)
    _native.set_num_threads(count)
    if (got := _native.observed_threads()) != count:
        raise ConfigError(
            f"num_threads={count}: the OpenMP pool gives {got}; unset OMP_THREAD_LIMIT or ask for {got}",
            param="num_threads",
        )


DEFAULT_THREADS = torch.get_num_threads()
"""The processors this process may use, or fewer where `OMP_NUM_THREADS` told torch so."""


def num_threads() -> int:
    """Threads a kernel asks for."""
    return _native.num_threads()


def observed_threads() -> int:
    """Threads a parallel region of the native module really gets."""
    return _native.observed_threads()


class WeightPool:
    """Packed weights in one huge-page buffer, handed out front to back."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = HugeBuffer(max(nbytes, 64))
        self._used = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self._buffer.nbytes

    def take(self, nbytes: int) -> int:
        """The address of `nbytes` more, on a cache line."""
        start = self._used
        self._used += -(-nbytes // 64) * 64
        if self._used > self._buffer.nbytes:
            raise MemoryError(f"weight pool of {self._buffer.nbytes} bytes is {self._used} bytes too small")
        return self._buffer.address + start


def packed_bytes(n: int, k: int, itemsize: int) -> int:
    """Bytes a weight of `n` outputs and `k` inputs takes in a `WeightPool`."""
    return -(-(-(-n // PANEL) * PANEL * k * itemsize) // 64) * 64


@dataclass(frozen=True)
class PackedLinear:
    """A weight `[n, k]` laid out for the kernel, and its bias padded to whole panels."""

    address: int
    n: int
    k: int
    dtype: int
    bias: Tensor | None
    pool: WeightPool

    @classmethod
    def pack(cls, weight: Tensor, bias: Tensor | None, pool: WeightPool) -> PackedLinear:
        """Copies `weight [n, k]` (bfloat16 with even k, or float32) into `pool`."""
        n, k = weight.shape
        if weight.dtype == torch.bfloat16 and k % 2:
            raise ValueError(f"a bf16 weight needs an even number of inputs, not {k}")
        address = pool.take(packed_bytes(n, k, weight.element_size()))
        weight = weight.contiguous()
        _native.pack(weight.data_ptr(), address, n, k, weight.element_size())
        if bias is not None:
            bias = torch.nn.functional.pad(bias.float(), (0, -n % PANEL)).contiguous()
        return cls(address, n, k, _DTYPES[weight.dtype], bias, pool)

    def __call__(self, x: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """`out = x w + bias` for `x [rows, k]`; `out` is `[rows, n]`, or `[rows, n / 2]` when gated."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        _native.linear(
            self.dtype, x.data_ptr(), self.address, bias, out.data_ptr(), x.shape[0], self.n, self.k, epilogue
        )


def gate_up_rows(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of two `[n, k]` weights interleaved for `SILU_GATED`: 16 of gate, the matching 16 of up, and so on."""
    half = PANEL // 2
    pad = (0, 0, 0, -gate.shape[0] % half)
    pairs = [torch.nn.functional.pad(w, pad).view(-1, half, w.shape[1]) for w in (gate, up)]
    return torch.stack(pairs, dim=1).reshape(-1, gate.shape[1])


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Norm of float32 `x [rows, dim]` with float32 `weight [dim]`; `out [rows, dim]` is of the compute type."""
    _native.rms_norm(
        _DTYPES[out.dtype], x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps
    )


@dataclass(frozen=True)
class LayerCache:
    """Where one layer's keys and values live, and the shape of its heads."""

    arena: int
    layer_offset: int
    block_size: int
    kv_heads: int
    head_dim: int
    q_heads: int


_NO_ROWS: npt.NDArray[np.int32] = np.empty(0, dtype=np.int32)
_NO_ENTRIES: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)


@dataclass(frozen=True)
class RowPlacement:
    """Where this step's rows stand: byte offset of each row's block (int64) and its position (int32).

    `moved` are rows whose query is wanted a second time, rotated to `moved_positions` (both int32): rows of
    sequences that have dropped positions, for the sinks before the gap.
    """

    blocks: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int32]
    moved: npt.NDArray[np.int32]
    moved_positions: npt.NDArray[np.int32]
    addresses: tuple[int, int, int, int]

    @classmethod
    def of(
        cls,
        blocks: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int32],
        dropped: npt.NDArray[np.int32] | None = None,
    ) -> RowPlacement:
        """Keeps the arrays alive beside their addresses. `dropped [rows]`: positions each row no longer sees."""
        moved = np.flatnonzero(dropped).astype(np.int32) if dropped is not None else _NO_ROWS
        moved_positions = positions[moved] - dropped[moved] if dropped is not None else _NO_ROWS
        addresses = (
            blocks.ctypes.data,
            positions.ctypes.data,
            moved.ctypes.data,
            moved_positions.ctypes.data,
        )
        return cls(blocks, positions, moved, moved_positions, addresses)

    def __len__(self) -> int:
        return len(self.positions)


class RotationTable(Protocol):
    """Cosines and sines by position, float32 `[positions, head_dim / 2]`."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class Rope:
    """A rotation table, and the head norms of models that have them."""

    table: RotationTable
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0


def rope_write(cache: LayerCache, rows: RowPlacement, qkv: Tensor, rope: Rope, q_out: Tensor) -> None:
    """Splits float32 `qkv [rows, (q_heads + 2 kv_heads) * head_dim]`: rotated queries to `q_out`, K and V to
    the cache. Moved queries follow the others: `q_out` has room for `len(rows) + len(rows.moved)`."""
    blocks, positions, moved, moved_positions = rows.addresses
    _native.rope_write(
        _DTYPES[q_out.dtype],
        cache.arena,
        cache.layer_offset,
        cache.block_size,
        cache.kv_heads,
        cache.head_dim,
        cache.q_heads,
        blocks,
        positions,
        len(rows),
        qkv.data_ptr(),
        rope.table.cos.data_ptr(),
        rope.table.sin.data_ptr(),
        moved,
        moved_positions,
        len(rows.moved),
        0 if rope.q_norm is None else rope.q_norm.data_ptr(),
        0 if rope.k_norm is None else rope.k_norm.data_ptr(),
        rope.eps,
        q_out.data_ptr(),
    )


def cache_write(cache: LayerCache, rows: RowPlacement, k: Tensor, v: Tensor) -> None:
    """Writes `k, v [rows, kv_heads, head_dim]` (any row and head stride) to the cache."""
    _native.cache_write(
        _DTYPES[k.dtype],
        cache.arena,
        cache.layer_offset,
        cache.block_size,
        cache.kv_heads,
        cache.head_dim,
        *rows.addresses[:2],
        len(rows),
        k.data_ptr(),
        v.data_ptr(),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
    )


def make_plan(
    segments: npt.NDArray[np.int64],
    tables: npt.NDArray[np.int64],
    dropped: npt.NDArray[np.int32],
    block_size: int,
    window: int | None,
    kv_heads: int,
    own: npt.NDArray[np.int64] = _NO_ENTRIES,
) -> AttentionPlan:
    """Divides a step's attention for one layer group.

    `segments [n, 6]`: first row, rows, first position, start of the table in `tables`, its length in blocks, sinks.
    `dropped [rows]`: positions after the sinks that a row no longer sees. With stored formats `own` holds the entries,
    at compute precision, of the blocks that each segment's rows stand in, one segment after the other. Raises
    `ValueError` if a segment reaches outside its table.
    """
    return _native.make_plan(segments, tables, dropped, own, block_size, window or 0, kv_heads)


def stored_head_bytes(dtype: torch.dtype, format: BlockFormat, block_size: int, head_dim: int) -> int:
    """Bytes of one KV head of one layer in a block of this format, as the kernels count them."""
    codes = format.keys.code, format.values.code
    return _native.stored_head_bytes(dtype.itemsize, *codes, block_size, head_dim)


def seal(dtype: torch.dtype, cache: LayerCache, from_to: npt.NDArray[np.int64]) -> None:
    """Writes one layer of blocks in other formats: `from_to [blocks, 2]` are entries of source and target."""
    if len(from_to):
        _native.seal(_DTYPES[dtype], *_place(cache), from_to)


def unseal(dtype: torch.dtype, cache: LayerCache, entries: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Keys and values of blocks in any format, float32 `[blocks, kv_heads, block_size, head_dim]` each."""
    shape = (len(entries), cache.kv_heads, cache.block_size, cache.head_dim)
    k, v = torch.empty(shape), torch.empty(shape)
    pairs = np.stack([entries, entries], axis=1)
    _native.unseal(_DTYPES[dtype], *_place(cache), pairs, k.data_ptr(), v.data_ptr())
    return k, v


def _place(cache: LayerCache) -> tuple[int, int, int, int, int]:
    return cache.arena, cache.layer_offset, cache.block_size, cache.kv_heads, cache.head_dim


def attention(
    cache: LayerCache, plan: AttentionPlan, q: Tensor, out: Tensor, scale: float, softcap: float = 0.0
) -> None:
    """Attention of `q [rows, q_heads, head_dim]` over the cache into `out` of the same shape.

    Raises `ValueError` unless `scale` is above 0: the kernel takes the largest score before it scales.
    """
    if not scale > 0:
        raise ValueError(f"scale={scale} must be above 0")
    _native.attention(
        _DTYPES[q.dtype],
        plan,
        cache.arena,
        cache.layer_offset,
        cache.kv_heads,
        cache.head_dim,
        cache.q_heads,
        q.data_ptr(),
        out.data_ptr(),
        scale,
        softcap,
    )
