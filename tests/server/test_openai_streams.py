"""Clients that hang up, that do not read, and errors before and inside a stream."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from octavo import AsyncEngine
from octavo.watch import EngineTotals
from support.openai_streams import events
from support.serving import SMALL, Served, serving

ENDLESS: dict[str, Any] = {
    "model": "tiny",
    "prompt": "Go on",
    "seed": 1,
    "ignore_eos": True,
    "max_tokens": 1000,
}
SHORT: dict[str, Any] = {"model": "tiny", "prompt": "Be brief", "seed": 2, "ignore_eos": True}
ATTEMPTS = 1000


@pytest.fixture(scope="module")
def narrow_engine(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AsyncEngine]:
    """It runs one request, and one more may wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_HOME", str(tmp_path_factory.mktemp("home")))
        engine = AsyncEngine(str(tiny("llama")), **SMALL, max_num_seqs=1, max_waiting=1)
    yield engine
    engine.close()


@pytest.fixture
def narrow(narrow_engine: AsyncEngine) -> Iterator[Served]:
    with serving(narrow_engine) as server:
        yield server


def totals(served: Served) -> EngineTotals:
    found: EngineTotals = served.ask(lambda engine: engine.totals())
    return found


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(ATTEMPTS):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came to be")


def send(served: Served, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    """A connection on which a request for a completion was sent."""
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect((served.host, served.port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    connection.sendall(head.encode() + b"\r\n\r\n" + data)
    return connection


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while not data.endswith(b"0\r\n\r\n") and (more := connection.recv(1 << 16)):
        data += more
    return data


def aborted(served: Served, reason: str) -> float:
    with served.client() as client:
        text = client.get("/metrics").text
    found = re.search(rf'^octavo:requests_aborted_total{{reason="{reason}"}} (.+)$', text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def answered(served: Served) -> float:
    with served.client() as client:
        text = client.get("/metrics").text
    return sum(
        float(count)
        for count in re.findall(
            r'^octavo:http_requests_total{.*"/v1/completions".*} (.+)$', text, re.MULTILINE
        )
    )


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_hangs_up_ends_its_request(served: Served, streams: bool) -> None:
    before, told = totals(served), aborted(served, "disconnect")
    connection = send(served, {**ENDLESS, "stream": streams})
    if streams:
        assert b"200" in connection.recv(64)
    wait_until(lambda: totals(served).generated_tokens > before.generated_tokens)
    connection.close()
    wait_until(lambda: not served.ask(lambda engine: engine.has_work))
    after = totals(served)
    assert (after.cancelled, after.finished) == (before.cancelled + 1, before.finished)
    assert after.generated_tokens < before.generated_tokens + 1000
    wait_until(lambda: aborted(served, "disconnect") == told + 1)


def test_a_client_that_leaves_with_the_whole_answer_has_not_hung_up(served: Served) -> None:
    before, told = answered(served), aborted(served, "disconnect")
    for _ in range(20):
        connection, data = send(served, {**SHORT, "stream": True}), b""
        while b"[DONE]" not in data:
            data += connection.recv(1 << 16)
        connection.close()
    wait_until(lambda: answered(served) == before + 20)
    assert aborted(served, "disconnect") == told


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_hangs_up_while_it_waits_leaves_the_queue(narrow: Served, streams: bool) -> None:
    running = send(narrow, {**ENDLESS, "stream": True})
    assert b"200" in running.recv(64)
    waiting = send(narrow, {**SHORT, "stream": streams})
    wait_until(lambda: totals(narrow).waiting == 1)
    waiting.close()
    wait_until(lambda: totals(narrow).waiting == 0)
    assert totals(narrow).running == 1
    running.close()
    wait_until(lambda: totals(narrow).running == 0)


@pytest.mark.parametrize("streams", [True, False])
def test_too_many_are_turned_away_before_anything_is_sent(narrow: Served, streams: bool) -> None:
    connections = [send(narrow, {**ENDLESS, "stream": True}) for _ in range(2)]
    wait_until(lambda: (totals(narrow).running, totals(narrow).waiting) == (1, 1))
    with narrow.client() as client:
        response = client.post("/v1/completions", json={**SHORT, "stream": streams})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == "overloaded"
    for connection in connections:
        connection.close()


def test_one_prompt_of_several_that_cannot_be_answered_ends_them_all(served: Served) -> None:
    before = totals(served)
    with served.client() as client:
        for streams in (False, True):
            body = {**ENDLESS, "prompt": ["fine", "x" * 1100, "fine, too"], "stream": streams}
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["code"] == "context_length_exceeded"
    wait_until(lambda: not served.ask(lambda engine: engine.has_work))
    assert totals(served).finished == before.finished


def test_a_client_that_reads_nothing_is_dropped_and_harms_nobody(
    tiny_engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="octavo.server")
    with serving(tiny_engine, send_timeout=0.3) as served, served.client() as client:
        alone = client.post("/v1/completions", json=SHORT).json()["choices"]
        # Some 20 MB of log-probs: far more than all buffers on the way hold.
        body = {**ENDLESS, "prompt": "x" * 900, "echo": True, "logprobs": 20, "n": 32, "stream": True}
        deaf = send(served, body, receive_buffer=4096)
        while aborted(served, "slow_client") == 0:
            assert client.post("/v1/completions", json=SHORT).json()["choices"] == alone
        wait_until(lambda: not served.ask(lambda engine: engine.has_work))
        assert not read_all(deaf).endswith(b"0\r\n\r\n")
        deaf.close()
        assert aborted(served, "slow_client") == 1
    lines = [record.fields for record in caplog.records if hasattr(record, "fields")]
    assert [line["aborted"] for line in lines if "aborted" in line] == ["slow_client"]


def test_a_slow_reader_gets_every_character(served: Served) -> None:
    with served.client() as client:
        whole = client.post("/v1/completions", json={**ENDLESS, "logprobs": 5}).json()["choices"][0]["text"]
    connection = send(served, {**ENDLESS, "logprobs": 5, "stream": True}, receive_buffer=4096)
    wait_until(lambda: not served.ask(lambda engine: engine.has_work))  # it has not waited for us
    data = read_all(connection)
    connection.close()
    pieces = [
        json.loads(line.removeprefix(b"data: "))
        for line in data.split(b"\n")
        if line.startswith(b"data: {") and line.endswith(b"}")
    ]
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole


def test_an_error_inside_a_stream_is_its_last_event(served: Served) -> None:
    with (
        served.client(headers={"x-request-id": "doomed"}) as client,
        client.stream("POST", "/v1/completions", json={**ENDLESS, "stream": True}) as response,
    ):
        parts = response.iter_text()
        text = next(parts)
        served.engine.abort("doomed")
        text += "".join(parts)
    *chunks, last = events(text)
    assert json.loads(last)["error"]["code"] == "cancelled"
    assert all("choices" in json.loads(chunk) for chunk in chunks)


def test_the_client_raises_what_ended_its_stream(served: Served) -> None:
    with openai.OpenAI(
        base_url=f"{served.url}/v1",
        api_key="none",
        max_retries=0,
        default_headers={"x-request-id": "doomed"},
    ) as client:
        stream = client.completions.create(
            model="tiny", prompt="Go on", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        next(iter(stream))
        served.engine.abort("doomed")
        with pytest.raises(openai.APIError, match="was ended by the server"):
            list(stream)


def test_an_answer_that_the_server_ends_is_an_error(served: Served) -> None:
    before = totals(served).started
    with served.client(headers={"x-request-id": "doomed"}) as client:
        found: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: found.append(client.post("/v1/completions", json=ENDLESS)))
        thread.start()
        wait_until(lambda: totals(served).started > before)
        served.engine.abort("doomed")
        thread.join()
    assert found[0].status_code == 503
    assert found[0].json()["error"]["code"] == "cancelled"
