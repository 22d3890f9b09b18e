"""One line per request: who asked what, what came of it, what the cache did. No prompts, unless asked for.

`Watch` stands around everything else. It names the request, notes what becomes of it in an `Entry`, and answers for
bugs. The route that answers adds to the entry of its own request by `note`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.outputs import RequestOutput
from octavo.server.backlog import Backlog
from octavo.server.problems import internal, response_to

if TYPE_CHECKING:
    from octavo.server.state import ServerState

logger = logging.getLogger("octavo.server")

LOGGERS = ("octavo", "uvicorn")

_SANE = re.compile(rb"[A-Za-z0-9._:-]{1,64}")
_RECEIPT = ("reused_tokens", "computed_tokens", "recomputed_tokens", "preemptions", "miss", "exact")


@dataclass
class Entry:
    """What is known of one HTTP request: how many requests of the engine have `begun` for it, and their `outputs`."""

    request_id: str = ""
    begun: int = 0
    label: str | None = None
    user: str | None = None
    aborted: str | None = None
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether the engine has finished all that began."""
        return 0 < self.begun == sum(output.finished for output in self.outputs.values())


_entry: ContextVar[Entry] = ContextVar("entry")


def begin(label: str | None = None) -> None:
    """The request that is being answered is handed to the engine, under this label."""
    entry = _entry.get(None)
    if entry is not None:
        entry.begun, entry.label = entry.begun + 1, label


def note(output: RequestOutput) -> None:
    """`output` is what there is so far for the request that is being answered."""
    entry = _entry.get(None)
    if entry is not None:
        entry.outputs[output.request_id] = output


def note_user(user: str | None) -> None:
    """For whom, as the client says, the request that is being answered was sent."""
    entry = _entry.get(None)
    if entry is not None:
        entry.user = user


def note_aborted(reason: str) -> None:
    """The request that is being answered was given up: `disconnect`, `slow_client` ..."""
    entry = _entry.get(None)
    if entry is not None and entry.aborted is None:
        entry.aborted = reason


class Watch:
    """ASGI middleware: ids, the log, the counts of HTTP requests, and 500 for what nobody foresaw."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._ids: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        entry = Entry(self._name(scope))
        scope.setdefault("state", {})["request_id"] = entry.request_id
        self._ids.add(entry.request_id)
        _entry.set(entry)
        sender = _Sender(send, entry.request_id)
        start = time.monotonic()
        try:
            await self._app(scope, receive, sender)
        except asyncio.CancelledError:
            note_aborted("shutdown")
            raise
        except Exception:
            logger.exception("request %s has failed", entry.request_id)
            if sender.status is None:
                await response_to(scope, internal())(scope, receive, sender)
            else:
                note_aborted("error")
                raise
        finally:
            self._ids.discard(entry.request_id)
            self._ended(scope, entry, sender, time.monotonic() - start)

    def _name(self, scope: Scope) -> str:
        """The client's `x-request-id` where it is sane and of no other request now."""
        given: bytes = dict(scope["headers"]).get(b"x-request-id", b"")
        fresh = uuid.uuid4().hex
        if not _SANE.fullmatch(given):
            return fresh
        name = given.decode()
        return f"{name}-{fresh[:8]}" if name in self._ids else name

    def _ended(self, scope: Scope, entry: Entry, sender: _Sender, seconds: float) -> None:
        if not sender.complete:
            entry.aborted = entry.aborted or "disconnect"
        if entry.aborted == "disconnect" and entry.answered:
            # Many a client closes when it has read the last event, before the response's own end.
            entry.aborted = None
        status = 499 if entry.aborted == "disconnect" or sender.status is None else sender.status
        route = getattr(scope.get("route"), "path", "other")
        self._state.metrics.answered(route, scope["method"], status, seconds)
        if entry.aborted is not None and entry.begun:
            self._state.metrics.aborted(entry.aborted)
        level = logging.DEBUG if route in ("/health", "/metrics") else logging.INFO
        if logger.isEnabledFor(level):
            fields = self._fields(scope, entry, status, seconds)
            logger.log(level, "%s", _line(fields), extra={"fields": fields})

    def _fields(self, scope: Scope, entry: Entry, status: int, seconds: float) -> dict[str, Any]:
        caller = scope["state"].get("caller")
        fields: dict[str, Any] = {
            "request_id": entry.request_id,
            "tenant": caller.name if caller is not None else None,
            "label": entry.label,
            "user": entry.user,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "aborted": entry.aborted,
            "ms": round(seconds * 1000, 1),
        }
        receipts = [o.receipt.to_dict() for o in entry.outputs.values() if o.receipt is not None]
        if receipts:
            for name in ("prompt_tokens", "completion_tokens"):
                fields[name] = sum(receipt[name] for receipt in receipts)
            fields["receipts"] = [{name: receipt[name] for name in _RECEIPT} for receipt in receipts]
        if self._state.config.log_prompts:
            fields["texts"] = [self._texts(output) for output in entry.outputs.values()]
        return {name: value for name, value in fields.items() if value is not None and value != ""}

    def _texts(self, output: RequestOutput) -> dict[str, Any]:
        prompt = output.prompt
        if prompt is None and self._state.tokenizer.hf is not None:
            prompt = self._state.tokenizer.decode(output.prompt_token_ids, skip_special_tokens=False)
        return {"prompt": prompt, "answers": [answer.text for answer in output.outputs]}


