"""What the commands print besides answers: notices, receipts and errors. Answers go to stdout, these to stderr."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.outputs import RequestOutput


def notice(text: str) -> None:
    """One line for people."""
    print(text, file=sys.stderr, flush=True)


class NoticeHandler(logging.Handler):
    """Log records as notices."""

    def emit(self, record: logging.LogRecord) -> None:
        notice(self.format(record))


def show_log() -> None:
    """What the engine logs is shown as notices from now on."""
    logger = logging.getLogger("octavo")
    logger.setLevel(logging.INFO)
    if not any(isinstance(handler, NoticeHandler) for handler in logger.handlers):
        logger.addHandler(NoticeHandler())


def finish_reason(output: RequestOutput) -> str:
    """Why the first answer ended; one that never began was aborted."""
    return (output.outputs[0].finish_reason if output.outputs else None) or "abort"


def receipt_rows(output: RequestOutput) -> list[tuple[str, str]]:
    """Name and value of all that the receipt has something to say about."""
    assert output.receipt is not None
    account = {**output.receipt.to_dict(), "finish_reason": finish_reason(output)}
    return [(name, _text(value)) for name, value in account.items() if value not in (None, {}, [])]


def show_receipt(output: RequestOutput) -> None:
    """The receipt on stderr: a panel on a terminal, else lines of `name: value`."""
    rows = receipt_rows(output)
    if not sys.stderr.isatty():
        for name, value in rows:
            notice(f"{name}: {value}")
        return
    from rich.console import Console
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), Text(value))
    Console(stderr=True).print(Panel(table, title="receipt", expand=False, border_style="dim"))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_text(inner)}" for key, inner in value.items())
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
