"""Tables of the command line: no number is ever cut."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from octavo.console import TableConsole

NUMBERS = ["1,327,184", "223.5 MiB", "17–36 ms, bandwidth"]


def printed(width: int | None, *, no_wrap: bool = False) -> list[str]:
    table = Table()
    table.add_column("", no_wrap=no_wrap)
    for name in ("the longest request", "reserved", "a step takes"):
        table.add_column(name, justify="right")
    table.add_row("blocks of 16", *NUMBERS)
    out = io.StringIO()
    console = TableConsole(file=out, force_terminal=width is not None, width=width, color_system=None)
    console.print(table)
    console.print("a " * 60)
    return out.getvalue().splitlines()


@pytest.mark.parametrize("no_wrap", [False, True])
@pytest.mark.parametrize("width", [1, 20, 50, 60, 66, 70, 80, 200])
def test_every_word_is_whole_at_every_width(width: int, no_wrap: bool) -> None:
    lines = printed(width, no_wrap=no_wrap)
    text = "\n".join(lines)
    assert "…" not in text
    for word in " ".join(["blocks of 16 the longest request reserved a step takes", *NUMBERS]).split():
        assert word in text
    if no_wrap:
        assert "blocks of 16" in text
    least = 51 if no_wrap else 45
    assert max(map(len, lines)) <= max(width, least)


def test_a_dumb_terminal_is_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert printed(20) == printed(80)
    assert max(map(len, printed(20))) == 80


def test_a_file_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = printed(None)
    assert len(lines) == 6
    assert all(number in lines[3] for number in NUMBERS)
    assert lines[5].count("a") == 60
