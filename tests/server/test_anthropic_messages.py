"""Messages with the real `anthropic` package, over a socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from pydantic import TypeAdapter

from octavo import AsyncEngine
from octavo.server.anthropic.responses import MessageEvent
from support.serving import SMALL, Served, serving

SYSTEM = "You answer in bytes. " * 8
ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "Name a colour."}],
}
GREEDY = {"temperature": 0.0}
"""The tiny model's likeliest answer ends at its limit; a drawn one may end anywhere."""


def client_of(served: Served, key: str = "none") -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.url, api_key=key, max_retries=0)


@pytest.fixture
def client(served: Served) -> Iterator[anthropic.Anthropic]:
    with client_of(served) as client:
        yield client


def text_of(message: anthropic.types.Message) -> str:
    return "".join(block.text for block in message.content if block.type == "text")


def receipt_of(message: anthropic.types.Message) -> dict[str, Any]:
    receipt: dict[str, Any] = (message.model_extra or {})["octavo"]
    return receipt


def prompt_tokens(usage: anthropic.types.Usage) -> int:
    return (
        usage.input_tokens + (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
    )


def test_a_message(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**ASK, extra_body=GREEDY)
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", "tiny")
    assert (message.stop_reason, message.stop_sequence) == ("max_tokens", None)
    assert [block.type for block in message.content] == ["text"]
    assert text_of(message)
    assert message.usage.output_tokens == 24
    receipt = receipt_of(message)
    assert receipt["prompt_tokens"] == prompt_tokens(message.usage)
    assert receipt["completion_tokens"] == 24
    counted = client.messages.count_tokens(model="tiny", messages=ASK["messages"])
    assert counted.input_tokens == receipt["prompt_tokens"]
    assert message._request_id


def test_a_stream_says_the_same(client: anthropic.Anthropic) -> None:
    options = {**ASK, "system": SYSTEM, "extra_body": {"temperature": 0.9, "seed": 5}}
    whole = client.messages.create(**options)
    options["extra_body"]["cache_salt"] = "another"
    cold = client.messages.create(**options)
    options["extra_body"]["cache_salt"] = "a third"
    with client.messages.stream(**options) as stream:
        events = list(stream)
        final = stream.get_final_message()
    assert text_of(final) == text_of(cold) == text_of(whole)
    assert final.usage == cold.usage
    assert final.stop_reason == whole.stop_reason
    kinds = [event.type for event in events if event.type != "text"]
    deltas = kinds.count("content_block_delta")
    assert kinds == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * deltas,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(event.text for event in events if event.type == "text") == text_of(whole)


def test_the_events_of_a_stream_as_they_are_sent(served: Served) -> None:
    with served.client() as client:
        body = {**ASK, "stream": True, "temperature": 0.0}
        sent = client.post("/v1/messages", json=body).text
    events = [dict(line.split(": ", 1) for line in part.split("\n")) for part in sent.strip().split("\n\n")]
    datas = [json.loads(event["data"]) for event in events]
    TypeAdapter(list[MessageEvent]).validate_python(datas, strict=True)
    assert [event["event"] for event in events] == [data["type"] for data in datas]
    start, end, last = datas[0]["message"], datas[-2], datas[-1]
    assert datas[1] == {"type": "ping"}
    assert (start["content"], start["stop_reason"], start["stop_sequence"]) == ([], None, None)
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"]["output_tokens"] == end["octavo"]["completion_tokens"] == 24
    assert {k: v for k, v in end["usage"].items() if k != "output_tokens"} == {
        k: v for k, v in start["usage"].items() if k != "output_tokens"
    }
    assert last == {"type": "message_stop"}


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    whole = text_of(client.messages.create(**ASK, extra_body=GREEDY))
    stop = next(whole[i : i + 2] for i in range(4, len(whole)) if "\ufffd" not in whole[i : i + 2])
    message = client.messages.create(**ASK, stop_sequences=["never", stop], extra_body=GREEDY)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]
    with client.messages.stream(**ASK, stop_sequences=["never", stop], extra_body=GREEDY) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert text_of(final) == text_of(message)


def test_an_answer_can_be_begun(client: anthropic.Anthropic) -> None:
    beginning: Any = {"role": "assistant", "content": "The colour"}
    options: dict[str, Any] = {"extra_body": {"temperature": 0.0}}
    plain = client.messages.create(**ASK, **options)
    asked = {**ASK, "messages": [*ASK["messages"], beginning]}
    begun = client.messages.create(**asked, **options)
    added = len("The colour")
    assert prompt_tokens(begun.usage) == prompt_tokens(plain.usage) + added
    assert begun.content != plain.content


def test_an_answer_goes_back_into_the_next_turn(client: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"extra_body": {"temperature": 0.0, "cache_salt": "turns"}}
    with client.messages.stream(**ASK, system=SYSTEM, **options) as stream:
        first = stream.get_final_message()
    turns: Any = [*ASK["messages"], first.to_param(), {"role": "user", "content": "Another."}]
    second = client.messages.create(**{**ASK, "messages": turns}, system=SYSTEM, **options)
    asked = prompt_tokens(first.usage)
    assert second.usage.cache_read_input_tokens == asked // 16 * 16
    assert prompt_tokens(second.usage) == asked + len((text_of(first) + "<user>Another.<assistant>").encode())


