"""Server-sent events, and clients that leave or do not read.

A client that hangs up cancels the work that is done for it. A client that reads nothing blocks only its own `send`;
the engine's snapshots are merged meanwhile, so what is held for it does not grow, and after a while it is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.errors import OctavoError, RequestCancelled
from octavo.server.logs import note_aborted
from octavo.server.problems import internal

logger = logging.getLogger("octavo")

T = TypeVar("T")

Failed = Callable[[OctavoError], bytes]
"""Makes the event that tells a client of an error after its stream has begun."""


class ClientGone(RequestCancelled):
    """The client hung up; nobody reads what is answered."""


def event(data: bytes, name: str | None = None) -> bytes:
    """One event. `data` is JSON without line breaks."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + data + b"\n\n"


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """What `work` gives or raises; it is cancelled, and `ClientGone` raised, once the client has hung up.

    The request's body must have been read.
    """
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            note_aborted("disconnect")
            raise ClientGone("the client has hung up")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def stream(
    request: Request,
    events: AsyncGenerator[bytes, None],
    *,
    failed: Failed,
    send_timeout: float,
    dropped: Callable[[str], None] = note_aborted,
) -> Response:
    """A response that sends `events`, each of them one or several whole events.

    The first is awaited here, so that an error before it has an HTTP status of its own; a later one ends the stream
    with the event that `failed` makes. `dropped` is told `slow_client` when a client left what it was sent unread for
    `send_timeout` seconds. Raises `ClientGone`.
    """
    first = await unless_gone(request.receive, anext(events))
    return _EventStream(first, events, failed, send_timeout, dropped)


class _EventStream(Response):
    media_type = "text/event-stream"

    def __init__(
        self,
        first: bytes,
        events: AsyncGenerator[bytes, None],
        failed: Failed,
        send_timeout: float,
        dropped: Callable[[str], None],
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._events = events
        self._failed = failed
        self._send_timeout = send_timeout
        self._dropped = dropped
        self._sending_since: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await unless_gone(receive, self._send_in_time(send))
            except ClientGone:
                return
            except TimeoutError:
                self._dropped("slow_client")
                # Closing would wait for the client to read what is still buffered.
                scope.get("extensions", {}).get("octavo.abort", lambda: None)()

    async def _send_in_time(self, send: Send) -> None:
        """Send all, or raise `TimeoutError`. One look now and then is cheaper than a timeout around every message."""
        sender = asyncio.ensure_future(self._send_all(send))
        try:
            while not sender.done():
                await asyncio.wait({sender}, timeout=self._send_timeout / 4)
                if self._sending_since is not None and _now() - self._sending_since > self._send_timeout:
                    raise TimeoutError
            sender.result()
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def _send_all(self, send: Send) -> None:
        async def put(kind: str, **rest: object) -> None:
            self._sending_since = _now()
            await send({"type": f"http.response.{kind}", **rest})
            self._sending_since = None

        await put("start", status=200, headers=self.raw_headers)
        await put("body", body=self._first, more_body=True)
        async for data in self._guarded():
            await put("body", body=data, more_body=True)
        await put("body", body=b"", more_body=False)

    async def _guarded(self) -> AsyncGenerator[bytes, None]:
        """The events, and at the end the error that ended them."""
        try:
            async for data in self._events:
                yield data
        except OctavoError as error:
            note_aborted("error")
            yield self._failed(error)
        except Exception:
            note_aborted("error")
            logger.exception("a stream has failed")
            yield self._failed(internal())


def _now() -> float:
    return asyncio.get_running_loop().time()
