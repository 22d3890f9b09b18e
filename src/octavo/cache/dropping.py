"""`context_policy="window"`: which positions a sequence has dropped, a function of the request alone.

After StreamingLLM (arXiv 2309.17453): the first `sinks` positions stay, the last `window` slide. When the length
exceeds both together, the oldest block after the sinks goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from octavo.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class DropRule:
    """`sinks` and `window` in positions. Raises `InvalidRequest` unless both are multiples of `block_size`."""

    sinks: int
    window: int
    block_size: int

    def __post_init__(self) -> None:
        for name, value, least in (("sinks", self.sinks, 0), ("window", self.window, self.block_size)):
            if value % self.block_size or value < least:
                works = max(least, -(-value // self.block_size) * self.block_size)
                raise InvalidRequest(
                    f"{name}={value} must be a multiple of block_size={self.block_size} and at least {least}; "
                    f"{name}={works} works",
                    param=name,
                )

    @property
    def kept(self) -> int:
        """Positions that a query sees at most, itself included; those before this one see everything."""
        return self.sinks + self.window

    def check(self, limit: int) -> None:
        """Raise `InvalidRequest` if a sequence of at most `limit` tokens cannot keep so many positions."""
        if self.kept <= limit:
            return
        room = limit // self.block_size * self.block_size
        if not room:
            field, works = "context_policy", "leave it out, or start with a smaller block_size"
        elif self.sinks < room:
            field, works = "window", f"window={room - self.sinks} works"
        else:
            window = min(self.window, room)
            field, works = "sinks", f"sinks={room - window} with window={window} works"
        raise InvalidRequest(
            f"sinks={self.sinks} + window={self.window} are {self.kept} positions, and a sequence holds at most "
            f"{limit}; {works}",
            param=field,
        )

    def dropped(self, position: int) -> int:
        """How many positions after the sinks the query at `position` no longer sees."""
        return -(min(0, self.kept - position - 1) // self.block_size) * self.block_size

    def dropped_by_row(self, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """`dropped` of every position."""
        over = np.maximum(0, positions + 1 - self.kept)
        return (-(-over // self.block_size) * self.block_size).astype(np.int32)

    def gone(self, position: int) -> range:
        """Indices of the blocks that the query at `position` and later ones no longer see."""
        first = self.sinks // self.block_size
        return range(first, first + self.dropped(position) // self.block_size)

    def kept_blocks(self, tokens: int) -> int:
        """The most blocks of a layer group that a sequence growing to `tokens` tokens one by one holds."""
        return min(-(-tokens // self.block_size), self.kept // self.block_size)

    def reach(self, position: int) -> int:
        """Where a chunk that starts at `position` ends at the latest if it is to need no more blocks than that."""
        return self.kept + self.dropped(position)
