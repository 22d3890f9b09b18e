"""Whatever is sent, the answer is a small JSON 4xx, memory stays bounded, and a neighbour's stream is bit-equal."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.serving import ServeProcess
from support.sizes import sized

CHAT = "/v1/chat/completions"
PATHS = ("/v1/completions", CHAT, "/v1/messages", "/tokenize", "/detokenize")
MIB = 1024**2
BODY_TIMEOUT = sized(1.5, 30.0)
PATIENCE = 600.0
MEMORY = 320 * MIB
"""What all of this may take at its peak: a few times the longest body that is read."""


@pytest.fixture(scope="module")
def server(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    flags = [
        "--served-model-name",
        "tiny",
        "--num-threads",
        "1",
        "--kv-cache-memory",
        "8MiB",
        "--dtype",
        "float32",
    ]
    home = str(tmp_path_factory.mktemp("home"))
    with ServeProcess(
        tiny("llama"), *flags, "--body-timeout", str(BODY_TIMEOUT), env={"OCTAVO_HOME": home}
    ) as server:
        server.wait_until_ready()
        yield server
        status, _, err = server.stop()
        assert status == 0
        assert "Traceback" not in err


NEIGHBOUR: dict[str, Any] = {
    "model": "tiny",
    "prompt": "once upon a time",
    "max_tokens": 300,
    "temperature": 0.8,
    "seed": 3,
    "ignore_eos": True,
    "stream": True,
    "logprobs": 2,
}


class Neighbour:
    """Streams the same request again and again; every answer must be the same."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.answers: list[list[Any]] = []

    def _run(self) -> None:
        while not self._stop.is_set():
            self.answers.append(self.read())

    def read(self) -> list[Any]:
        """Texts, token ids and log-probs of one stream, whichever way it was cut into events."""
        texts, tokens, logprobs = [], [], []
        with httpx.stream(
            "POST", f"{self._url}/v1/completions", json=NEIGHBOUR, timeout=PATIENCE, trust_env=False
        ) as response:
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    texts.append(choice["text"])
                    if choice["logprobs"] is not None:
                        tokens += choice["logprobs"]["tokens"]
                        logprobs += choice["logprobs"]["token_logprobs"]
        return ["".join(texts), tokens, logprobs]

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def calm(server: ServeProcess) -> list[Any]:
    """The neighbour's answer when it is alone."""
    answer = Neighbour(server.url).read()
    assert len(answer[1]) == 300
    return answer


@pytest.fixture(autouse=True)
def _neighbour_is_unharmed(server: ServeProcess, calm: list[Any]) -> Iterator[None]:
    before = peak_memory(server)
    with Neighbour(server.url) as neighbour:
        yield
    assert neighbour.answers
    assert all(answer == calm for answer in neighbour.answers)
    assert peak_memory(server) - before < MEMORY


