"""Tools and forms of answers with the `openai` package, on a random model that only the grammar holds to them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.openai_streams import Collected, collect
from support.serving import Served

LIGHT: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "light",
        "description": "Turn a light on or off.",
        "parameters": {
            "type": "object",
            "properties": {"room": {"enum": ["hall", "attic"]}, "on": {"type": "boolean"}},
            "required": ["room", "on"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
ASK: list[Any] = [{"role": "user", "content": "Let there be light."}]
SEEDED: dict[str, Any] = {
    "model": "tiny",
    "messages": ASK,
    "max_tokens": 400,
    "seed": 11,
    "tools": [LIGHT, CLOCK],
}
VERDICT: dict[str, Any] = {
    "type": "object",
    "properties": {"good": {"type": "boolean"}, "size": {"enum": ["small", "large"]}},
    "required": ["good", "size"],
    "additionalProperties": False,
}
FORMAT: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": VERDICT}}


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def streamed(client: openai.OpenAI, **body: Any) -> Collected:
    with client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **body
    ) as stream:
        return collect(stream)


def is_valid(name: str, arguments: str) -> bool:
    value = json.loads(arguments)
    if name == "clock":
        return value == {}
    return (
        set(value) == {"room", "on"} and value["room"] in ("hall", "attic") and isinstance(value["on"], bool)
    )


CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "light"}}]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "named"])
@pytest.mark.parametrize("seed", range(4))
def test_a_call_that_must_be_made_is_valid_and_streams_the_same(
    client: openai.OpenAI, choice: Any, seed: int
) -> None:
    body = {**SEEDED, "tool_choice": choice, "parallel_tool_calls": False, "seed": seed}
    answer = client.chat.completions.create(**body).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    assert is_valid(call.function.name, call.function.arguments)
    assert choice == "required" or call.function.name == "light"
    found = streamed(client, **body).choices[0]
    assert (found.finish_reason, found.text) == ("tool_calls", "")
    (same,) = found.calls
    assert re.fullmatch("call_[0-9a-f]{24}", same["id"])
    assert (same["name"], same["arguments"]) == (call.function.name, call.function.arguments)


def liking(served: Served, characters: str, bias: float) -> dict[str, Any]:
    """A preference for single characters."""
    return {"logit_bias": {str(token): bias for token in served.state.tokenizer.encode(characters, False)}}


def test_several_calls_of_one_answer(client: openai.OpenAI, served: Served) -> None:
    body = {**SEEDED, "tool_choice": "required", **liking(served, "\n", 50)}
    answer = client.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "length"
    calls = answer.message.tool_calls
    assert calls is not None
    assert len(calls) > 2
    for call in calls[:-1]:
        assert call.type == "function"
        assert is_valid(call.function.name, call.function.arguments)
    assert len({call.id for call in calls}) == len(calls)
    found = streamed(client, **body).choices[0]
    assert [(call["name"], call["arguments"]) for call in found.calls] == [
        (call.function.name, call.function.arguments) for call in calls if call.type == "function"
    ]
    assert found.finish_reason == "length"


def test_a_call_cut_off_is_given_as_far_as_it_got(client: openai.OpenAI) -> None:
    body = {**SEEDED, "tool_choice": CHOICES[1], "max_tokens": 60}
    answer = client.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls is not None
    (call,) = answer.message.tool_calls
    assert call.function.name == "light"
    assert '{"room": "attic", "on": false}'.startswith(call.function.arguments[:9])
    found = streamed(client, **body).choices[0]
    assert found.calls[0]["arguments"] == call.function.arguments


def test_left_alone_it_may_answer_in_text_and_streams_the_same(client: openai.OpenAI) -> None:
    body = {**SEEDED, "max_tokens": 60, "n": 3, "logprobs": True}
    answers = client.chat.completions.create(**body).choices
    found = streamed(client, **body).choices
    assert [choice.text for choice in found] == [choice.message.content or "" for choice in answers]
    assert [choice.logprobs for choice in found] == [
        None if choice.logprobs is None else choice.logprobs.model_dump()["content"] for choice in answers
    ]


def test_a_conversation_goes_on_with_what_a_call_returned(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(**SEEDED, tool_choice="required").choices[0].message
    assert first.tool_calls is not None
    results = [{"role": "tool", "tool_call_id": call.id, "content": "done"} for call in first.tool_calls]
    turn: list[Any] = [*ASK, first.model_dump(), *results]
    second = client.chat.completions.create(**{**SEEDED, "messages": turn}, tool_choice="none")
    assert second.choices[0].message.tool_calls is None
    assert second.choices[0].finish_reason in ("stop", "length")


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tools", [None, [LIGHT]], ids=["alone", "with tools not to be called"])
def test_an_answer_matches_its_schema_and_streams_the_same(
    client: openai.OpenAI, seed: int, tools: Any
) -> None:
    body = {**SEEDED, "seed": seed, "response_format": FORMAT, "tools": tools}
    if tools:
        body["tool_choice"] = "none"
    answer = client.chat.completions.create(**body).choices[0]
    assert answer.finish_reason == "stop"
    assert answer.message.content is not None
    value = json.loads(answer.message.content)
    assert set(value) == {"good", "size"}
    assert isinstance(value["good"], bool)
    assert value["size"] in ("small", "large")
    assert streamed(client, **body).choices[0].text == answer.message.content


def test_with_tools_and_a_schema_it_is_a_call_or_json(client: openai.OpenAI) -> None:
    body = {**SEEDED, "response_format": FORMAT, "parallel_tool_calls": False, "n": 8}
    for choice in client.chat.completions.create(**body).choices:
        if choice.message.tool_calls:
            (call,) = choice.message.tool_calls
            assert call.type == "function"
            assert is_valid(call.function.name, call.function.arguments)
        else:
            assert choice.message.content is not None
            assert set(json.loads(choice.message.content)) == {"good", "size"}


def test_any_json_object(client: openai.OpenAI, served: Served) -> None:
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASK,
        seed=1,
        response_format={"type": "json_object"},
        extra_body=liking(served, '"}', 30),  # so that it ends
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


FORMS: list[tuple[dict[str, Any], str]] = [
    ({"choice": ["yes", "no"]}, "yes|no"),
    ({"regex": "[a-f]{3}-[0-9]{2}"}, "[a-f]{3}-[0-9]{2}"),
    ({"grammar": 'start: "a" | "b" start'}, "b*a"),
    ({"json": {"enum": [1, 2]}}, "[12]"),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=[next(iter(form)) for form, _ in FORMS])
def test_forms_by_vllms_names(client: openai.OpenAI, form: dict[str, Any], pattern: str) -> None:
    body = {"structured_outputs": form}
    chat = client.chat.completions.create(model="tiny", messages=ASK, seed=5, max_tokens=60, extra_body=body)
    assert re.fullmatch(pattern, chat.choices[0].message.content or "")
    plain = client.completions.create(model="tiny", prompt="So:", seed=5, max_tokens=60, n=3, extra_body=body)
    assert all(re.fullmatch(pattern, choice.text) for choice in plain.choices)


@pytest.mark.parametrize("strict", [False, True])
def test_what_cannot_be_enforced_of_a_schema_is_refused_where_it_is_strict(
    client: openai.OpenAI, strict: bool
) -> None:
    parameters = {
        **LIGHT["function"]["parameters"],
        "if": {"properties": {"on": {"const": True}}},
        "then": False,
    }
    tool = {"type": "function", "function": {"name": "light", "parameters": parameters, "strict": strict}}
    body = {**SEEDED, "tools": [tool], "tool_choice": "required"}
    if strict:
        with pytest.raises(openai.BadRequestError, match="tools") as caught:
            client.chat.completions.create(**body)
        assert caught.value.param == "tools"
    else:
        calls = client.chat.completions.create(**body).choices[0].message.tool_calls
        assert calls is not None
        assert is_valid("light", calls[0].function.arguments)  # type: ignore[union-attr]


BAD_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tool_choice": {"type": "function", "function": {"name": "lamp"}}}, "tool_choice"),
    ({"tools": [LIGHT, LIGHT]}, "tools"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "has space"}}]}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]},
        "tools",
    ),
    ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    (
        {
            "tools": None,
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}},
        },
        "response_format",
    ),
    ({"tools": None, "extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
    ({"tools": None, "extra_body": {"structured_outputs": {}}}, "structured_outputs"),
    (
        {"tools": None, "response_format": FORMAT, "extra_body": {"structured_outputs": {"regex": "a"}}},
        "structured",
    ),
]


@pytest.mark.parametrize(
    ("body", "word"), REFUSED, ids=[f"{word} {i}" for i, (_, word) in enumerate(REFUSED)]
)
def test_what_cannot_be_enforced_is_refused_by_name(
    client: openai.OpenAI, body: dict[str, Any], word: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**SEEDED, **body}, stream=stream)
        assert (caught.value.param or "").startswith(word)
        assert word in caught.value.message
