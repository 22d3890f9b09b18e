"""Completions with the `openai` package over a socket, on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from octavo.server.openai.responses import Completion
from support.openai_streams import checked, events
from support.serving import Served

SEEDED: dict[str, Any] = {"model": "tiny", "prompt": "Once upon a time", "seed": 3}


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(served: Served, **body: Any) -> httpx.Response:
    with served.client() as client:
        return client.post("/v1/completions", json=body)


def joined(client: openai.OpenAI, **body: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Choices put together from a stream, and its last chunk."""
    choices: dict[int, dict[str, Any]] = {}
    with client.completions.create(stream=True, stream_options={"include_usage": True}, **body) as stream:
        chunks = [chunk.model_dump() for chunk in stream]
    *chunks, last = chunks
    assert last["choices"] == []
    for chunk in chunks:
        assert chunk["usage"] is None
        for choice in chunk["choices"]:
            known = choices.setdefault(
                choice["index"], {**choice, "text": "", "logprobs": None, "finish_reason": None}
            )
            assert known["finish_reason"] is None
            known["text"] += choice["text"]
            known["finish_reason"] = choice["finish_reason"]
            if choice["logprobs"] is not None:
                known["logprobs"] = known["logprobs"] or {key: [] for key in choice["logprobs"]}
                for key, values in choice["logprobs"].items():
                    known["logprobs"][key] += values
    return [choices[index] for index in sorted(choices)], last


KEYS = ("index", "text", "finish_reason", "logprobs")


def same(choices: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: choice[key] for key in KEYS} for choice in choices]


def test_a_completion_and_its_receipt(served: Served) -> None:
    answer = checked(Completion, post(served, **SEEDED).text)
    (choice,) = answer["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert answer["usage"]["completion_tokens"] == 16
    assert answer["octavo"]["completion_tokens"] == 16


VARIED: list[dict[str, Any]] = [
    {},
    {"n": 3, "best_of": 3},
    {"logprobs": 3, "temperature": 0},
    {"echo": True},
    {"echo": True, "logprobs": 2, "n": 2},
    {"echo": True, "logprobs": 0, "max_tokens": 0},
    {"prompt": ["one", "two", "three"], "n": 2},
    {"prompt": ["one", "two"], "echo": True, "logprobs": 1},
    {"prompt": [5, 6, 7, 8], "echo": True},
    {"prompt": [[5, 6, 7, 8], [9]], "stop": ["a", "b", "c"], "max_tokens": 60},
]


@pytest.mark.parametrize("options", VARIED, ids=str)
def test_a_stream_says_what_the_whole_completion_says(client: openai.OpenAI, options: dict[str, Any]) -> None:
    body = {**SEEDED, **options}
    client.completions.create(**body)
    whole = client.completions.create(**body).model_dump()
    choices, last = joined(client, **body)
    assert same(choices) == same(whole["choices"])
    assert last["usage"] == whole["usage"]
    receipts, known = last["octavo"], whole["octavo"]
    if isinstance(known, dict):
        receipts, known = [receipts], [known]
    timeless = {"queued_ms": 0}
    assert [receipt | timeless for receipt in receipts] == [receipt | timeless for receipt in known]


def test_prompts_of_one_call_are_answered_as_alone(client: openai.OpenAI) -> None:
    prompts = ["one", "two two", "three three three"]
    alone = [client.completions.create(**{**SEEDED, "prompt": p}, n=2).choices for p in prompts]
    together = client.completions.create(**{**SEEDED, "prompt": prompts}, n=2)
    assert [choice.index for choice in together.choices] == list(range(6))
    assert [choice.text for choice in together.choices] == [c.text for own in alone for c in own]


def test_usage_of_several_prompts_is_their_sum_and_each_has_its_receipt(served: Served) -> None:
    answer = checked(Completion, post(served, **{**SEEDED, "prompt": ["one", "three"]}).text)
    assert [receipt["prompt_tokens"] for receipt in answer["octavo"]] == [3, 5]
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 32)


def test_logprobs_spell_the_text_at_their_offsets(client: openai.OpenAI) -> None:
    choice = client.completions.create(**SEEDED, logprobs=2).choices[0]
    found = choice.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.text_offset is not None
    assert found.top_logprobs is not None
    assert len(found.tokens) == len(found.text_offset) == len(found.top_logprobs) == 16
    for token, offset, top in zip(found.tokens, found.text_offset, found.top_logprobs, strict=True):
        assert token in top
        assert 2 <= len(top) <= 3
        if not token.startswith("bytes:"):
            assert choice.text[offset : offset + len(token)] == token


def test_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, served: Served) -> None:
    answer = client.completions.create(**SEEDED, echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == ("Once upon a time", "length")
    found = choice.logprobs
    assert found is not None
    assert found.tokens == list("Once upon a time")
    assert found.text_offset == list(range(16))
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    assert all(logprob < 0 for logprob in found.token_logprobs[1:])
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (16, 0)


def test_the_shape_of_a_stream(served: Served) -> None:
    raw = events(post(served, **SEEDED, stream=True).text)
    assert raw[-1] == "[DONE]"
    chunks = [checked(Completion, data) for data in raw[:-1]]
    assert all("usage" not in chunk and "octavo" not in chunk for chunk in chunks)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"suffix": "x"}, "suffix"),
    ({"best_of": 2}, "best_of"),
    ({"prompt": []}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": ["a", 1]}, "prompt"),
    ({"prompt": [264]}, "prompt"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
    ({"prompt": "x" * 1024}, "maximum context length is 1024"),
    ({"logprobs": 20, "n": 100, "max_tokens": 1000}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"echo": True, "logprobs": 1, "extra_body": {"prompt_logprobs": 2}}, "prompt_logprobs"),
    ({"extra_body": {"messages": []}}, "messages"),
    ({"extra_body": {"use_beam_search": True}}, "use_beam_search"),
]


@pytest.mark.parametrize(
    ("body", "word"), REFUSED, ids=[f"{word} {i}" for i, (_, word) in enumerate(REFUSED)]
)
def test_what_cannot_be_honoured_is_refused_by_name(
    client: openai.OpenAI, served: Served, body: dict[str, Any], word: str
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{**SEEDED, **body}, stream=stream)
        assert word in caught.value.message
        assert caught.value.param is not None
    assert served.ask(lambda engine: engine.has_work) is False
