"""`octavo serve` as people run it: a process, a port, signals."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo.cli import main
from octavo.server.listen import bind
from support.serving import ServeProcess
from support.sizes import sized

FLAGS = (
    "--served-model-name",
    "tiny",
    "--num-threads",
    "1",
    "--kv-cache-memory",
    "8MiB",
    "--dtype",
    "float32",
)


@pytest.fixture(scope="module")
def model(tiny: Callable[[str], Path]) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {"OCTAVO_HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture
def server(model: Path, env: dict[str, str]) -> Iterator[ServeProcess]:
    with ServeProcess(model, *FLAGS, env=env) as server:
        server.wait_until_ready()
        yield server


class Stream:
    """A streamed completion, read in a thread. `begun` is set once its first token is there."""

    def __init__(self, server: ServeProcess, seed: int, max_tokens: int = 600) -> None:
        self.begun = threading.Event()
        self.text = ""
        self.reasons: list[str | None] = []
        self.errors: list[str] = []
        self.done = False
        self._url = server.url
        self._body = {
            "model": "tiny",
            "prompt": "hello",
            "max_tokens": max_tokens,
            "seed": seed,
            "stream": True,
            "ignore_eos": True,
        }
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.stream(
                "POST", f"{self._url}/v1/completions", json=self._body, timeout=120, trust_env=False
            ) as response:
                assert response.status_code == 200
                for line in response.iter_lines():
                    self._take(line)
        except httpx.RemoteProtocolError:
            pass
        finally:
            self.begun.set()

    def _take(self, line: str) -> None:
        if line.startswith("data: {"):
            body = json.loads(line[6:])
            if "error" in body:
                self.errors.append(body["error"]["code"])
                return
            (choice,) = body["choices"]
            self.text += choice["text"]
            self.reasons.append(choice["finish_reason"])
            self.begun.set()
        self.done |= line == "data: [DONE]"

    def join(self) -> Stream:
        """Wait for its end."""
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self


def is_reached(server: ServeProcess) -> bool:
    try:
        httpx.get(f"{server.url}/version", timeout=60, trust_env=False)
    except httpx.TransportError:
        return False
    return True


@pytest.mark.parametrize("number", sized([signal.SIGTERM], [signal.SIGTERM, signal.SIGINT]))
def test_a_signal_lets_streams_finish_and_new_requests_are_refused(server: ServeProcess, number: int) -> None:
    calm = [Stream(server, seed).join() for seed in range(sized(3, 8))]
    streams = [Stream(server, seed) for seed in range(sized(3, 8))]
    for stream in streams:
        assert stream.begun.wait(120)
    server.signal(number)
    refused = 0
    while server.process.poll() is None and any(stream._thread.is_alive() for stream in streams):
        try:
            status = httpx.post(
                f"{server.url}/v1/completions",
                json={"model": "tiny", "prompt": "x"},
                timeout=60,
                trust_env=False,
            ).status_code
            assert status in (200, 503)  # until the signal is noticed it is as before
            refused += status == 503
        except httpx.TransportError:
            refused += 1
    assert refused > 0
    for stream, before in zip(streams, calm, strict=True):
        stream.join()
        assert (stream.text, stream.reasons[-1], stream.done) == (before.text, "length", True)
        assert before.done
    status, out, err = server.finish()
    assert (status, out) == (0, "")
    assert "Traceback" not in err
    assert "Finishing the requests that run" in err


def test_a_second_signal_ends_them(server: ServeProcess) -> None:
    streams = [Stream(server, seed, 1000) for seed in range(16)]
    for stream in streams:
        assert stream.begun.wait(120)
    server.signal(signal.SIGTERM)
    while is_reached(server):  # until the first one was noticed
        pass
    server.signal(signal.SIGTERM)
    status, _, err = server.finish()
    assert status == 130
    assert "Traceback" not in err
    ended = [stream.join() for stream in streams]
    assert {code for stream in ended for code in stream.errors} == {"cancelled"}


def test_a_second_process_on_the_port_fails_with_a_sentence_before_it_loads_anything(
    server: ServeProcess,
) -> None:
    with ServeProcess("no-such-model", "--port", str(server.port)) as second:
        status, out, err = second.finish()
    assert (status, out) == (1, "")
    assert err == (
        f"octavo: error: cannot listen on 127.0.0.1 port {server.port}: Address already in use; "
        "choose another with --port\n"
    )
    assert httpx.get(f"{server.url}/health", trust_env=False).status_code == 200


def test_a_port_that_is_being_loaded_for_is_taken_too() -> None:
    with bind("127.0.0.1", 0) as listener:
        assert main(["serve", "no-such-model", "--port", str(listener.getsockname()[1])]) == 1


def test_it_says_what_it_does_warns_of_an_open_door_and_waits_for_no_idle_connection(
    model: Path, env: dict[str, str]
) -> None:
    with ServeProcess(model, *FLAGS, "--host", "0.0.0.0", env=env) as server:
        server.wait_until_ready()
        with httpx.Client(base_url=server.url, trust_env=False) as idle:
            assert idle.get("/version").status_code == 200
            status, out, err = server.stop()
    assert (status, out) == (0, "")
    assert "Model tiny: float32, context of 1024 tokens, exact." in err
    assert "Cache of 8.0 MiB in f32: 16384 tokens in blocks of 16." in err
    assert "of cache in f32; the longest request is 1024 tokens." in err
    assert (
        "Requests that fit at a time: 16 of 1024 tokens, 64 of 256 tokens, 256 of 64 tokens; at most " in err
    )
    assert "No keys: whoever reaches the port is let in." in err
    assert "WARNING 0.0.0.0 is reached from other machines" in err
    assert f"Listening on http://0.0.0.0:{server.port}" in err


def test_the_log_is_json_where_asked_for(model: Path, env: dict[str, str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("red secret-1\nblue secret-2\n")
    flags = [*FLAGS, "--log-json", "--api-key-file", str(keys), "--admin-key", "secret-3"]
    with ServeProcess(model, *flags, env=env) as server:
        server.wait_until_ready()
        body = {"model": "tiny", "prompt": "private text", "max_tokens": 4, "prompt_cache_key": "job 7"}
        headers = {"authorization": "Bearer secret-1", "x-request-id": "r-1"}
        answer = httpx.post(
            f"{server.url}/v1/completions", json=body, headers=headers, trust_env=False
        ).json()
        _, _, err = server.stop()
    lines = [json.loads(line) for line in err.splitlines()]
    assert not [word for word in ("secret-", "private", "WARNING") if word in err]
    assert [line["message"] for line in lines if "Keys" in line.get("message", "")] == [
        "Keys are needed; tenants: 2, each with cached prefixes of its own."
    ]
    (entry,) = [line for line in lines if line.get("request_id") == "r-1"]
    assert {"level": "info", "tenant": "red", "label": "job 7", "status": 200}.items() <= entry.items()
    assert (entry["path"], entry["prompt_tokens"], entry["completion_tokens"]) == ("/v1/completions", 12, 4)
    assert entry["receipts"][0]["computed_tokens"] == answer["octavo"]["computed_tokens"]


def test_the_request_log_has_what_a_simulator_needs_and_no_text(
    model: Path, env: dict[str, str], tmp_path: Path
) -> None:
    file = tmp_path / "requests.jsonl"
    flags = [*FLAGS, "--request-log", str(file), "--api-key", "k1", "--api-key", "k2"]
    prompt = list(range(70))
    with ServeProcess(model, *flags, env=env) as server:
        server.wait_until_ready()

        def complete(key: str, prompt: list[int], **more: Any) -> dict[str, Any]:
            body = {
                "model": "tiny",
                "prompt": prompt,
                "max_tokens": 30,
                "ignore_eos": True,
                "seed": 1,
                **more,
            }
            headers = {"authorization": f"Bearer {key}"}
            found = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, trust_env=False)
            answer: dict[str, Any] = found.json()
            return answer

        complete("k1", prompt)
        second = complete("k1", prompt[:50] + [7] * 20)
        complete("k2", prompt)
        complete("k1", prompt, cache_salt="x", n=2)
        server.stop()
    first, branch, other, salted = [json.loads(line) for line in file.read_text().splitlines()]
    for line in (first, branch, other, salted):
        assert (line["input_length"], line["block_size"], line["finish_reason"]) == (70, 16, "length")
        assert (len(line["hash_ids"]), len(line["output_hash_ids"])) == (4, 2)
    assert [line["output_length"] for line in (first, branch, other, salted)] == [30, 30, 30, 60]
    assert first["timestamp"] <= branch["timestamp"] <= other["timestamp"] <= salted["timestamp"]
    shared = len(set(first["hash_ids"]) & set(branch["hash_ids"]))
    assert shared * 16 == second["octavo"]["reused_tokens"] == 48
    assert first["hash_ids"][:3] == branch["hash_ids"][:3]
    ids = [set(line["hash_ids"]) for line in (first, other, salted)]
    assert len(ids[0] | ids[1] | ids[2]) == 12


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tenant", "x", "--api-key", "k"], "tenant='x' is never used"),
        (["--share-prefixes"], "share_prefixes does nothing"),
        (["--host", "no.such.host.invalid"], "no address to listen on"),
        (["--api-key-file", "/nowhere/keys"], "cannot be read"),
        (["--max-body", "1GB"], "max_body='1GB'"),
        (["--max-waiting", "-1"], "max_waiting=-1"),
        (["--temperature", "1"], "--temperature"),
    ],
)
def test_wrong_flags_are_refused_before_anything_is_loaded(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "no-such-model", "--port", "0", *flags]) in (1, 2)
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err
