"""Reading memory as fast as this machine can: what the benchmarks hold the kernels against."""

from __future__ import annotations

from octavo.kernels import _native
from octavo.kernels.native import HugeBuffer

STREAMS = (1, 2, 4)
"""Runs that a thread can read side by side; which is fastest depends on the machine."""


def read_pass(buffer: HugeBuffer, streams: int) -> int:
    """Read every byte of `buffer` once, on all threads; returns the sum of its 64-bit words, modulo 2^64.

    `streams` is one of `STREAMS`. `buffer.nbytes` is a multiple of 8.
    """
    return _native.read_pass(buffer.address, buffer.nbytes, streams)


def fill(buffer: HugeBuffer, byte: int) -> None:
    """Set every byte, so that every page exists."""
    _native.fill(buffer.address, byte, buffer.nbytes)