def peak_memory(server: ServeProcess) -> int:
    """Bytes that the process has ever held."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def post(server: ServeProcess, path: str, content: bytes, **headers: str) -> httpx.Response:
    head = {"content-type": "application/json", **headers}
    return httpx.post(server.url + path, content=content, headers=head, timeout=PATIENCE, trust_env=False)


def is_refused(response: httpx.Response, status: int = 400) -> bool:
    """Whether this is a small error of the form that its API has."""
    body = response.json()
    assert isinstance(body["error"]["message"], str)
    assert len(response.content) < 1500
    assert response.status_code == status, response.text
    return True


def valid(path: str) -> bytes:
    """A body that the route answers."""
    messages = [{"role": "user", "content": "hé" * 200}]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"model": "tiny", "prompt": "hé" * 200, "max_tokens": 2},
        CHAT: {"model": "tiny", "messages": messages, "max_tokens": 2},
        "/v1/messages": {"model": "tiny", "messages": messages, "max_tokens": 2},
        "/tokenize": {"model": "tiny", "prompt": "hé" * 200},
        "/detokenize": {"model": "tiny", "tokens": list(range(200))},
    }
    return json.dumps(bodies[path], ensure_ascii=False).encode()


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_json(server: ServeProcess, path: str) -> None:
    assert post(server, path, valid(path)).status_code == 200
    assert all(
        is_refused(post(server, path, body))
        for body in (b"", b" ", b"{", b"\xff\xfe", b"nul", b"[1,]", b"{}{}")
    )
    assert all(
        is_refused(post(server, path, valid(path).decode().encode(code))) for code in ("utf-16", "utf-8-sig")
    )
    assert all(
        is_refused(post(server, path, body)) for body in (b"null", b"5", b'"text"', b"[]", b"[{}]", b"{}")
    )
    assert all(is_refused(post(server, path, valid(path)[:end])) for end in range(0, len(valid(path)), 100))


def prompts(text: str) -> list[tuple[str, bytes]]:
    """Bodies with `text`, which is JSON, in the place of the prompt."""
    message = f'{{"role":"user","content":{text}}}'
    return [
        ("/v1/completions", f'{{"model":"tiny","max_tokens":1,"prompt":{text}}}'.encode()),
        (CHAT, f'{{"model":"tiny","max_tokens":1,"messages":[{message}]}}'.encode()),
        ("/v1/messages", f'{{"model":"tiny","max_tokens":1,"messages":[{message}]}}'.encode()),
        ("/tokenize", f'{{"model":"tiny","prompt":{text}}}'.encode()),
        ("/detokenize", f'{{"model":"tiny","tokens":{text}}}'.encode()),
    ]


@pytest.mark.parametrize(
    "text",
    [
        '"\\ud800"',
        '"\\udc00\\ud800"',
        "1e400",
        "-1e400",
        "NaN",
        "[" * 100_000 + "]" * 100_000,
        "[" * 100_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        "[[1,2],[" + "9" * 5000 + "]]",
        "[" + "9" * 400 + "]",
        "-0.5",
        "true",
        "{}",
        "[null]",
    ],
    ids=lambda text: text[:12],
)
def test_json_that_means_nothing(server: ServeProcess, text: str) -> None:
    assert all(is_refused(post(server, path, body)) for path, body in prompts(text))


def test_a_nul_is_a_character(server: ServeProcess) -> None:
    for path, body in prompts('"a\\u0000b"')[:4]:
        assert post(server, path, body).status_code == 200
    found = post(server, "/tokenize", b'{"prompt":"a\\u0000b"}').json()
    assert post(server, "/detokenize", json.dumps({"tokens": found["tokens"]}).encode()).json() == {
        "prompt": "a\0b"
    }


def test_of_a_key_given_twice_the_last_one_counts(server: ServeProcess) -> None:
    body = b'{"model":"other","model":"tiny","prompt":"first","prompt":"second"}'
    assert post(server, "/tokenize", body).json() == post(server, "/tokenize", b'{"prompt":"second"}').json()


@pytest.mark.parametrize("path", PATHS[:3])
def test_a_string_is_no_flag(server: ServeProcess, path: str) -> None:
    body = json.loads(valid(path)) | {"stream": "true"}
    found = post(server, path, json.dumps(body).encode())
    assert is_refused(found)
    assert "stream" in found.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
def test_64_megabytes(server: ServeProcess, path: str) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x" * 64 * MIB}).encode()
    assert is_refused(post(server, path, body), 413)


def test_64_megabytes_of_unknown_length(server: ServeProcess) -> None:
    def pieces() -> Iterator[bytes]:
        yield b'{"prompt":"'
        for _ in range(64):
            yield b"x" * MIB

    found = httpx.post(
        server.url + "/tokenize",
        content=pieces(),
        headers={"content-type": "application/json"},
        timeout=PATIENCE,
        trust_env=False,
    )
    assert is_refused(found, 413)


@pytest.mark.parametrize("path", PATHS[:3])
def test_a_prompt_that_passes_and_is_far_too_long(server: ServeProcess, path: str) -> None:
    body = json.loads(valid(path))
    if path == "/v1/completions":
        body["prompt"] = "x" * 3 * MIB
    else:
        body["messages"][0]["content"] = "x" * 3 * MIB
    assert is_refused(post(server, path, json.dumps(body).encode()))


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/tokenize"])
def test_100_000_messages(server: ServeProcess, path: str) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[n % 2], "content": "x"} for n in range(100_000)]
    body = {"model": "tiny", "messages": messages} | ({"max_tokens": 2} if path != "/tokenize" else {})
    found = post(server, path, json.dumps(body).encode())
    assert is_refused(found)
    assert "100000 messages" in found.json()["error"]["message"]


def exchange(server: ServeProcess, sent: bytes) -> bytes:
    """Everything that comes back for raw bytes until the connection is closed."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(sent)
        received = b""
        try:
            while piece := connection.recv(65536):
                received += piece
        except ConnectionResetError:
            pass
        return received


