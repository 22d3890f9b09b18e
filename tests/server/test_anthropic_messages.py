"""Messages with the real `anthropic` package, over a socket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from octavo import AsyncEngine
from support.serving import SMALL, Served, serving

SYSTEM = "You answer in bytes. " * 8
ASK: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 24,
    "messages": [{"role": "user", "content": "Name a colour."}],
}


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
    message = client.messages.create(**ASK, extra_body={"temperature": 0.0})
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
    whole = text_of(client.messages.create(**ASK, extra_body={"temperature": 0.0}))
    stop = next(whole[i : i + 2] for i in range(4, len(whole)) if "\ufffd" not in whole[i : i + 2])
    message = client.messages.create(**ASK, stop_sequences=["never", stop], extra_body={"temperature": 0.0})
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
    assert text_of(message) == whole[: whole.index(stop)]
    with client.messages.stream(
        **ASK, stop_sequences=["never", stop], extra_body={"temperature": 0.0}
    ) as stream:
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", stop)
    assert text_of(final) == text_of(message)
