"""What is bounded: connections, bodies one by one and together, time; and what is not disturbed by it."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngine
from octavo.errors import ConfigError
from octavo.server.backlog import Backlog
from octavo.server.body import FREE, Bodies
from octavo.server.config import ServerConfig
from octavo.server.listen import bind
from octavo.server.logs import LineWriter
from octavo.server.moment import unix
from octavo.server.requestlog import RequestLog
from support.serving import Served, serving
from support.sizes import sized

HEAD = [(b"content-type", b"application/json")]


def connect(served: Served) -> socket.socket:
    return socket.create_connection((served.host, served.port), timeout=60)


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while piece := connection.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def read_response(connection: socket.socket) -> tuple[int, dict[str, str], Any]:
    """One response with a length: status, headers, JSON."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += connection.recv(65536)
    return int(first.split()[1]), headers, json.loads(body)


def test_connections_beyond_the_limit_are_turned_away_and_their_room_is_given_back(
    tiny_engine: AsyncEngine,
) -> None:
    most = 5
    with serving(tiny_engine, max_connections=most) as served:
        for _ in range(sized(2, 50)):
            held = [connect(served) for _ in range(most)]
            for connection in held:  # they were accepted before the next one comes
                connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert read_response(connection)[0] == 200
            with connect(served) as more:
                status, headers, body = read_response(more)
                assert (status, headers["retry-after"], headers["connection"]) == (503, "1", "close")
                assert "5 connections are open" in body["error"]["message"]
            for connection in held:
                connection.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
                assert read_response(connection)[0] == 200
                connection.close()
            while served.server.server_state.connections:
                pass


def test_an_idle_connection_is_closed(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, body_timeout=0.2) as served:
        with connect(served) as silent:
            assert read_all(silent) == b""
        with connect(served) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert read_response(connection)[0] == 200
            assert read_all(connection) == b""


def test_a_request_that_is_being_answered_is_not_cut_off_by_what_follows_it(tiny_engine: AsyncEngine) -> None:
    """On one connection: a stream that lasts longer than the timeout, with half a request, or nonsense, behind it."""
    body = {"model": "tiny", "prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True, "seed": 1}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    streams = []
    with serving(tiny_engine, body_timeout=0.1) as served:
        for behind in (
            b"",
            b"GET /health HT",
            b"nonsense\r\n\r\n",
            b"GET /health HTTP/1.1\r\na: " + b"x" * 100_000,
        ):
            with connect(served) as connection:
                connection.sendall(head.encode() + b"\r\n\r\n" + data + behind)
                received = read_all(connection)
            stream, end, rest = received.partition(b"data: [DONE]")
            assert end, received[-500:]
            assert (b"HTTP/1.1 200" in stream, b"HTTP/1.1 400" in rest) == (True, False)
            texts = [
                json.loads(line[6:])["choices"][0]["text"]
                for line in stream.split(b"\n")
                if line[:7] == b"data: {"
            ]
            streams.append("".join(texts))
    assert len(set(streams)) == 1
    assert len(streams[0]) > 0


def test_a_body_is_read_to_its_end_after_it_was_refused(tiny_engine: AsyncEngine) -> None:
    """So that the client gets to see the refusal, and can go on with the same connection."""
    with serving(tiny_engine, max_body=10_000) as served, served.client() as client:
        for _ in range(3):
            found = client.post(
                "/tokenize", content=b"x" * 5_000_000, headers={"content-type": "application/json"}
            )
            assert (found.status_code, found.json()["error"]["code"]) == (413, "body_too_large")
            assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200
        assert len(served.server.server_state.connections) == 1


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "0.0.0.0"])
def test_a_name_is_listened_on_where_clients_look_for_it(host: str) -> None:
    with bind(host, 0) as listener:
        port = listener.getsockname()[1]
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
        with pytest.raises(ConfigError, match=f"port {port}"):
            bind(host, port)