def at_once(server: ServeProcess, sent: Sequence[bytes]) -> list[bytes]:
    """As `exchange`, on a connection each at the same time."""
    with ThreadPoolExecutor(len(sent)) as pool:
        return list(pool.map(lambda one: exchange(server, one), sent))


def request(path: str, body: bytes, *headers: str) -> bytes:
    """A request as bytes."""
    lines = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def statuses(received: bytes) -> list[int]:
    """Of all responses in `received`."""
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("path", sized([CHAT], ["/tokenize", CHAT]))
def test_a_length_that_is_wrong(server: ServeProcess, path: str) -> None:
    body = valid(path)
    size = len(body)
    short = statuses(exchange(server, request(path, body, f"content-length: {size - 40}")))
    assert short == [400]  # JSON that is cut; what comes after it is no request
    long = statuses(
        exchange(server, request(path, body, f"content-length: {size + 40}", "connection: close"))
    )
    assert long == [408]
    for wrong in (
        ["-1"],
        ["x"],
        ["1e3"],
        [str(10**30)],
        [str(size), str(size + 1)],
        ["0x10"],
        ["5, 5"],
        [""],
    ):
        lengths = [f"content-length: {length}" for length in wrong]
        found = statuses(exchange(server, request(path, body, *lengths, "connection: close")))
        assert all(400 <= status < 500 for status in found), (wrong, found)
    both = request(path, body, f"content-length: {size}", "transfer-encoding: chunked", "connection: close")
    assert all(400 <= status < 500 for status in statuses(exchange(server, both)))
    chunks = request(path, b"zz\r\n" + body + b"\r\n0\r\n\r\n", "transfer-encoding: chunked")
    assert all(400 <= status < 500 for status in statuses(exchange(server, chunks)))


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/9.9\r\nhost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nh\0ost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: " + b"x" * 300_000,
        b"GET /" + b"x" * 300_000,
        b"GET /health HTTP/1.1\r\n" + b"a: b\r\n" * 50_000,
    ],
    ids=lambda sent: repr(sent[:24]),
)
def test_what_is_not_http(server: ServeProcess, sent: bytes) -> None:
    found = statuses(exchange(server, sent))
    assert all(400 <= status < 500 for status in found), found


def test_a_body_without_its_type(server: ServeProcess) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert is_refused(post(server, "/tokenize", b'{"prompt":"x"}', **{"content-type": kind}), 415)
    kind = "application/json; charset=utf-8"
    assert post(server, "/tokenize", b'{"prompt":"x"}', **{"content-type": kind}).status_code == 200


def test_a_body_that_stalls(server: ServeProcess) -> None:
    body = valid(CHAT)
    heads = [request(CHAT, sent, f"content-length: {len(body)}") for sent in (b"", body[:1], body[:-1])]
    for received in at_once(server, heads):
        assert statuses(received) == [408]
        assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_timeout"


def test_headers_that_stall(server: ServeProcess) -> None:
    sent = (
        b"",
        b"POST /tokenize HTTP/1.1\r\nhost: x\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET /he",
    )
    assert [statuses(received) for received in at_once(server, sent)] == [[], [408], [200, 408]]


def test_many_slow_connections(server: ServeProcess) -> None:
    """They send a byte now and then, some of the headers, some of the body, and all are cut off."""
    count = sized(60, 200)
    ends: list[list[int]] = []

    def drip(number: int) -> None:
        whole = request(CHAT, valid(CHAT), f"content-length: {len(valid(CHAT))}")
        at = (number * 37) % (len(whole) - 200)
        with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
            received = b""
            try:
                connection.sendall(whole[:at])
                connection.settimeout(BODY_TIMEOUT / 5)
                while True:
                    try:
                        if not (piece := connection.recv(65536)):
                            break
                        received += piece
                    except TimeoutError:
                        connection.sendall(whole[at : at + 1])
                        at += 1
                        assert at < len(whole), "it was never cut off"
            except ConnectionError:
                pass
            ends.append(statuses(received))

    threads = [threading.Thread(target=drip, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    assert post(server, "/tokenize", b'{"prompt":"x"}').status_code == 200
    for thread in threads:
        thread.join()
    assert len(ends) == count
    assert all(end in ([408], []) for end in ends), ends
    assert sum(end == [408] for end in ends) >= count * 0.9
