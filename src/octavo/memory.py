"""Real memory: the arena's buffer."""

from __future__ import annotations

from octavo.kernels import _native
from octavo.kernels.native import HugeBuffer


class ArenaMemory:
    """The bytes behind `cache.arena`: a huge-page buffer that starts at `address`."""

    def __init__(self, nbytes: int) -> None:
        self._buffer = HugeBuffer(nbytes)
        self.address = self._buffer.address

    def move(self, src: int, dst: int, nbytes: int) -> None:
        """Move `nbytes`; the ranges may overlap."""
        _native.move(self.address + dst, self.address + src, nbytes)

    copy = move

    def poison(self, offset: int, nbytes: int) -> None:
        """Fill with bytes that are a NaN in every float type."""
        _native.fill(self.address + offset, 0xFF, nbytes)
