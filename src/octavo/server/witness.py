"""What the dashboard wants to know of requests that come and go between two looks at the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from octavo.live import LiveRequest
from octavo.server.moment import Json, request_now, unix
from octavo.watch import Observer

ENDED = 12


class Witness(Observer):
    """Sums of latencies, and the last requests that ended. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self.first_tokens = 0
        self.first_token_seconds = 0.0
        self.gaps = 0
        self.gap_seconds = 0.0
        self._ended: deque[Json] = deque(maxlen=ENDED)

    def first_token(self, live: LiveRequest) -> None:
        """See `Observer`."""
        if live.first_token is not None:
            self.first_tokens += 1
            self.first_token_seconds += live.first_token - live.arrived

    def token_gaps(self, seconds: Sequence[float]) -> None:
        """See `Observer`."""
        self.gaps += len(seconds)
        self.gap_seconds += sum(seconds)

    def ended(self, live: LiveRequest, reason: str) -> None:
        """See `Observer`."""
        ended_at = unix(live.arrived if live.ended is None else live.ended)
        self._ended.append({**request_now(live.request), "reason": reason, "ended_at": ended_at})

    def take_ended(self) -> list[Json]:
        """The last requests that ended since this was asked before, oldest first."""
        ended = list(self._ended)
        self._ended.clear()
        return ended
