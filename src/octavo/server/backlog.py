"""What is written in a thread of its own, so that a slow disk or a pipe that nobody reads stops nobody."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import Full, Queue
from typing import Generic, TypeVar

T = TypeVar("T")


class Backlog(Generic[T]):
    """Calls `write(item, dropped)` for one item after the other, in the thread `name`.

    At most `capacity` items wait; what comes after them is dropped, and counted in the next call.
    """

    def __init__(self, name: str, capacity: int, write: Callable[[T, int], None]) -> None:
        self._write = write
        self._items: Queue[T | None] = Queue(capacity)
        self._lock = threading.Lock()
        self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, item: T) -> None:
        """From any thread; never waits."""
        try:
            self._items.put_nowait(item)
        except Full:
            with self._lock:
                self._dropped += 1

    def close(self, patience: float) -> bool:
        """Write what waits, for about `patience` seconds. Whether all was written. Idempotent."""
        with contextlib.suppress(Full):
            self._items.put(None, timeout=patience)
        self._thread.join(patience)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            with self._lock:
                dropped, self._dropped = self._dropped, 0
            self._write(item, dropped)
