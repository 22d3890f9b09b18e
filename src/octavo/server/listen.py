"""The HTTP server itself: uvicorn, with bounds on what it leaves open.

A connection that takes longer than `body_timeout` for its headers is closed, and so is one whose headers are longer
than `MAX_HEAD`, or that goes on sending a body that was already refused. So is one whose client has been given all
there is for it and reads none of that for `send_timeout`; streams in the middle are watched by `sse`. Beyond
`max_connections` new ones are turned away.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import Callable, Generator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.errors import ConfigError, OctavoError, error_body
from octavo.server.config import ServerConfig

MAX_HEAD = 64 * 1024
"""Bytes of a request line and its headers."""
BACKLOG = 2048
GRACE_S = 3.0
"""How long requests that were ended have to say so to their clients."""


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens, before there is anything to answer. Raises `ConfigError` if the port is taken."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Of a name that means both, such as localhost, the address that every client tries.
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(
            f"host={host!r} is no address to listen on: {error.strerror}", param="host"
        ) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another with --port", param="port"
        ) from error
    listener.setblocking(False)
    return listener


class Server(uvicorn.Server):
    """Serves `app` until it is told to stop; requests that run are then finished, new ones refused.

    `stopping` is called when the first signal comes, `aborting`, which must end the requests, when the second one does.
    """

    def __init__(
        self,
        app: ASGIApp,
        config: ServerConfig,
        *,
        stopping: Callable[[], None] = lambda: None,
        aborting: Callable[[], None] = lambda: None,
    ) -> None:
        protocol = type("Protocol", (BoundedProtocol,), {"bounds": config})
        super().__init__(
            uvicorn.Config(
                app,
                loop="asyncio",
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=max(1, round(config.body_timeout)),
            )
        )
        self._stopping = stopping
        self._aborting = aborting
        self._loop: asyncio.AbstractEventLoop | None = None
        self.aborted = False

    def stop(self) -> None:
        """Finish what runs and end; the second time, end what runs. From any thread."""
        if self.should_exit:
            self.aborted = True
            self._aborting()
            with contextlib.suppress(RuntimeError):  # it has ended already
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._loop.call_later, GRACE_S, self._force)
        else:
            self.should_exit = True
            self._stopping()

    def _force(self) -> None:
        self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals stop the server and are not raised again after it: to be told to end is no failure."""
        loop = self._loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        with contextlib.suppress(RuntimeError, ValueError):  # not in the main thread
            for number in signals:
                loop.add_signal_handler(number, self.stop)
        try:
            yield
        finally:
            for number in signals:
                with contextlib.suppress(RuntimeError, ValueError):
                    loop.remove_signal_handler(number)


class BoundedProtocol(HttpToolsProtocol):
    """One connection. `bounds` is set by the subclass that a server makes of it."""

    bounds: ServerConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head: int | None = 0  # bytes of a head that is not complete yet; None while a body is read
        self._begun = False
        self._deaf = False  # to what comes behind the last request that is answered
        self._clock: asyncio.TimerHandle | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._unread: tuple[object, bool, int] | None = None  # as seen by the last `_look`

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()
        if len(self.connections) > self.bounds.max_connections:
            self._turn_away(503, f"{self.bounds.max_connections} connections are open; try again later")
            return
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        if self._watch is not None:
            self._watch.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # It is read even then, since a connection that is not read does not tell that the client has left.
        if self.transport.is_closing() or self._deaf:
            return
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > MAX_HEAD:
            self._turn_away(431, f"the headers are longer than {MAX_HEAD} bytes")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun = True
        self._start_clock()
        # Closing waits until all is sent; to a client that reads nothing it never is.
        self.scope["extensions"] = {"octavo.abort": self.transport.abort}  # type: ignore[dict-item]

    def on_headers_complete(self) -> None:
        self._head, self._begun = None, False
        self._stop_clock()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head = 0
        self._stop_clock()
        super().on_message_complete()
        if self.cycle.response_complete:
            self._start_clock()  # for the next request

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.more_body and not self.transport.is_closing():
            self._start_clock()  # a refused body is read to its end, so that the client gets to see why

    def send_400_response(self, msg: str) -> None:
        """What is not HTTP."""
        self._turn_away(400, "this is not a valid HTTP request")

    def _start_clock(self) -> None:
        self._stop_clock()
        self._clock = self.loop.call_later(self.bounds.body_timeout, self._too_slow)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _too_slow(self) -> None:
        self._clock = None
        if self._begun:
            self._turn_away(408, f"the headers were not complete after {self.bounds.body_timeout:g} s")
        else:
            self.transport.close()

    def _look(self) -> None:
        """Once in `send_timeout`: drop a client that has read nothing since the last look. Closing waits for it."""
        size = self.transport.get_write_buffer_size()
        unread = (self.cycle, self.transport.is_closing(), size) if size and self._all_written() else None
        if unread is not None and unread == self._unread:
            self.transport.abort()
            return
        self._unread = unread
        self._watch = self.loop.call_later(self.bounds.send_timeout, self._look)

    def _all_written(self) -> bool:
        """Whether nothing is added to what is unread before some of it is read."""
        if self.transport.is_closing() or self.cycle is None or self.cycle.response_complete:
            return True
        return (
            self.flow.write_paused and not self.cycle.response_started
        )  # the answer before it is in its way

    def _turn_away(self, status: int, message: str) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # An earlier request is being answered; nothing may come before that, and nothing comes after it.
            self.cycle.keep_alive, self._deaf = False, True
            return
        error = OctavoError(message)
        error.status, error.code = status, "connection_refused"
        body = json.dumps(error_body(error)).encode()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        extra = "retry-after: 1\r\n" if status == 503 else ""
        self.transport.write(f"{head}{extra}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def allow_connections(count: int) -> None:
    """Let this process have `count` connections open, as far as the system allows."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 256
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