class _Sender:
    """`send`, with the request's id in the headers, and a memory of how far the response got."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send = send
        self._id = request_id.encode()
        self.status: int | None = None
        self.complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            # The second is Anthropic's name for it.
            names = [(b"x-request-id", self._id), (b"request-id", self._id)]
            message = {**message, "headers": [*message.get("headers", []), *names]}
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.complete = True


def _line(fields: dict[str, Any]) -> str:
    """For people: `POST /v1/completions 200 12.3 ms tenant=...`."""
    path = json.dumps(fields["path"], ensure_ascii=False)[1:-1]  # a line stays one line
    head = f"{fields['method']} {path} {fields['status']} {fields['ms']} ms"
    rest = {name: value for name, value in fields.items() if name not in ("method", "path", "status", "ms")}
    return " ".join(
        [head, *(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in rest.items())]
    )


class JsonFormatter(logging.Formatter):
    """A log record as one JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
        }
        fields = getattr(record, "fields", None)
        line |= {"message": record.getMessage()} if fields is None else fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class LineWriter(logging.Handler):
    """Writes records to the file descriptor `file`, a line each, in a thread of its own, which counts what is lost."""

    CAPACITY = 10_000

    def __init__(self, file: int) -> None:
        super().__init__()
        self._file = file
        self._lines: Backlog[str] = Backlog("octavo-log", self.CAPACITY, self._write)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue the record."""
        self._lines.put(self.format(record))

    def close(self) -> None:
        """Write what waits, for at most a second, and take no more. Idempotent."""
        for name in LOGGERS:
            logging.getLogger(name).removeHandler(self)
        self._lines.close(0.5)
        super().close()

    def _write(self, line: str, dropped: int) -> None:
        if dropped:
            text = f"{dropped} lines of the log could not be written"
            line += "\n" + self.format(logging.LogRecord("octavo", logging.WARNING, "", 0, text, None, None))
        with contextlib.suppress(OSError):  # closed, or a full disk
            os.write(self._file, (line + "\n").encode(errors="replace"))


def log_to_stderr(as_json: bool) -> LineWriter:
    """Everything that Octavo and the HTTP server log goes to stderr from now on, until the writer is closed."""
    writer = LineWriter(2)  # not `sys.stderr`, whose lock would be held while a write waits
    writer.setFormatter(
        JsonFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    for name in LOGGERS:
        logging.getLogger(name).handlers[:] = [writer]
    logging.getLogger("octavo").setLevel(logging.INFO)
    return writer
