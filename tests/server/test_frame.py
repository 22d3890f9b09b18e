"""What every request goes through, whatever it asks for: ids, errors, the routes about the server itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngine
from octavo.engine import Engine
from octavo.live import LiveRequest
from octavo.server.body import MAX_DEPTH
from support.serving import SMALL, Served, serving


def test_unknown_paths_and_methods_are_errors_of_openais_form(served: Served) -> None:
    with served.client() as client:
        missing = client.get("/v1/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "not_found"
        wrong = client.post("/version", json={})
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET")
        assert wrong.json()["error"]["code"] == "method_not_allowed"


def test_errors_of_messages_are_of_anthropics_form(served: Served) -> None:
    with served.client() as client:
        body = client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"})
        assert body.status_code == 400
        assert body.json()["type"] == "error"
        assert body.json()["error"]["type"] == "invalid_request_error"
        assert body.json()["request_id"] == body.headers["x-request-id"]


def test_a_request_keeps_its_id_where_it_is_sane(served: Served) -> None:
    with served.client() as client:

        def id_for(given: str | bytes) -> str:
            return str(client.get("/version", headers={"x-request-id": given}).headers["x-request-id"])

        assert id_for("trace-1:a.b_c") == "trace-1:a.b_c"
        for insane in ("", "a b", "x" * 65, "a\tb", "ü".encode()):
            assert len(id_for(insane)) == 32
        assert client.get("/nowhere").headers["x-request-id"]


def test_models_are_listed_for_both_kinds_of_clients(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, served_model_names=("one", "two/three")) as served, served.client() as client:
        listed = client.get("/v1/models").json()
        assert [model["id"] for model in listed["data"]] == ["one", "two/three"]
        assert (listed["first_id"], listed["last_id"], listed["has_more"]) == ("one", "two/three", False)
        assert client.get("/v1/models/two/three").json() == listed["data"][1]
        assert listed["data"][0]["max_model_len"] == served.state.facts.max_model_len == 1024
        missing = client.get("/v1/models/four")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


def test_tokens_and_back(served: Served) -> None:
    text = "naïve 😀 <s>text\0</s>"
    with served.client() as client:
        told = client.post("/tokenize", json={"prompt": text}).json()
        assert told["tokens"] == served.state.tokenizer.encode(text)
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 1024)
        assert told["token_strs"] is None
        assert client.post("/detokenize", json={"tokens": told["tokens"]}).json() == {"prompt": text}
        named = client.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
        assert named["token_strs"] == ["a", "Ġ", "b"]
        messages = [{"role": "user", "content": "hello"}]
        told = client.post("/tokenize", json={"messages": messages}).json()
        assert told["tokens"] == served.state.tokenizer.apply_chat_template(messages)
        told = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
        assert told["tokens"] == served.state.tokenizer.apply_chat_template(
            messages, add_generation_prompt=False
        )


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "a", "content": "y"},
        ],
        [{"role": "developer", "content": "short"}, {"role": "user", "content": "x"}],
        [
            {"role": "user", "content": "x"},
            {"role": "assistant", "refusal": "no"},
            {"role": "user", "content": "y"},
        ],
    ],
)
@pytest.mark.parametrize("tools", [{}, {"tools": [{"type": "function", "function": {"name": "f"}}]}])
def test_a_conversation_has_the_tokens_that_chat_gives_it(
    served: Served, messages: list[dict[str, Any]], tools: dict[str, Any]
) -> None:
    asked = {"messages": messages, **tools}
    with served.client() as client:
        told = client.post("/tokenize", json=asked).json()
        answer = client.post("/v1/chat/completions", json={"model": "tiny", "max_tokens": 1, **asked})
    assert answer.json()["usage"]["prompt_tokens"] == told["count"] == len(told["tokens"])


def test_to_count_a_conversation_waits_for_no_prompt_and_has_no_limit(served: Served) -> None:
    messages = [{"role": "user", "content": "x" * 5000}]
    expected = len(served.state.tokenizer.apply_chat_template(messages))
    assert expected > served.state.facts.max_model_len
    release = threading.Event()
    prompt = served.engine._door.submit(release.wait, 60)
    with served.client() as client:
        assert client.post("/tokenize", json={"messages": messages}).json()["count"] == expected
        counted = client.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": messages})
        assert counted.json() == {"input_tokens": expected}
    assert not prompt.done()
    release.set()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "more": 1}, "more"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": "b"}], "add_special_tokens": True},
            "add_special_tokens",
        ),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ("/detokenize", {"tokens": [1, 264]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [True]}, "tokens[0]"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)
def test_a_wrong_field_is_named(served: Served, path: str, body: object, param: str) -> None:
    with served.client() as client:
        found = client.post(path, json=body)
        assert found.status_code == 400, found.text
        error = found.json()["error"]
        assert (error["param"], error["type"], error["code"]) == (
            param,
            "invalid_request_error",
            "invalid_request",
        )
        assert param in error["message"]


def test_a_model_that_is_not_served_is_404(served: Served) -> None:
    with served.client() as client:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": []})):
            found = client.post(path, json={**body, "model": "other"})
            assert (found.status_code, found.json()["error"]["code"]) == (404, "model_not_found")
            assert "tiny" in found.json()["error"]["message"]


def test_version_says_what_runs(served: Served) -> None:
    with served.client() as client:
        told = client.get("/version").json()
    engine = served.ask(lambda engine: engine)
    assert told["digest"] == engine.loaded.digest
    assert (told["model"], told["dtype"], told["kv_cache_dtype"]) == ("tiny", "float32", "f32")
    assert told["exact"] is engine.runner.exact


def test_the_prefix_cache_can_be_forgotten(served: Served) -> None:
    with served.client() as client:
        body = {"model": "tiny", "prompt": list(range(64)), "max_tokens": 2}
        client.post("/reset_prefix_cache")
        client.post("/v1/completions", json=body)
        again = client.post("/v1/completions", json=body).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 48
        assert client.post("/reset_prefix_cache").json() == {"forgotten_blocks": 4}
        cold = client.post("/v1/completions", json=body).json()
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_health_turns_503_while_queued_work_stands_still(tiny_engine: AsyncEngine) -> None:
    with serving(tiny_engine, stall_timeout=0.2) as served, served.client() as client:
        assert client.get("/health").json()["status"] == "ok"
        hold, held = threading.Event(), threading.Event()

        def block(_: object) -> None:
            held.set()
            hold.wait(60)

        blocked = served.engine.ask(block)
        held.wait(60)
        body = {"model": "tiny", "prompt": "x", "max_tokens": 3}
        thread = threading.Thread(target=lambda: client.post("/v1/completions", json=body))
        thread.start()
        try:
            for _ in range(600):
                found = client.get("/health")
                if found.status_code == 503:
                    break
                threading.Event().wait(0.02)
            assert (found.status_code, found.json()["status"]) == (503, "stalled")
        finally:
            hold.set()
            blocked.result(60)
            thread.join(60)
        assert client.get("/health").json()["status"] == "ok"


def test_an_engine_that_fails_is_told_of_and_does_not_take_the_server_down(
    tiny: Callable[[str], Path],
) -> None:
    engine = AsyncEngine(str(tiny("llama")), **SMALL)

    def break_it(engine: Engine) -> None:
        def step() -> list[LiveRequest]:
            raise RuntimeError("a kernel has failed")

        engine.step = step  # type: ignore[method-assign]

    body = {"model": "tiny", "prompt": "x"}
    with serving(engine) as served, served.client() as client:
        assert client.post("/v1/completions", json=body).status_code == 200
        served.ask(break_it)
        for _ in range(2):
            found = client.post("/v1/completions", json=body)
            assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
        health = client.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "failed")
        assert 'octavo:engine_up{model_name="tiny"} 0.0' in client.get("/metrics").text
        assert client.get("/version").status_code == 200
    engine.close()


def test_prompts_are_logged_only_if_asked_for(
    tiny_engine: AsyncEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"model": "tiny", "prompt": "a secret", "max_tokens": 3, "prompt_cache_key": "mine"}
    with serving(tiny_engine) as served, served.client() as client:
        client.post("/v1/completions", json=body, headers={"x-request-id": "r1"})
    ours = [record for record in caplog.records if record.name.startswith("octavo")]
    lines = [record.getMessage() for record in ours if "r1" in record.getMessage()]
    assert len(lines) == 1
    assert 'label="mine"' in lines[0]
    assert "prompt_tokens=8 completion_tokens=3" in lines[0]
    assert not [record for record in caplog.records if "secret" in record.getMessage()]
    caplog.clear()
    with serving(tiny_engine, log_prompts=True) as served, served.client() as client:
        client.post("/v1/completions", json=body)
    assert [record for record in caplog.records if "a secret" in record.getMessage()]


def test_json_that_another_parser_might_choke_on_is_refused(served: Served) -> None:
    head = {"content-type": "application/json"}
    with served.client() as client:
        fits = b'{"messages":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
        assert "deeper" not in client.post("/tokenize", content=fits, headers=head).text
        deep = b'{"messages":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}"
        found = client.post("/tokenize", content=deep, headers=head)
        assert (found.status_code, "deeper than 100" in found.text) == (400, True)
