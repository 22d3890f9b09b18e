"""The `openai` package against SmolLM2 over a socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from octavo import AsyncEngine
from octavo.errors import ModelNotFound
from support.openai_streams import Collected, collect
from support.serving import Served, serving

pytestmark = pytest.mark.model

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
CITY: dict[str, Any] = {
    "type": "json_schema",
    "json_schema": {
        "name": "city",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "country": {"type": "string"},
                "capital": {"type": "boolean"},
            },
            "required": ["name", "country", "capital"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    try:
        engine = AsyncEngine("smollm2", dtype="bfloat16", kv_cache_memory="256MiB")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
    with serving(engine, served_model_names=("smollm2",)) as served:
        yield served
    engine.close()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(text: str, **options: Any) -> dict[str, Any]:
    return {
        "model": "smollm2",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 120,
        **options,
    }


def streamed(client: openai.OpenAI, body: dict[str, Any]) -> Collected:
    with client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **body
    ) as stream:
        return collect(stream)


def test_it_answers_and_streams_the_same(client: openai.OpenAI) -> None:
    body = ask("What is the capital of France?", n=2, logprobs=True, top_logprobs=2)
    client.chat.completions.create(**body)
    whole = client.chat.completions.create(**body).model_dump()
    first = whole["choices"][0]
    assert "Paris" in first["message"]["content"]
    assert first["finish_reason"] == "stop"
    found = streamed(client, body)
    assert [choice.text for choice in found.choices] == [c["message"]["content"] for c in whole["choices"]]
    assert [choice.logprobs for choice in found.choices] == [
        c["logprobs"]["content"] for c in whole["choices"]
    ]
    assert found.usage == whole["usage"]
    spelled = b"".join(bytes(token["bytes"]) for token in first["logprobs"]["content"])
    assert spelled.decode().removesuffix("<|im_end|>") == first["message"]["content"]


def test_a_call_with_arguments_of_its_own(client: openai.OpenAI) -> None:
    body = ask("What is the weather in Oslo, in celsius?", tools=[WEATHER], tool_choice="required")
    body["parallel_tool_calls"] = False
    message = client.chat.completions.create(**body).choices[0].message
    assert message.tool_calls is not None
    (call,) = message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert "Oslo" in json.loads(call.function.arguments)["city"]
    (same,) = streamed(client, body).choices[0].calls
    assert (same["name"], same["arguments"]) == (call.function.name, call.function.arguments)
    turn = [
        *body["messages"],
        message.model_dump(exclude_unset=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": -3, "sky": "clear"}'},
    ]
    final = client.chat.completions.create(**{**body, "messages": turn, "tool_choice": "none"})
    assert final.choices[0].message.content
    assert final.choices[0].message.tool_calls is None
    assert final.usage is not None
    assert final.usage.prompt_tokens_details is not None
    # The call came back in other words than ids, and its blocks were found all the same.
    assert final.usage.prompt_tokens_details.cached_tokens > final.usage.prompt_tokens // 2


def asked_before(city: str, degrees: int) -> list[dict[str, Any]]:
    arguments = json.dumps({"city": city, "unit": "celsius"})
    function = {"name": "get_weather", "arguments": arguments}
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": city, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": city, "content": json.dumps({"temperature": degrees})},
    ]


def test_left_to_itself_it_calls_as_it_did_before(client: openai.OpenAI) -> None:
    body = ask("", tools=[WEATHER])
    body["messages"] = [
        *(message for city in ("Oslo", "Paris", "Berlin", "Madrid") for message in asked_before(city, 12)),
        {"role": "user", "content": "What is the weather in Rome?"},
    ]
    answer = client.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls is not None
    for call in answer.message.tool_calls:
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    found = streamed(client, body).choices[0]
    assert found.text == (answer.message.content or "")
    assert [call["arguments"] for call in found.calls] == [
        call.function.arguments for call in answer.message.tool_calls if call.type == "function"
    ]


def test_json_of_a_schema(client: openai.OpenAI) -> None:
    body = ask("Describe Paris.", response_format=CITY)
    answer = client.chat.completions.create(**body).choices[0]
    value = json.loads(answer.message.content or "")
    assert value["name"] == "Paris"
    assert isinstance(value["capital"], bool)
    assert streamed(client, body).choices[0].text == answer.message.content


def test_a_stop_string_that_tokens_cut_across(client: openai.OpenAI) -> None:
    body = ask("Count from 1 to 20, with commas.", stop=[", 5", "10"])
    answer = client.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "stop"
    found = streamed(client, body).choices[0]
    assert (found.text, found.finish_reason) == (answer.message.content, "stop")
    assert found.stop_reason in (", 5", "10")
    assert found.stop_reason not in found.text