class Client:
    """One ASGI request whose body arrives as it is told to."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._arriving: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.sent: list[dict[str, Any]] = []
        scope = {"type": "http", "method": "POST", "path": "/", "headers": HEAD}
        self.task = asyncio.ensure_future(app(scope, self._arriving.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    async def put(self, body: bytes, more: bool = True) -> None:
        """A piece of the body arrives."""
        self._arriving.put_nowait({"type": "http.request", "body": body, "more_body": more})
        for _ in range(5):
            await asyncio.sleep(0)

    async def leave(self) -> None:
        """The client hangs up."""
        self._arriving.put_nowait({"type": "http.disconnect"})
        await self.task

    @property
    def status(self) -> int | None:
        return self.sent[0]["status"] if self.sent else None


def test_bodies_share_one_budget() -> None:
    """It is given back when a request ends, in whatever way; small bodies need none of it."""
    finish = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await finish.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def scenario() -> None:
        bodies = Bodies(app, ServerConfig(max_body=400_000, max_bodies=1_000_000))
        piece = b"x" * (200_000 + FREE)
        first, second, third = Client(bodies), Client(bodies), Client(bodies)
        for client in (first, second, third):
            await client.put(piece)
        await first.put(b"x" * 100_000)
        await second.put(b"x" * 100_000)
        await third.put(b"x" * 100_000)  # 900,000 are taken
        late = Client(bodies)
        await late.put(b"x" * (100_000 + FREE))
        assert late.status is None
        await late.put(b"x")
        await late.task
        assert late.status == 503
        assert dict(late.sent[0]["headers"])[b"retry-after"] == b"1"
        small = Client(bodies)
        await small.put(b"[" + b" " * (FREE - 2) + b"]", more=False)
        assert small.status is None  # it is with the app
        await first.leave()
        await second.put(b"x" * 200_000)
        await second.task
        assert second.status == 413
        await third.put(b"no JSON", more=False)
        await third.task
        assert third.status == 400
        for _ in range(2):
            again = Client(bodies)
            await again.put(b"[" + b" " * 399_998 + b"]", more=False)
            assert again.status is None
        finish.set()
        for _ in range(5):
            await asyncio.sleep(0)
        assert small.status == 200
        assert bodies._held == 0

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_client_that_hangs_up_in_its_body_is_forgotten(served: Served) -> None:
    for _ in range(sized(20, 1000)):
        with connect(served) as connection:
            connection.sendall(
                b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" + b"x" * 50
            )
    while served.server.server_state.connections or served.server.server_state.tasks:
        pass
    with served.client() as client:
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200


@pytest.mark.parametrize("count", [0, 1, 3, 4])
def test_messages_are_counted(tiny_engine: AsyncEngine, count: int) -> None:
    with serving(tiny_engine, max_messages=3) as served, served.client() as client:
        body = {"model": "tiny", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}] * count}
        for path in ("/v1/chat/completions", "/v1/messages"):
            found = client.post(path, json=body)
            assert found.status_code == (200 if 0 < count <= 3 else 400), found.text
            if count == 4:
                assert "messages has 4 messages and may have 3; leave 1 out" in found.text


def test_no_request_waits_for_a_disk_that_is_full(tiny_engine: AsyncEngine) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with serving(tiny_engine, request_log=Path("/dev/full")) as served, served.client() as client:
        for _ in range(3):
            assert client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 200


def test_two_runs_in_one_request_log_stay_apart(tiny_engine: AsyncEngine, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    moments = []
    for _ in range(2):
        with serving(tiny_engine, request_log=log) as served, served.client() as client:
            moments.append(unix(time.monotonic()))
            assert client.post("/v1/completions", json={"model": "tiny", "prompt": "x"}).status_code == 200
            moments.append(unix(time.monotonic()))
    first, second = [json.loads(line)["timestamp"] / 1000 for line in log.read_text().splitlines()]
    assert [*moments[:1], first, *moments[1:3], second, moments[3]] == sorted([*moments, first, second])


def test_a_backlog_is_bounded_and_counts_what_it_drops() -> None:
    begun, go_on = threading.Event(), threading.Event()
    written: list[tuple[int, int]] = []

    def write(item: int, dropped: int) -> None:
        begun.set()
        go_on.wait(60)
        written.append((item, dropped))

    backlog = Backlog("backlog", 3, write)
    backlog.put(0)
    assert begun.wait(60)
    for item in range(1, 9):
        backlog.put(item)
    assert not backlog.close(0)
    go_on.set()
    assert backlog.close(60)
    assert written == [(0, 0), (1, 5), (2, 0), (3, 0)]


def test_a_line_that_a_full_disk_tore_is_followed_by_whole_ones(tmp_path: Path) -> None:
    """Also where all that is missing is its end."""
    lines = [{"number": number, "finish_reason": "stop"} for number in range(4)]
    room = [10, len(json.dumps(lines[1])) + 1, 1000, 1000]

    class Disk(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(data[: room.pop(0)])

        def close(self) -> None:
            pass

    log = RequestLog(tmp_path / "log", 16)
    log._file.close()
    disk: Any = Disk()
    log._file = disk
    record: Any = lambda number, reason: lines[number]  # noqa: E731
    log._record = record  # type: ignore[method-assign]
    for number in range(4):
        live: Any = number
        log.add(live, "stop")
    log.close()
    torn, *whole = disk.getvalue().splitlines()
    assert torn == json.dumps(lines[0])[:10].encode()
    assert [json.loads(line) for line in whole] == lines[1:]


def test_a_log_that_nobody_reads_stops_nobody() -> None:
    reader, pipe = os.pipe()
    writer = LineWriter(pipe)
    logger = logging.getLogger("test_limits")
    logger.propagate = False
    logger.addHandler(writer)
    count = 3 * LineWriter.CAPACITY
    for number in range(count):
        logger.warning("line %d of a log that is longer than any pipe", number)
    received = bytearray()

    def read() -> None:
        while piece := os.read(reader, 65536):
            received.extend(piece)

    thread = threading.Thread(target=read)
    thread.start()
    while b"could not be written" not in received:
        logger.warning("last")
        time.sleep(0.001)
    logger.removeHandler(writer)
    while not writer._lines._items.empty():
        time.sleep(0.001)
    writer.close()
    os.close(pipe)
    thread.join(60)
    os.close(reader)
    lines = received.decode().splitlines()
    dropped = sum(int(line.split()[0]) for line in lines if line.endswith("could not be written"))
    kept = [line for line in lines if line.startswith("line")]
    assert dropped > LineWriter.CAPACITY
    assert len(kept) + dropped >= count
    numbers = [int(line.split()[1]) for line in kept]
    assert numbers[0] == 0
    assert numbers == sorted(set(numbers))  # nothing twice, nothing out of order
    assert all(line.endswith("of a log that is longer than any pipe") for line in kept)
