"""Where commands print their tables: on a terminal as wide as it is, elsewhere as wide as they need."""

from __future__ import annotations

from typing import Any

from rich.console import Console, ConsoleDimensions
from rich.measure import Measurement
from rich.table import Table

UNBOUNDED = 10_000
"""Columns of an output that no one looks at through a window: a pipe or a file."""


class TableConsole(Console):
    """A console that never cuts a cell or breaks a word of it: headers and cells wrap between words, and a table that
    is still wider than the terminal is printed as wide as it is.

    Raises `BrokenPipeError` once the reader has left, where rich would end the process.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, **options)
        self._room = self.width if self.is_terminal else UNBOUNDED
        self.size = ConsoleDimensions(
            UNBOUNDED, self.height
        )  # the width alone is not heeded on a dumb terminal

    def print(self, *objects: Any, **options: Any) -> None:
        """As rich's: a table in whole words, anything else wrapped where the terminal ends."""
        for table in objects:
            if isinstance(table, Table):
                _fit(table, self, self._room)
                options["width"] = UNBOUNDED
        super().print(*objects, **{"width": self._room, **options})

    def on_broken_pipe(self) -> None:
        """Leaves it to the command line how to end."""
        raise BrokenPipeError


def _fit(table: Table, console: Console, room: int) -> None:
    """Narrows the columns of `table` to `room`, none below its longest word."""
    sizes = []
    for column in table.columns:
        cells = [Measurement.get(console, console.options, cell) for cell in (column.header, *column.cells)]
        most = max(cell.maximum for cell in cells)
        sizes.append((most if column.no_wrap else max(cell.minimum for cell in cells), most))
    lines = Measurement.get(console, console.options, table).maximum - sum(most for _, most in sizes)
    spare = room - lines - sum(least for least, _ in sizes)
    if spare >= sum(most - least for least, most in sizes):
        return
    by_need = sorted(zip(table.columns, sizes, strict=True), key=lambda entry: entry[1][1] - entry[1][0])
    for left, (column, (least, most)) in zip(range(len(by_need), 0, -1), by_need, strict=True):
        more = min(most - least, max(0, spare) // left)
        column.width = least + more
        spare -= more
