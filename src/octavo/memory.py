"""Real memory: the arena's buffer, and how much the machine has left."""

from __future__ import annotations

from pathlib import Path

from octavo.kernels import _native
from octavo.kernels.native import HugeBuffer

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


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


def available_bytes() -> int:
    """Bytes this process can still take: free RAM, or what the cgroup's limit leaves if that is less."""
    free = _meminfo("MemAvailable")
    for limit_file, usage_file in _CGROUPS:
        try:
            limit, usage = limit_file.read_text().strip(), usage_file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            free = min(free, max(0, int(limit) - int(usage)))
    return free


def _meminfo(field: str) -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/meminfo has no {field}")
