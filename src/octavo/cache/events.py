"""What happened to blocks and requests, in order, for those who watch."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from octavo.cache.blocks import Owner

CAPACITY = 65_536


class Event(NamedTuple):
    """`kind` is stored, folded, reclaimed, preempted, resumed, pinned or pin_refused.

    `time` is the engine's clock in seconds. `owner` is that of the block or of the request. Block events carry
    `group`, `digest` and the block's `tokens` (a count), request events `request_id` and the `choice` index; pins carry
    both counts of tokens and the request.
    """

    time: float
    kind: str
    reason: str
    request_id: str | None = None
    choice: int = 0
    group: int = 0
    digest: bytes = b""
    tokens: int = 0
    owner: Owner | None = None


class EventLog:
    """The last `capacity` events. Older ones are for nobody: who watches drains it in time."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._events: deque[Event] = deque(maxlen=capacity)

    def add(self, event: Event) -> None:
        self._events.append(event)

    def drain(self) -> list[Event]:
        """All events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events
