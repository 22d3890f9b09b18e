"""What one connection can hold: clients that read nothing, and that send what nobody asked for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.server.config import ServerConfig
from octavo.server.listen import BoundedProtocol, Server, bind

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
LARGE = b"x" * 20_000_000
"""Far more than the buffers of the system hold."""
NEVER = 3600.0


@dataclass
class Connection:
    """A client that decides what it reads and when, and the server's end of it."""

    server: Server
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def protocol(self) -> BoundedProtocol:
        (found,) = self.server.server_state.connections
        assert isinstance(found, BoundedProtocol)
        return found

    @property
    def unread(self) -> int:
        return self.protocol.transport.get_write_buffer_size()

    async def until_forgotten(self) -> None:
        while self.server.server_state.connections or self.server.server_state.tasks:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def connection(app: ASGIApp, **options: Any) -> AsyncGenerator[Connection, None]:
    """One connection to a server of `app`; both end with the block."""
    listener = bind("127.0.0.1", 0)
    server = Server(app, ServerConfig(**options))
    serving = asyncio.ensure_future(server.serve([listener]))
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(listener.getsockname())
    reader, writer = await asyncio.open_connection(sock=client, limit=4096)
    while not server.server_state.connections:
        await asyncio.sleep(0.01)
    try:
        yield Connection(server, reader, writer)
    finally:
        writer.transport.abort()
        server.stop()
        await serving


def answer_of(body: bytes, *, close: bool) -> ASGIApp:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", str(len(body)).encode()), *([(b"connection", b"close")] * close)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


@pytest.mark.parametrize("close", [False, True])
@pytest.mark.parametrize("requests", [1, 2])
def test_a_client_that_leaves_a_whole_answer_unread_is_dropped(close: bool, requests: int) -> None:
    """Also where a second answer waits behind the first."""

    async def scenario() -> None:
        async with connection(answer_of(LARGE, close=close), send_timeout=0.05) as client:
            client.writer.write(GET * requests)
            await client.until_forgotten()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_client_that_reads_slowly_gets_the_whole_answer() -> None:
    async def scenario() -> None:
        async with connection(answer_of(LARGE, close=True), send_timeout=NEVER) as client:
            client.writer.write(GET)
            await client.reader.readuntil(b"\r\n\r\n")
            received = 0
            while received < len(LARGE) // 2:
                client.protocol._look()
                before = client.unread
                while client.unread == before:
                    received += len(await client.reader.read(65536))
            client.protocol._look()
            while piece := await client.reader.read(65536):
                received += len(piece)
            assert received == len(LARGE)

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_what_comes_behind_a_running_request_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without end grows nothing, and the answer before it is whole."""
    begun, finish = asyncio.Event(), asyncio.Event()
    head = b"GET / HTTP/1.1\r\n" + b"name: value\r\n" * 1_000_000
    left = len(GET + head)

    class Counting(BoundedProtocol):
        def data_received(self, data: bytes) -> None:
            nonlocal left
            left -= len(data)
            super().data_received(data)

    monkeypatch.setattr("octavo.server.listen.BoundedProtocol", Counting)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        await finish.wait()
        await answer_of(b"well", close=False)(scope, receive, send)

    async def scenario() -> None:
        async with connection(app) as client:
            client.writer.write(GET)
            await begun.wait()
            client.writer.write(head)
            while left:
                await asyncio.sleep(0.01)
            headers = client.protocol.headers
            assert sum(len(name) + len(value) for name, value in headers) < 512 * 1024
            finish.set()
            answer = await client.reader.read()
            assert (answer.count(b"HTTP/1.1 200"), answer[-4:]) == (1, b"well")
            await client.until_forgotten()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_client_is_missed_though_its_second_request_was_refused() -> None:
    begun, missed = asyncio.Event(), asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        begun.set()
        while (await receive())["type"] != "http.disconnect":
            pass
        missed.set()

    async def scenario() -> None:
        async with connection(app) as client:
            client.writer.write(GET)
            await begun.wait()
            client.writer.write(b"nonsense\r\n\r\n" + LARGE)
            await client.writer.drain()
            client.writer.transport.abort()
            await missed.wait()

    asyncio.run(asyncio.wait_for(scenario(), 60))
