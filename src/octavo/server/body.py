"""Bodies, read before anything else looks at them: bounded in size, time and memory, and JSON throughout.

What passes is JSON in UTF-8 whose every string is text and every number finite, nested no deeper than `MAX_DEPTH`, so
that no parser behind this one can fail on it. Each request may hold `FREE` bytes; what all hold beyond that comes
out of one budget, `max_bodies`, until their responses have ended.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import (
    BodyTimeout,
    BodyTooLarge,
    InvalidRequest,
    OctavoError,
    Overloaded,
    UnsupportedMediaType,
)
from octavo.server.config import ServerConfig
from octavo.server.problems import response_to

MAX_DEPTH = 100
FREE = 64 * 1024
_WITH_BODY = ("POST", "PUT", "PATCH")


class Bodies:
    """ASGI middleware that reads and checks bodies, and answers 400, 408, 413, 415 or 503 itself."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        self._app = app
        self._config = config
        self._held = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] not in _WITH_BODY:
            await self._app(scope, receive, send)
            return
        hold = _Hold(self)
        try:
            try:
                body = await self._read(scope, receive, hold)
            except _Disconnected:
                return
            except OctavoError as error:
                await response_to(scope, error)(scope, receive, send)
                return
            await self._app(scope, _Replay(body, receive), send)
        finally:
            hold.release()

    async def _read(self, scope: Scope, receive: Receive, hold: _Hold) -> bytes:
        """The body. Raises the error of a body that is refused."""
        headers = dict(scope["headers"])
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._config.max_body:
            raise self._too_large()
        timeout = self._config.body_timeout
        try:
            async with asyncio.timeout(timeout):
                body = await self._collect(receive, hold)
        except TimeoutError:
            raise BodyTimeout(f"the body was not complete after {timeout:g} s; send it faster") from None
        if body:
            media_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            if media_type != b"application/json":
                raise UnsupportedMediaType("a body needs the header `Content-Type: application/json`")
            self._check_messages(check_json(body))
        return body

    async def _collect(self, receive: Receive, hold: _Hold) -> bytes:
        chunks: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Disconnected
            chunk = message.get("body", b"")
            size += len(chunk)
            if size > self._config.max_body:
                raise self._too_large()
            hold.grow_to(size)
            chunks.append(chunk)
            if not message.get("more_body", False):
                return b"".join(chunks)

    def _check_messages(self, value: Any) -> None:
        """A conversation is counted before every message of it is looked at."""
        messages, most = value.get("messages") if isinstance(value, dict) else None, self._config.max_messages
        if isinstance(messages, list) and len(messages) > most:
            raise InvalidRequest(
                f"messages has {len(messages)} messages and may have {most}; leave {len(messages) - most} out, or "
                "start with a larger --max-messages",
                param="messages",
            )

    def _too_large(self) -> BodyTooLarge:
        return BodyTooLarge(
            f"the body is longer than {self._config.max_body} bytes; shorten it, or start with a larger --max-body"
        )

    def take(self, count: int) -> None:
        """Take `count` bytes out of the budget. Raises `Overloaded` where it has less."""
        if self._held + count > self._config.max_bodies:
            raise Overloaded(
                f"the bodies of other requests fill max_bodies={self._config.max_bodies}; try again later"
            )
        self._held += count

    def give(self, count: int) -> None:
        """Give `count` bytes back."""
        self._held -= count


class _Hold:
    """What one request holds of the budget."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies = bodies
        self._taken = 0

    def grow_to(self, size: int) -> None:
        more = size - FREE - self._taken
        if more > 0:
            self._bodies.take(more)
            self._taken += more

    def release(self) -> None:
        self._bodies.give(self._taken)
        self._taken = 0


class _Replay:
    """A body that was read, as the app receives it, and then what comes after it."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> Message:
        if self._body is None:
            return await self._receive()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Disconnected(Exception):
    pass


def check_json(body: bytes) -> Any:
    """The value of `body`. Raises `InvalidRequest` unless it is JSON that any parser can read."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not JSON: {error}") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = _inside(level)
        if not level:
            return value
    raise InvalidRequest(f"the body is nested deeper than {MAX_DEPTH} levels")


def _inside(values: list[Any]) -> list[Any]:
    """The lists and objects directly inside `values`, which are all of them lists and objects, or the whole body."""
    found: list[Any] = []
    for value in values:
        if isinstance(value, dict):
            found += [v for v in value.values() if isinstance(v, dict | list)]
        elif isinstance(value, list):
            found += [v for v in value if isinstance(v, dict | list)]
    return found
