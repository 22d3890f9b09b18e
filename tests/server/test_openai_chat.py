"""Chat completions with the `openai` package over a socket, on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from octavo.server.openai.responses import ChatChunk, ChatCompletion
from support.openai_streams import Collected, checked, collect, events
from support.serving import Served

ASK: list[Any] = [{"role": "user", "content": "Say something."}]
SEEDED: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 24, "seed": 7}
OF_A_RUN = ("id", "created")


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(served: Served, **body: Any) -> httpx.Response:
    with served.client() as client:
        return client.post("/v1/chat/completions", json=body)


def streamed(client: openai.OpenAI, **body: Any) -> Collected:
    with client.chat.completions.create(
        stream=True, stream_options={"include_usage": True}, **body
    ) as stream:
        return collect(stream)


def refused(client: openai.OpenAI, **body: Any) -> tuple[str, str]:
    """The field at fault and the message."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**SEEDED, **body})
    error = caught.value.body
    assert isinstance(error, dict)
    assert error["type"] == "invalid_request_error"
    return error["param"], error["message"]


def test_an_answer_and_its_receipt(served: Served) -> None:
    answer = checked(ChatCompletion, post(served, **SEEDED).text)
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (choice["index"], choice["finish_reason"], message["role"]) == (0, "length", "assistant")
    assert message["content"]
    assert choice["logprobs"] is None
    receipt = answer["octavo"]
    assert receipt["reused_tokens"] + receipt["computed_tokens"] == receipt["prompt_tokens"]
    assert (receipt["seed"], receipt["completion_tokens"]) == (7, 24)
    assert answer["usage"] == {
        "prompt_tokens": receipt["prompt_tokens"],
        "completion_tokens": 24,
        "total_tokens": receipt["prompt_tokens"] + 24,
        "prompt_tokens_details": {"cached_tokens": receipt["reused_tokens"]},
    }
    assert answer["model"] == "tiny"
    assert served.state.facts.digest.startswith(answer["system_fingerprint"].split("_")[1])


def test_the_same_question_again_is_read_from_the_cache(client: openai.OpenAI) -> None:
    answers = [client.chat.completions.create(**SEEDED) for _ in range(2)]
    assert answers[0].choices == answers[1].choices
    usage = answers[1].usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == (usage.prompt_tokens - 1) // 16 * 16


VARIED: list[dict[str, Any]] = [
    {},
    {"n": 3},
    {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    {"logprobs": True, "n": 2},
    {"stop": ["e", "q"], "max_tokens": 100},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "logit_bias": {"100": 5}},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "ignore_eos": True}},
    {"extra_body": {"min_tokens": 8, "stop_token_ids": list(range(60, 120))}, "max_tokens": 100},
    {"extra_body": {"context_policy": "window", "sinks": 16, "window": 32}, "max_tokens": 80},
]


@pytest.mark.parametrize("options", VARIED, ids=str)
def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI, options: dict[str, Any]) -> None:
    body = {**SEEDED, **options}
    client.chat.completions.create(**body)  # the cache is as warm for one as for the other
    whole = client.chat.completions.create(**body).model_dump()
    found = streamed(client, **body)
    assert [choice.text for choice in found.choices] == [c["message"]["content"] for c in whole["choices"]]
    assert [choice.finish_reason for choice in found.choices] == [
        c["finish_reason"] for c in whole["choices"]
    ]
    assert [choice.stop_reason for choice in found.choices] == [c["stop_reason"] for c in whole["choices"]]
    assert [choice.logprobs for choice in found.choices] == [
        c["logprobs"] and c["logprobs"]["content"] for c in whole["choices"]
    ]
    assert found.usage == whole["usage"]
    timeless = {"queued_ms": 0}
    assert found.octavo | timeless == whole["octavo"] | timeless


def test_the_shape_of_a_stream(served: Served) -> None:
    response = post(served, **SEEDED, n=2, stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    raw = events(response.text)
    assert raw[-1] == "[DONE]"
    chunks = [checked(ChatChunk, data) for data in raw[:-1]]
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 48
    assert last["octavo"]["completion_tokens"] == 48
    assert all(chunk["usage"] is None and "octavo" not in chunk for chunk in chunks)
    for index in range(2):
        own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in c["delta"] and c["finish_reason"] is None for c in own[1:-1])
        assert (own[-1]["delta"], own[-1]["finish_reason"]) == ({}, "length")


