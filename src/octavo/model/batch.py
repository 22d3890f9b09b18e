"""A step's rows as the kernels want them: made once per step, used by every layer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.cache.dropping import DropRule
from octavo.cache.layout import CacheLayout
from octavo.kernels.native import AttentionPlan, RowPlacement, make_plan


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one sequence: `token_ids` stand at positions `start`, `start + 1`, ...

    `tables[g]` holds the byte offsets of the sequence's blocks in layer group g, `drops` what it drops.
    """

    token_ids: Sequence[int]
    start: int
    tables: tuple[array[int], ...]
    drops: DropRule | None = None

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + len(self.token_ids)

    def cut(self, first: int, last: int) -> Piece:
        """Rows `first .. last - 1` of this piece."""
        return Piece(self.token_ids[first:last], self.start + first, self.tables, self.drops)


@dataclass(frozen=True)
class Batch:
    """All rows of a step. `placements[g]` and `plans[g]` are those of layer group g."""

    token_ids: Tensor
    positions: npt.NDArray[np.int32]
    placements: tuple[RowPlacement, ...]
    plans: tuple[AttentionPlan, ...]

    def __len__(self) -> int:
        return len(self.positions)


def make_batch(pieces: Sequence[Piece], layout: CacheLayout) -> Batch:
    """Lay out `pieces`, in order, and divide their attention."""
    positions = np.concatenate([np.arange(p.start, p.stop, dtype=np.int32) for p in pieces])
    dropped = _dropped(pieces, positions)
    token_ids = torch.tensor([t for p in pieces for t in p.token_ids], dtype=torch.long)
    placements, plans = [], []
    for g, group in enumerate(layout.groups):
        # Copies: a view would keep the sequence's own table from growing for as long as anybody holds it.
        tables = [np.array(p.tables[g], dtype=np.int64) for p in pieces]
        blocks = np.concatenate(
            [
                table[np.arange(p.start, p.stop) // layout.block_size]
                for p, table in zip(pieces, tables, strict=True)
            ]
        )
        placements.append(RowPlacement.of(blocks, positions, dropped))
        segments = np.empty((len(pieces), 6), dtype=np.int64)
        row = entry = 0
        for i, (piece, table) in enumerate(zip(pieces, tables, strict=True)):
            sinks = piece.drops.sinks if piece.drops else 0
            segments[i] = row, len(piece.token_ids), piece.start, entry, len(table), sinks
            row, entry = row + len(piece.token_ids), entry + len(table)
        plans.append(
            make_plan(
                segments, np.concatenate(tables), dropped, layout.block_size, group.window, group.num_kv_heads
            )
        )
    return Batch(token_ids, positions, tuple(placements), tuple(plans))


def _dropped(pieces: Sequence[Piece], positions: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Per row, the positions after the sinks that it no longer sees."""
    dropped = np.zeros(len(positions), dtype=np.int32)
    row = 0
    for piece in pieces:
        rows = slice(row, row + len(piece.token_ids))
        if piece.drops is not None:
            dropped[rows] = piece.drops.dropped_by_row(positions[rows])
        row = rows.stop
    return dropped
