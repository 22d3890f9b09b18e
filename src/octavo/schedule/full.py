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
    """How fast the queue moves, and who was told to come back when. `now` is the scheduler's clock."""

    def __init__(self) -> None:
        self._seconds = 0.0  # of those who had to wait, for every one before them, smoothed
        self._told = 0.0  # when the last of those who were refused comes back

    def left(self, waited_s: float, place: int) -> None:
        """One has left the queue who found `place` others in it."""
        if place:
            each = waited_s / place
            self._seconds = self._seconds + (each - self._seconds) / SMOOTH if self._seconds else each

    def full(self, now: float, waiting: int, max_waiting: int, oldest_s: float) -> FullQueue:
        """The queue, full, with `waiting` in it of whom the oldest has waited so long already."""
        interval_s = max(self._seconds, oldest_s / max(1, waiting))
        return FullQueue(waiting, max_waiting, max(0.0, self._told - now), interval_s)

    def told(self, now: float, seconds: float) -> None:
        """Some were refused, whose intervals are `seconds` in all."""
        self._told = now + (max(0.0, self._told - now) + seconds) % SPREAD_S
