"""A step's rows as the kernels want them: made once per step, used by every layer."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from octavo.cache.blocks import Lease
from octavo.cache.dropping import DropRule
from octavo.cache.formats import FIRST_STORED
from octavo.cache.layout import CacheLayout
from octavo.kernels.native import AttentionPlan, RowPlacement, make_plan


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one sequence: `token_ids` stand at positions `start`, `start + 1`, ...

    `tables[g]` holds the entries of the sequence's blocks in layer group g, `drops` what it drops. Where blocks are
    sealed in a smaller form, `own[g]` holds the entries of those its rows stand in as they are filled, from block
    `own_first` on; None where they are the same.
    """

    token_ids: Sequence[int]
    start: int
    tables: tuple[array[int], ...]
    drops: DropRule | None = None
    own: tuple[array[int], ...] | None = None
    own_first: int = 0

    @classmethod
    def of(cls, lease: Lease, token_ids: Sequence[int], start: int, layout: CacheLayout) -> Piece:
        """`token_ids` from position `start` on, of the sequence whose blocks `lease` holds."""
        own, first = None, start // layout.block_size
        if layout.is_stored:
            own = tuple(table.own(first, len(table)) for table in lease.tables)
        return cls(token_ids, start, tuple(t.entries for t in lease.tables), lease.drops, own, first)

    @property
    def stop(self) -> int:
        """One past the last position."""
        return self.start + len(self.token_ids)

    def cut(self, first: int, last: int) -> Piece:
        """Rows `first .. last - 1` of this piece."""
        return replace(self, token_ids=self.token_ids[first:last], start=self.start + first)

    def standing(self, g: int, block_size: int) -> npt.NDArray[np.int64]:
        """Entries of the blocks its rows stand in, in group `g`, as they are filled."""
        first, last = self.start // block_size, (self.stop - 1) // block_size + 1
        if self.own is None:
            return np.array(self.tables[g][first:last], dtype=np.int64)
        return np.array(self.own[g][first - self.own_first : last - self.own_first], dtype=np.int64)


@dataclass(frozen=True)
class Batch:
    """All rows of a step. `placements[g]`, `plans[g]` and `seals[g]` (what `native.seal` takes) are those of layer
    group g."""

    token_ids: Tensor
    positions: npt.NDArray[np.int32]
    placements: tuple[RowPlacement, ...]
    plans: tuple[AttentionPlan, ...]
    seals: tuple[npt.NDArray[np.int64], ...]

    def __len__(self) -> int:
        return len(self.positions)


def make_batch(pieces: Sequence[Piece], layout: CacheLayout) -> Batch:
    """Lay out `pieces`, in order, and divide their attention."""
    positions = np.concatenate([np.arange(p.start, p.stop, dtype=np.int32) for p in pieces])
    dropped = _dropped(pieces, positions)
    token_ids = torch.tensor([t for p in pieces for t in p.token_ids], dtype=torch.long)
    placements, plans, seals = [], [], []
    for g, group in enumerate(layout.groups):
        # Copies: a view would keep the sequence's own table from growing for as long as anybody holds it.
        tables = [np.array(p.tables[g], dtype=np.int64) for p in pieces]
        standing = [p.standing(g, layout.block_size) for p in pieces]
        blocks = np.concatenate(
            [
                own[np.arange(p.start, p.stop) // layout.block_size - p.start // layout.block_size]
                for p, own in zip(pieces, standing, strict=True)
            ]
        )
        placements.append(RowPlacement.of(blocks, positions, dropped))
        entries = np.concatenate(tables)
        stored = layout.is_stored or bool(layout.ladder and (entries >= FIRST_STORED).any())
        segments = np.empty((len(pieces), 6), dtype=np.int64)
        row = entry = 0
        for i, (piece, table) in enumerate(zip(pieces, tables, strict=True)):
            sinks = piece.drops.sinks if piece.drops else 0
            segments[i] = row, len(piece.token_ids), piece.start, entry, len(table), sinks
            row, entry = row + len(piece.token_ids), entry + len(table)
        plans.append(
            make_plan(
                segments,
                entries,
                dropped,
                layout.block_size,
                group.window,
                group.num_kv_heads,
                *([np.concatenate(standing)] if stored else []),
            )
        )
        seals.append(_seals(pieces, tables, standing, layout.block_size))
    return Batch(token_ids, positions, tuple(placements), tuple(plans), tuple(seals))


def _seals(
    pieces: Sequence[Piece],
    tables: Sequence[npt.NDArray[np.int64]],
    standing: Sequence[npt.NDArray[np.int64]],
    block_size: int,
) -> npt.NDArray[np.int64]:
    """`[blocks, 2]`: the blocks that are full after these rows, and where they are read from then on, if elsewhere."""
    pairs = [np.empty((0, 2), dtype=np.int64)]
    for piece, table, own in zip(pieces, tables, standing, strict=True):
        first = piece.start // block_size
        full = piece.stop // block_size - first
        pairs.append(np.stack([own[:full], table[first : first + full]], axis=1))
    both = np.concatenate(pairs)
    return np.ascontiguousarray(both[both[:, 0] != both[:, 1]])


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
