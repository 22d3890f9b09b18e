"""What loading leaves behind: memory that is free but still counted as the process's own."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Return freed heap memory to the system; does nothing where the C library cannot (only glibc can)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
