"""A full queue: what those are told who are refused.

If all came back at the same time, most would be refused again, and the queue would run dry until the next time. So
they are told to come one after the other, as fast as the queue moves.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.errors import Overloaded

SOONEST_S = 1.0
SPREAD_S = 60.0
SMOOTH = 8


@dataclass(frozen=True)
class FullQueue:
    """A queue that had no room for one more. In it one goes every `interval_s` seconds; those refused before come back
    within `told_s` seconds."""

    waiting: int
    max_waiting: int
    told_s: float
    interval_s: float

    def refusal(self, number: int = 0) -> Overloaded:
        """For the next that it refuses, or the one `number` later."""
        message = f"{self.waiting} requests wait and max_waiting={self.max_waiting}; try again later"
        later = (self.told_s + number * self.interval_s) % SPREAD_S
        return Overloaded(message, retry_after_s=SOONEST_S + later)


class Pace:
    """How fast the queue moves: of those who had to wait, the seconds each for every one before it, smoothed."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def left(self, waited_s: float, place: int) -> None:
        """One has left the queue who found `place` others in it."""
        if place:
            each = waited_s / place
            self._seconds = self._seconds + (each - self._seconds) / SMOOTH if self._seconds else each

    def interval_s(self, oldest_s: float, waiting: int) -> float:
        """Seconds from one who leaves it to the next, where the oldest of `waiting` has waited so long already."""
        return max(self._seconds, oldest_s / max(1, waiting))
