"""`python -m octavo.cli.reference > docs/cli.md`: the help of every command, as a page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import typer

from octavo.cli import app


def reference() -> str:
    """The page."""
    pages = "\n".join(f"## {name}\n\n```text\n{text}\n```\n" for name, text in _helps("octavo", app))
    return f"# Command line\n\nMade by `python -m octavo.cli.reference > docs/cli.md`.\n\n{pages}"


def _helps(name: str, group: typer.Typer) -> Iterator[tuple[str, str]]:
    def walk(name: str, command: Any, parent: Any) -> Iterator[tuple[str, str]]:
        context = typer.Context(command, parent=parent, info_name=name, terminal_width=100)
        yield context.command_path, command.get_help(context).strip()
        for below, child in getattr(command, "commands", {}).items():
            yield from walk(below, child, context)

    return walk(name, typer.main.get_command(group), None)


if __name__ == "__main__":
    print(reference(), end="")
