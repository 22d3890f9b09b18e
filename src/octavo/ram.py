"""How much memory this machine lets the process have: the RAM, or the limit of its cgroup if that is less."""

from __future__ import annotations

from pathlib import Path

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),
)


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


def total_bytes() -> int:
    """All RAM, or the cgroup's limit if that is less."""
    total = _meminfo("MemTotal")
    for limit_file, _ in _CGROUPS:
        try:
            limit = limit_file.read_text().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total


def resident_bytes() -> int:
    """What this process holds in memory now (VmRSS)."""
    return _field(Path("/proc/self/status"), "VmRSS")


def _meminfo(field: str) -> int:
    return _field(Path("/proc/meminfo"), field)


def _field(file: Path, field: str) -> int:
    for line in file.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"{file} has no {field}")
