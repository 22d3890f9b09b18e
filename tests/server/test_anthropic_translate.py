"""From Anthropic's messages to what a chat template reads."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.server.anthropic import translate
from octavo.server.anthropic.content import Content, PlainReader
from octavo.server.anthropic.schemas import MessagesRequest
from octavo.server.openai.schemas import NamedToolChoice
from octavo.server.openai.translate import text_schema

KEEP = {"type": "ephemeral"}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "2"}


def request(*messages: tuple[str, Any], **options: Any) -> MessagesRequest:
    return MessagesRequest.model_validate(
        {
            "model": "m",
            "max_tokens": 1,
            "messages": [{"role": role, "content": content} for role, content in messages],
            **options,
        }
    )


def text(text: str, **options: Any) -> dict[str, Any]:
    return {"type": "text", "text": text, **options}


def chat_messages(body: MessagesRequest, mark: str = "") -> list[dict[str, Any]]:
    return [message.model_dump(exclude_none=True) for message in translate.chat_request(body, mark).messages]


def test_system_and_blocks_become_plain_messages() -> None:
    body = request(("user", [text("a"), text("b")]), ("user", "c"), system=[text("x"), text("y")])
    assert chat_messages(body) == [
        {"role": "system", "content": "x\ny"},
        {"role": "user", "content": "a\nb\nc"},
    ]
    assert translate.chat_request(body).continue_final_message is None


def test_calls_and_results_become_messages_of_their_own() -> None:
    body = request(
        ("user", "1 + 1?"),
        ("assistant", [text("Let me see."), CALL, {**CALL, "id": "toolu_2"}]),
        ("user", [RESULT, {**RESULT, "tool_use_id": "toolu_2", "is_error": True}, text("Well?")]),
        tools=[{"name": "add", "input_schema": {"type": "object"}}],
    )
    called = {"name": "add", "arguments": '{"a": 1}'}
    assert chat_messages(body)[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": called},
                {"id": "toolu_2", "type": "function", "function": called},
            ],
        },
        {"role": "tool", "tool_call_id": "toolu_1", "content": "2"},
        {"role": "tool", "tool_call_id": "toolu_2", "content": "Error: 2"},
        {"role": "user", "content": "Well?"},
    ]


@pytest.mark.parametrize(
    ("choice", "chosen", "parallel"),
    [
        (None, None, None),
        ({"type": "none"}, "none", None),
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}, True),
    ],
)
def test_tools_and_their_choice(choice: Any, chosen: Any, parallel: bool | None) -> None:
    body = translate.chat_request(request(("user", "?"), tools=[TOOL], tool_choice=choice))
    [tool] = body.tools or []
    function = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert tool.model_dump(exclude_none=True) == {"type": "function", "function": function}
    named = body.tool_choice
    assert (named.model_dump() if isinstance(named, NamedToolChoice) else named) == chosen
    assert body.parallel_tool_calls == parallel


def test_sampling_and_format() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = translate.chat_request(
        request(
            ("user", "?"),
            temperature=0.5,
            top_p=0.9,
            top_k=5,
            stop_sequences=["x"],
            output_config={"format": {"type": "json_schema", "schema": schema}},
        )
    )
    assert (body.temperature, body.top_p, body.top_k, body.stop, body.max_tokens) == (0.5, 0.9, 5, ["x"], 1)
    assert text_schema(body.response_format) == schema


@pytest.mark.parametrize(
    ("beginning", "goes_on"), [("The colour", True), ("", False), ([text("")], False), ([], False)]
)
def test_a_last_message_of_the_assistant_begins_the_answer(beginning: Any, goes_on: bool) -> None:
    body = request(("user", "A colour?"), ("assistant", beginning))
    assert (translate.chat_request(body).continue_final_message is True) == goes_on
    assert len(chat_messages(body)) == 1 + goes_on


@pytest.mark.parametrize(
    ("messages", "at"),
    [
        ([("user", [RESULT])], 0),
        ([("user", "?"), ("assistant", [CALL])], 1),
        ([("user", "?"), ("assistant", [CALL]), ("assistant", "so")], 2),
        ([("user", "?"), ("assistant", [CALL]), ("user", "so")], 2),
        ([("user", "?"), ("assistant", [CALL]), ("user", [RESULT, RESULT])], 2),
        ([("user", "?"), ("assistant", [CALL]), ("user", [text("so"), RESULT])], 2),
        ([("user", "?"), ("assistant", "It is ")], 1),
    ],
)
def test_what_cannot_follow_is_refused_by_its_place(messages: list[tuple[str, Any]], at: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_messages(request(*messages))
    assert caught.value.param == f"messages[{at}].content"
    assert caught.value.message.startswith(f"messages[{at}] ")


def test_results_may_be_spread_over_messages_of_the_user() -> None:
    second = {**CALL, "id": "toolu_2"}
    body = request(
        ("user", "?"),
        ("assistant", [CALL, second]),
        ("user", [RESULT]),
        ("user", [{**RESULT, "tool_use_id": "toolu_2"}]),
    )
    assert [m["role"] for m in chat_messages(body)] == ["user", "assistant", "tool", "tool"]


def test_nothing_to_answer_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="add a user message"):
        chat_messages(request(("assistant", "")))


def test_the_longest_time_that_is_asked_for_counts() -> None:
    assert translate.keep_for(request(("user", "a"))) is None
    assert translate.keep_for(request(("user", [text("a", cache_control=KEEP)]))) == 300
    assert translate.keep_for(request(("user", "a"), cache_control={**KEEP, "ttl": "1h"})) == 3600
    inner = {**RESULT, "content": [text("a", cache_control={**KEEP, "ttl": "1h"})]}
    body = request(
        ("user", "a"), ("assistant", [CALL]), ("user", [inner]), system=[text("x", cache_control=KEEP)]
    )
    assert translate.keep_for(body) == 3600


def rendered(body: MessagesRequest, mark: str = "") -> str:
    """As a template might write it, tools first."""
    request = translate.chat_request(body, mark)
    lines = [json.dumps(tool.function.model_dump(), ensure_ascii=False) for tool in request.tools or []]
    for message in chat_messages(body, mark):
        lines.append(f"{message['role']}: {message['content'].strip()}")
        lines += [call["function"]["arguments"] for call in message.get("tool_calls", [])]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("last", "options"),
    [
        ("system: x", {"system": [text("x", cache_control=KEEP), text("y")]}),
        ("system: x\ny", {"system": [text("x", cache_control=KEEP), text("y", cache_control=KEEP)]}),
        ('"parameters": {"type": "object', {"tools": [{**TOOL, "cache_control": KEEP}], "system": "x"}),
        ("user: a", {"messages": [("user", [text("a", cache_control=KEEP), text("b")]), ("user", "c")]}),
        (
            '"a": 1',
            {
                "messages": [
                    ("user", "q"),
                    ("assistant", [{**CALL, "cache_control": KEEP}]),
                    ("user", [RESULT]),
                ]
            },
        ),
        (
            "tool: 2",
            {
                "messages": [
                    ("user", "q"),
                    ("assistant", [CALL]),
                    ("user", [{**RESULT, "cache_control": KEEP}, text("so")]),
                ]
            },
        ),
    ],
)
def test_where_the_last_marked_block_ends(last: str, options: dict[str, Any]) -> None:
    body = request(*options.pop("messages", [("user", "question")]), **options)
    whole = rendered(body)
    length = translate.marked_length(whole, rendered(body, translate.MARK))
    assert whole[:length].endswith(last)


def test_a_mark_that_the_template_leaves_out_marks_nothing() -> None:
    assert translate.marked_length("abc", "abc") == 0


def test_tokens_within_a_length() -> None:
    def decode(ids: Any) -> str:
        return bytes(ids).decode(errors="replace")

    ids = list("aé€x".encode())
    counts = [translate.tokens_within(length, ids, decode) for length in range(5)]
    assert counts[0] == 0
    assert counts[3:] == [6, 7]
    assert counts == sorted(counts)


def test_the_content_of_plain_text_is_one_block() -> None:
    content = Content(PlainReader())
    events = [*content.feed("a"), *content.feed(""), *content.feed("b"), *content.finish()]
    assert [e["type"].removeprefix("content_block_") for e in events] == ["start", "delta", "delta", "stop"]
    assert content.blocks == [{"type": "text", "text": "ab"}]
    assert list(Content(PlainReader()).finish()) == []