def test_without_include_usage_nothing_follows_the_choices(served: Served) -> None:
    raw = events(post(served, **SEEDED, stream=True).text)
    assert raw[-1] == "[DONE]"
    chunks = [checked(ChatChunk, data) for data in raw[:-1]]
    assert all("usage" not in chunk and "octavo" not in chunk for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_several_answers_are_independent_and_the_first_is_that_of_one(client: openai.OpenAI) -> None:
    alone = client.chat.completions.create(**SEEDED).choices[0].message.content
    texts = [c.message.content for c in client.chat.completions.create(**SEEDED, n=3).choices]
    assert texts[0] == alone
    assert len(set(texts)) == 3


def test_a_stop_string_ends_the_answer_and_no_chunk_shows_its_beginning(client: openai.OpenAI) -> None:
    text = client.chat.completions.create(**{**SEEDED, "max_tokens": 100}).choices[0].message.content
    assert text is not None
    stop = text[20:24]
    before = text[: text.index(stop)]
    body = {**SEEDED, "max_tokens": 100, "stop": stop}
    choice = client.chat.completions.create(**body).choices[0]
    assert (choice.message.content, choice.finish_reason) == (before, "stop")
    found = streamed(client, **body).choices[0]
    assert (found.text, found.stop_reason) == (before, stop)


def test_logprobs_have_the_bytes_of_the_text(client: openai.OpenAI) -> None:
    body = {**SEEDED, "logprobs": True, "top_logprobs": 4}
    choice = client.chat.completions.create(**body).choices[0]
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert len(content) == 24
    spelled = b"".join(bytes(token.bytes or []) for token in content)
    assert spelled.decode(errors="replace") == choice.message.content
    for token in content:
        top = [entry.logprob for entry in token.top_logprobs]
        assert len(top) == 4
        assert top == sorted(top, reverse=True)
        assert token.logprob <= top[0] <= 0


def test_the_next_turn_finds_the_answer_in_the_cache(client: openai.OpenAI) -> None:
    ascii_only = {"allowed_token_ids": list(range(94))}  # so that its text is encoded to the same ids again
    first = client.chat.completions.create(**SEEDED, extra_body=ascii_only)
    turn = [
        *ASK,
        first.choices[0].message.model_dump(exclude_unset=True),
        {"role": "user", "content": "And?"},
    ]
    second = client.chat.completions.create(**{**SEEDED, "messages": turn})
    assert first.usage is not None
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    said = first.usage.total_tokens
    assert second.usage.prompt_tokens_details.cached_tokens == (said - 1) // 16 * 16


def test_the_limit_is_the_rest_of_the_context_unless_one_is_given(client: openai.OpenAI) -> None:
    limits = [{"max_completion_tokens": 5}, {"max_tokens": 5}, {"max_tokens": 5, "max_completion_tokens": 5}]
    for limit in limits:
        answer = client.chat.completions.create(model="tiny", messages=ASK, extra_body=limit)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 5
    answer = client.chat.completions.create(model="tiny", messages=ASK, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.total_tokens == 1024


def test_messages_of_every_kind_reach_the_template(client: openai.OpenAI, served: Served) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": None, "refusal": "no"},
        {"role": "user", "content": "why?"},
    ]
    as_text = served.state.tokenizer.render_chat(
        [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one\ntwo"},
            {"role": "assistant", "content": "no"},
            {"role": "user", "content": "why?"},
        ]
    )
    body = {**SEEDED, "messages": messages}
    answer = client.chat.completions.create(**body).choices[0].message.content
    plain = client.completions.create(
        model="tiny", prompt=served.state.tokenizer.encode(as_text, False), max_tokens=24, seed=7
    )
    assert answer == plain.choices[0].text


def test_a_message_may_be_continued(client: openai.OpenAI, served: Served) -> None:
    messages = [*ASK, {"role": "assistant", "content": "Well,"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    answer = client.chat.completions.create(**{**SEEDED, "messages": messages}, extra_body=extra)
    prompt = served.state.tokenizer.encode("<s><user>Say something.<assistant>Well,", False)
    plain = client.completions.create(model="tiny", prompt=prompt, max_tokens=24, seed=7)
    assert answer.choices[0].message.content == plain.choices[0].text


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "images",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}, "audio"),
    ({"messages": [{"role": "function", "content": "x", "name": "f"}]}, "role"),
    ({"messages": []}, "messages"),
    ({"modalities": ["text", "audio"], "audio": {"voice": "alloy", "format": "wav"}}, "audio"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"store": True}, "store"),
    ({"metadata": {"a": "b"}}, "metadata"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"n": 0}, "n"),
    ({"n": 1000}, "n"),
    ({"temperature": -1}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"264": 1}}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x"] * 65}, "stop"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"reasoning_effort": "high"}, "reasoning_effort"),
    ({"extra_body": {"guided_json": {}}}, "guided_json"),
    ({"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, "enable_thinking"),
    ({"extra_body": {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}}, "chat_template"),
    ({"extra_body": {"cache_ttl": 0}}, "cache_ttl"),
    ({"extra_body": {"sinks": 16}}, "sinks"),
    ({"extra_body": {"top_k": 2.5}}, "top_k"),
    ({"extra_body": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
]


@pytest.mark.parametrize(
    ("body", "word"), REFUSED, ids=[f"{word} {i}" for i, (_, word) in enumerate(REFUSED)]
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: openai.OpenAI, body: dict[str, Any], word: str
) -> None:
    param, message = refused(client, **body)
    assert param is not None
    assert word in message


def test_nulls_and_what_says_nothing_are_accepted(client: openai.OpenAI) -> None:
    names = "temperature", "n", "stop", "logit_bias", "tools", "tool_choice", "response_format", "audio"
    nothing: dict[str, Any] = dict.fromkeys(names)
    body = {**nothing, "store": False, "service_tier": "auto", "user": "u", "prompt_cache_key": "k"}
    answer = client.chat.completions.create(**SEEDED, extra_body=body)
    assert answer.choices == client.chat.completions.create(**SEEDED).choices
    assert answer.service_tier == "default"


def test_prompt_logprobs(served: Served) -> None:
    answer = checked(ChatCompletion, post(served, **SEEDED, prompt_logprobs=2).text)
    found = answer["prompt_logprobs"]
    assert len(found) == answer["usage"]["prompt_tokens"]
    assert found[0] is None
    assert all(step is not None and 2 <= len(step) <= 3 for step in found[1:])


def test_a_prompt_over_the_context_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="maximum context length is 1024 tokens") as caught:
            client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "x" * 1100}], stream=stream
            )
        assert caught.value.code == "context_length_exceeded"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(**{**SEEDED, "model": "gpt-4o"})
    assert caught.value.code == "model_not_found"
