"""What this machine can do at best, measured: reading memory and multiplying matrices, on the engine's threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from octavo.kernels import limits, native
from octavo.kernels.native import HugeBuffer

READ_BYTES = 512 << 20
"""Far beyond the last-level cache of a desktop or a virtual machine."""
GEMM_SIZES = (1024, 1536, 2048)


@dataclass(frozen=True)
class MachineLimits:
    """Best rates seen: bytes read per second, and floating-point operations per second by compute type."""

    threads: int
    read_bytes_per_s: float
    bf16_flops_per_s: float
    f32_flops_per_s: float

    def flops_per_s(self, dtype: torch.dtype) -> float:
        """The GEMM rate of a compute type."""
        return self.bf16_flops_per_s if dtype == torch.bfloat16 else self.f32_flops_per_s


def measure_limits(
    *, read_bytes: int = READ_BYTES, gemm_sizes: tuple[int, ...] = GEMM_SIZES, repeats: int = 5
) -> MachineLimits:
    """Measure now, on as many threads as the kernels use; takes a few seconds.

    A limit is the best of several ways of reaching it and of `repeats` tries: sums over `read_bytes` bytes in huge
    pages with several reads in flight, and products of square matrices of `gemm_sizes`.
    """
    return MachineLimits(
        threads=native.num_threads(),
        read_bytes_per_s=read_rate(read_bytes, repeats),
        bf16_flops_per_s=gemm_rate(torch.bfloat16, gemm_sizes, repeats),
        f32_flops_per_s=gemm_rate(torch.float32, gemm_sizes, repeats),
    )


class ReadProbe:
    """Reads `nbytes` bytes of its own, in huge pages; a multiple of 8.

    To be called in turns with what is compared: the rate of a virtual machine can double from one minute to the next.
    """

    def __init__(self, nbytes: int) -> None:
        self._buffer = HugeBuffer(nbytes)
        limits.fill(self._buffer, 1)

    def __call__(self) -> float:
        """Bytes read per second now, in the fastest of one pass with each number of reads in flight."""
        passes = (partial(limits.read_pass, self._buffer, streams) for streams in limits.STREAMS)
        return self._buffer.nbytes / min(map(seconds, passes))


def read_rate(nbytes: int, repeats: int) -> float:
    """Bytes read per second."""
    probe = ReadProbe(nbytes)
    probe()
    return max(probe() for _ in range(repeats))


def gemm_rate(dtype: torch.dtype, sizes: tuple[int, ...], repeats: int) -> float:
    """Floating-point operations per second of a square product, a multiplication and an addition being two."""
    rates = []
    for size in sizes:
        a, b, out = (torch.ones(size, size, dtype=dtype) for _ in range(3))
        rates.append(2 * size**3 / best_s(partial(torch.matmul, a, b, out=out), repeats))
    return max(rates)


def best_s(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs, after one that does not count."""
    work()
    return min(seconds(work) for _ in range(repeats))


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
