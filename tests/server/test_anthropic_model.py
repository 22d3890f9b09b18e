"""Messages on SmolLM2 with the real `anthropic` package: turns, beginnings, tools, formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from octavo import AsyncEngine
from octavo.errors import ModelNotFound
from support.serving import Served, serving

pytestmark = pytest.mark.model

GREEDY: Any = {"temperature": 0.0}
CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER: Any = {
    "name": "get_weather",
    "description": "The weather in a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["C", "F"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def smol() -> Iterator[Served]:
    try:
        engine = AsyncEngine("smollm2", dtype="bfloat16", kv_cache_memory="128MiB")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
    try:
        with serving(engine, served_model_names=("smollm2",)) as served:
            yield served
    finally:
        engine.close()


@pytest.fixture(scope="module")
def client(smol: Served) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=smol.url, api_key="none", max_retries=0) as client:
        yield client


def create(client: anthropic.Anthropic, **options: Any) -> Any:
    body = {"model": "smollm2", "max_tokens": 60, "messages": CAPITAL, "extra_body": GREEDY, **options}
    return client.messages.create(**body)


def stream(client: anthropic.Anthropic, **options: Any) -> Any:
    body = {"model": "smollm2", "max_tokens": 60, "messages": CAPITAL, "extra_body": GREEDY, **options}
    with client.messages.stream(**body) as found:
        return found.get_final_message()


def said(message: Any) -> list[dict[str, Any]]:
    """The content but for ids, which are new each time."""
    return [
        {k: v for k, v in block.to_dict().items() if k != "id" and v is not None} for block in message.content
    ]


def test_an_answer_ends_by_itself_and_streams_alike(client: anthropic.Anthropic) -> None:
    whole, streamed = create(client), stream(client)
    assert whole.stop_reason == streamed.stop_reason == "end_turn"
    assert said(whole) == said(streamed)
    assert "Paris" in whole.content[0].text
    assert whole.usage.output_tokens == streamed.usage.output_tokens


def test_the_next_turn_reads_the_answer_from_the_cache(client: anthropic.Anthropic) -> None:
    first = stream(client)
    turns: Any = [*CAPITAL, first.to_param(), {"role": "user", "content": "And of Italy?"}]
    second = create(client, messages=turns)
    usage = first.usage
    known = usage.input_tokens + usage.cache_read_input_tokens + usage.output_tokens
    assert second.usage.cache_read_input_tokens >= (known - 1) // 16 * 16


def test_an_answer_goes_on_from_its_beginning(client: anthropic.Anthropic) -> None:
    beginning: Any = {"role": "assistant", "content": "The capital of France is"}
    message = create(client, messages=[*CAPITAL, beginning], max_tokens=3)
    assert message.content[0].text.startswith(" Paris")


def test_stop_sequences(client: anthropic.Anthropic) -> None:
    message = create(client, stop_sequences=["Paris"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paris")
    assert "Paris" not in message.content[0].text


def test_a_tool_is_called_and_its_result_heard(client: anthropic.Anthropic) -> None:
    question: Any = [{"role": "user", "content": "What is the weather in Paris?"}]
    options: Any = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "get_weather"}}
    whole = create(client, messages=question, **options)
    streamed = stream(client, messages=question, **options)
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert said(whole) == said(streamed)
    [call] = whole.content
    assert (call.type, call.name) == ("tool_use", "get_weather")
    assert call.id.startswith("toolu_")
    assert set(call.input) == {"city", "unit"}
    assert call.input["unit"] in ("C", "F")
    result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees and rain"}
    turns: Any = [*question, whole.to_param(), {"role": "user", "content": [result]}]
    answer = create(client, messages=turns, tools=[WEATHER], tool_choice={"type": "none"})
    assert answer.stop_reason == "end_turn"
    assert answer.content[0].type == "text"
    assert answer.usage.cache_read_input_tokens > whole.usage.input_tokens // 2


def test_a_call_that_is_cut_short_holds_what_is_complete(client: anthropic.Anthropic) -> None:
    options: Any = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    full = create(client, **options)
    assert full.stop_reason == "tool_use"
    for tokens in (8, full.usage.output_tokens // 2, full.usage.output_tokens - 2):
        cut, streamed = (
            create(client, max_tokens=tokens, **options),
            stream(client, max_tokens=tokens, **options),
        )
        assert cut.stop_reason == "max_tokens"
        assert said(cut) == said(streamed)


def test_tools_that_need_not_be_called(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model="smollm2", messages=CAPITAL, tools=[WEATHER])
    for choice in ({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": True}, {"type": "none"}):
        options: Any = {"tools": [WEATHER], "tool_choice": choice}
        whole, streamed = create(client, **options), stream(client, **options)
        assert said(whole) == said(streamed)
        assert whole.model_extra["octavo"]["prompt_tokens"] == counted.input_tokens
        calls = [block for block in whole.content if block.type == "tool_use"]
        assert (whole.stop_reason == "tool_use") == bool(calls)
        assert len(calls) <= (choice["type"] == "auto") * (1 if "disable_parallel_tool_use" in choice else 9)


def test_the_format_of_an_answer(client: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"capital": {"type": "string", "maxLength": 12}},
        "required": ["capital"],
        "additionalProperties": False,
    }
    message = create(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert message.stop_reason == "end_turn"
    assert list(json.loads(message.content[0].text)) == ["capital"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice names 'other'"),
        ({"tools": [WEATHER, WEATHER]}, "two functions named 'get_weather'"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "array"}}]}, "tools[0].input_schema"),
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{**WEATHER, "input_schema": {"properties": {"a": {"type": "what"}}}}]}, "tools: "),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
            "output_config.format: ",
        ),
    ],
)
def test_tools_that_cannot_be(client: anthropic.Anthropic, options: dict[str, Any], named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as caught:
        create(client, **options)
    assert named in caught.value.message
