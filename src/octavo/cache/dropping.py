"""`context_policy="window"`: which positions a sequence has dropped, a function of the request alone.

After StreamingLLM (arXiv 2309.17453): the first `sinks` positions stay, the last `window` slide. When the length
exceeds both together, the oldest block after the sinks goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class DropRule:
    """`sinks` and `window` in positions, both multiples of `block_size`."""

    sinks: int
    window: int
    block_size: int

    def dropped(self, position: int) -> int:
        """How many positions after the sinks the query at `position` no longer sees."""
        return -(min(0, self.sinks + self.window - position - 1) // self.block_size) * self.block_size

    def dropped_by_row(self, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """`dropped` of every position."""
        over = np.maximum(0, positions + 1 - self.sinks - self.window)
        return (-(-over // self.block_size) * self.block_size).astype(np.int32)

    def kept_blocks(self, tokens: int) -> int:
        """The most blocks of a layer group that a sequence growing to `tokens` tokens one by one holds."""
        most = (self.sinks + self.window) // self.block_size
        return min(-(-tokens // self.block_size), most)