def test_an_answer_ends_where_the_context_does(client: anthropic.Anthropic) -> None:
    question = {"role": "user", "content": "x" * 1000}
    message = client.messages.create(model="tiny", max_tokens=50, messages=[question])  # type: ignore[list-item]
    assert message.stop_reason == "model_context_window_exceeded"
    assert prompt_tokens(message.usage) + message.usage.output_tokens == 1024


def test_metadata_labels_the_request(served: Served, client: anthropic.Anthropic) -> None:
    with client.messages.stream(
        **{**ASK, "max_tokens": 400}, metadata={"user_id": "mallory"}, extra_body={"cache_salt": "label"}
    ) as stream:
        next(iter(stream))
        labels = served.ask(
            lambda engine: {s.request.label for s in engine.scheduler.running + engine.scheduler.waiting}
        )
    assert labels == {"mallory"}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "images"),
    ({"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]}, "documents"),
    ({"messages": [{"role": "assistant", "content": [{"type": "thinking"}]}]}, "thinking"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0]"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"mcp_servers": []}, "mcp_servers"),
    ({"container": "c"}, "container"),
    ({"context_management": {}}, "context_management"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"temperature": -0.5}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"stream": "true"}, "stream"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, "cache_control.ttl"),
    ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
    ({"system": [{"type": "text", "text": "x", "citations": []}]}, "system[0].citations"),
    ({"output_config": {"effort": "low"}}, "output_config.effort"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"frequency": 1}, "frequency"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "maximum context length is 1024 tokens"),
]


def refusal(client: anthropic.Anthropic, path: str, body: dict[str, Any]) -> str:
    """Why `body` is refused, by an error that is right in every other way."""
    with pytest.raises(anthropic.BadRequestError) as caught:
        client.post(path, cast_to=object, body=body)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.body["request_id"] == caught.value.request_id  # type: ignore[index]
    return caught.value.api_message or ""


@pytest.mark.parametrize(("change", "named"), BAD, ids=[named for _, named in BAD])
def test_what_cannot_be_done_is_refused_by_name(
    client: anthropic.Anthropic, change: dict[str, Any], named: str
) -> None:
    assert named in refusal(client, "/v1/messages", {**ASK, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [(change, named) for change, named in BAD if "messages" in change and len(named) < 20],
)
def test_what_cannot_be_counted_is_refused_too(
    client: anthropic.Anthropic, change: dict[str, Any], named: str
) -> None:
    body = {"model": "tiny", "messages": ASK["messages"], **change}
    assert named in refusal(client, "/v1/messages/count_tokens", body)


def test_a_little_more_than_fits_can_be_counted(client: anthropic.Anthropic) -> None:
    question: Any = {"role": "user", "content": "x" * 1100}
    counted = client.messages.count_tokens(model="tiny", messages=[question])
    assert counted.input_tokens == len("B<user>") + 1100 + len("<assistant>")


def test_other_errors_have_their_types(served: Served) -> None:
    with client_of(served) as client:
        with pytest.raises(anthropic.NotFoundError) as missing:
            client.messages.create(**{**ASK, "model": "claude"})
        assert missing.value.type == "not_found_error"
        assert "tiny" in missing.value.message
    with serving(served.engine, api_keys={"right": "tenant"}, max_body=2000) as locked:
        with client_of(locked, "wrong") as client, pytest.raises(anthropic.AuthenticationError) as refused:
            client.messages.create(**ASK)
        assert refused.value.type == "authentication_error"
        with client_of(locked, "right") as client:
            assert client.messages.create(**ASK, extra_body=GREEDY).usage.output_tokens == 24
            with pytest.raises(anthropic.ContentTooLargeError) as large:
                client.messages.create(**ASK, system="x" * 3000)
            assert large.value.body["error"]["type"] == "request_too_large"  # type: ignore[index]
        with locked.client(headers={"authorization": "Bearer right"}) as plain:
            assert plain.post("/v1/messages", json=ASK).status_code == 200
            assert plain.get("/v1/messages").json()["type"] == "error"


def test_no_room_is_an_error_that_says_when_to_come_back(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    engine = AsyncEngine(str(tiny("llama")), **SMALL, max_num_seqs=1, max_waiting=0)
    try:
        with serving(engine) as served, client_of(served) as client:
            with client.messages.stream(**{**ASK, "max_tokens": 900}, extra_body=GREEDY) as stream:
                next(iter(stream))
                with pytest.raises(anthropic.APIStatusError) as caught:
                    client.messages.create(**ASK)
            assert (caught.value.status_code, caught.value.type) == (503, "overloaded_error")
            assert int(caught.value.response.headers["retry-after"]) >= 1
    finally:
        engine.close()


def test_an_error_in_a_stream_is_its_last_event(served: Served, client: anthropic.Anthropic) -> None:
    with client.messages.stream(**{**ASK, "max_tokens": 900}, extra_body=GREEDY) as stream:
        events = iter(stream)
        assert next(events).type == "message_start"
        assert stream.request_id is not None
        served.engine.abort(stream.request_id)
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(events)
    assert caught.value.type == "api_error"
    assert "ended by the server" in (caught.value.api_message or "")
