"""The start-up probe: does a row of this model, on this machine, get the same bits in any company?

It is asked of the loaded model itself, fused or not: one sequence computed whole, token by token, in odd chunks,
behind other rows, and on one and all threads. An unfused model computes its rows in tiles of one fixed size, smaller
ones until it holds; if even single rows differ, the model runs and says `exact: false`.
"""

from __future__ import annotations

import platform
from array import array
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from octavo.cache.layout import CacheLayout
from octavo.kept import Kept
from octavo.kernels import native
from octavo.model.batch import Piece

# What an unfused model tries. "Any number of rows" is not among them: torch's elementwise operations may round a vector
# and its tail differently for few of all values, so a probe can miss it, and did.
TILES = (16, 1)
_LENGTH = 45
_CHUNKS = ((45,), (1,) * 45, (2, 3, 5, 7, 4, 6, 1, 17), (16, 16, 13), (33, 11, 1))
_COMPANY = (0, 1, 19)


class Computes(Protocol):
    """What a fused and an unfused model have in common."""

    def attach(self, arena: int, layout: CacheLayout) -> None:
        """Use the cache at address `arena`, whose blocks lie as in `layout`."""

    def forward(self, pieces: list[Piece], rows: list[int]) -> Tensor:
        """Logits of the given rows."""


@dataclass(frozen=True)
class Verdict:
    """What the probe found: the rows per tile (None: any number), and whether answers are exact."""

    tile: int | None
    exact: bool


def probe(
    model: Computes, layout: CacheLayout, vocab_size: int, max_rows: int, max_len: int | None = None
) -> bool:
    """Whether every way of computing one sequence gives the same bits, up to steps of `max_rows` rows.

    No sequence is longer than `max_len`, the positions the model has. Uses a small cache of its own.
    """
    blocks = -(-max(_LENGTH, max_rows - _LENGTH) // layout.block_size)
    sizes = [layout.block_bytes(g) for g in range(len(layout.groups))]
    arena = native.HugeBuffer(2 * blocks * sum(sizes))
    model.attach(arena.address, layout)
    tables: list[tuple[array[int], ...]] = []
    offset = 0
    for _ in range(2):
        groups = []
        for size in sizes:
            groups.append(array("q", [offset + i * size for i in range(blocks)]))
            offset += blocks * size
        tables.append(tuple(groups))
    generator = torch.Generator().manual_seed(0)
    length = max(_LENGTH, max_rows)
    ids = torch.randint(vocab_size, (2, length), generator=generator)[:, :max_len].tolist()
    threads = native.num_threads()
    whole: Tensor | None = None
    try:
        for count in sorted({threads, 1}, reverse=True):
            native.set_num_threads(count)
            for answer in _answers(model, ids, tables, max_rows):
                if whole is None:
                    whole = answer
                elif not torch.equal(answer, whole):
                    return False
    finally:
        native.set_num_threads(threads)
    return True


def _answers(
    model: Computes, ids: list[list[int]], tables: list[tuple[array[int], ...]], max_rows: int
) -> Iterator[Tensor]:
    for company, chunks in [*product(_COMPANY, _CHUNKS), (max_rows - _LENGTH, _CHUNKS[0])]:
        if not 0 <= company < max_rows:
            continue
        parts, start = [], 0
        for size in _cut(chunks, min(max_rows - company, len(ids[0]))):
            size = min(size, len(ids[0]) - start)
            if not size:
                break
            others = range(0, company, len(ids[1]))
            pieces = [Piece(ids[1][: company - first], 0, tables[1]) for first in others]
            pieces.append(Piece(ids[0][start : start + size], start, tables[0]))
            parts.append(model.forward(pieces, list(range(company, company + size))))
            start += size
        yield torch.cat(parts)


def _cut(chunks: tuple[int, ...], most: int) -> list[int]:
    """`chunks` with every one above `most` in parts: a narrow engine is asked about every width it has."""
    return [min(most, size - first) for size in chunks for first in range(0, size, most)]


class VerdictStore:
    """Verdicts kept per machine, model and way of running it, so that a start pays for the probe once."""

    def __init__(
        self, home: Path, digest: str, dtype: torch.dtype, block_size: int, max_rows: int, fused: bool
    ) -> None:
        facts = [
            digest,
            str(dtype),
            block_size,
            max_rows,
            fused,
            native.path(),
            native.num_threads(),
            torch.__version__,
        ]
        facts += [platform.machine(), _cpu_model(), TILES, _CHUNKS, _COMPANY, native.module_digest()]
        self._kept = Kept(home, "probe", facts)

    def load(self) -> Verdict | None:
        """The verdict, if it is known."""
        try:
            return Verdict(**self._kept.load())
        except TypeError:
            return None

    def save(self, verdict: Verdict) -> None:
        """Keep `verdict`; not being able to is no error."""
        self._kept.save(asdict(verdict))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("model name")), "")
