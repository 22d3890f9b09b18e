"""SmolLM2: the same request gets the same bits however it was scheduled, on real prompts."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from octavo import LLM
from support.engines import Answer, Request, alone, answers, greedy, shuffled, together, varied
from support.sizes import FULL, sized
from support.texts import real_prompts, spread

pytestmark = pytest.mark.model

COUNT, NEW = sized(8, 32), sized(12, 48)
LENGTHS = spread(COUNT, 5, sized(300, 900))
Opens = Callable[..., AbstractContextManager[LLM]]

EACH: dict[str, dict[str, Any]] = {
    "16 tokens per step": {"max_num_batched_tokens": 16},
    "100 tokens per step": {"max_num_batched_tokens": 100},
    "block size 8": {"block_size": 8},
    "block size 32": {"block_size": 32},
    "1 thread": {"num_threads": 1},
    "no prefix caching": {"enable_prefix_caching": False},
}
AT_ONCE = {
    "16 per step, blocks of 8, 1 thread": {
        **EACH["16 tokens per step"],
        **EACH["block size 8"],
        **EACH["1 thread"],
    },
    "100 per step, blocks of 32, no prefix caching": {
        **EACH["100 tokens per step"],
        **EACH["block size 32"],
        **EACH["no prefix caching"],
    },
}
VARIATIONS = {**AT_ONCE, **EACH} if FULL else AT_ONCE


@pytest.fixture(scope="module", params=sized(["bfloat16"], ["bfloat16", "float32"]))
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(dtype: str, smollm2_of: Opens) -> Iterator[LLM]:
    """512 tokens per step, blocks of 16, 2 threads, prefix caching."""
    with smollm2_of(dtype=dtype, num_threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def requests(base: LLM) -> list[Request]:
    prompts = real_prompts(LENGTHS, base.engine.tokenizer.encode)
    return [(prompt, varied(i, NEW)) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(base: LLM, requests: list[Request]) -> list[list[Answer]]:
    """All at once, on a cold cache."""
    return together(base.engine, requests)


def test_the_requests_are_of_both_kinds(expected: list[list[Answer]], requests: list[Request]) -> None:
    assert len({answer.token_ids for [answer] in expected}) == COUNT
    assert {params.greedy for _, params in requests} == {True, False}
    sampled = [a for [a], (_, p) in zip(expected, requests, strict=True) if not p.greedy]
    assert any(rank > 1 for answer in sampled for step in answer.logprobs for _, _, rank in step[:1])


def test_alone_and_warm(base: LLM, requests: list[Request], expected: list[list[Answer]]) -> None:
    assert alone(base.engine, requests) == expected
    warm = base.generate([p for p, _ in requests], [params for _, params in requests])
    assert [answers(output) for output in warm] == expected
    assert all(output.num_cached_tokens > 0 for output in warm[COUNT // 2 :])


@pytest.mark.parametrize("options", VARIATIONS.values(), ids=VARIATIONS.keys())
def test_however_it_is_scheduled(
    options: dict[str, Any],
    dtype: str,
    smollm2_of: Opens,
    requests: list[Request],
    expected: list[list[Answer]],
) -> None:
    order = random.Random(3).sample(range(COUNT), COUNT)
    with smollm2_of(
        dtype=dtype, num_threads=options.get("num_threads", 2), **_without_threads(options)
    ) as llm:
        assert shuffled(llm.engine, requests, order) == expected
        if FULL:
            assert alone(llm.engine, requests) == expected


def _without_threads(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "num_threads"}


def test_greedy_is_a_full_recompute_at_every_step(
    dtype: str, smollm2_of: Opens, base: LLM, requests: list[Request]
) -> None:
    few, steps = sized((requests[:6], 6), (requests, NEW))
    found = together(base.engine, [(prompt, greedy(steps)) for prompt, _ in few])
    sequences = [list(prompt) for prompt, _ in few]
    with smollm2_of(dtype=dtype, enable_prefix_caching=False) as llm:
        for step in range(steps):
            outputs = llm.generate(sequences, greedy(1))
            for ids, output, [answer] in zip(sequences, outputs, found, strict=True):
                assert output.num_cached_tokens == 0
                [one] = answers(output)
                assert one.token_ids[0] == answer.token_ids[step]
                assert one.logprobs[0] == answer.logprobs[step]
                ids.append(one.token_ids[0])


def test_decoded_logprobs_are_those_of_a_prefill(
    base: LLM, requests: list[Request], expected: list[list[Answer]]
) -> None:
    whole = [[*prompt, *answer.token_ids] for (prompt, _), [answer] in zip(requests, expected, strict=True)]
    outputs = base.generate(whole, greedy(1, prompt_logprobs=0))
    for (prompt, _), [answer], output in zip(requests, expected, outputs, strict=True):
        assert output.prompt_logprobs is not None
        read = output.prompt_logprobs[len(prompt) :]
        for token, step, entries in zip(answer.token_ids, answer.logprobs, read, strict=True):
            assert entries is not None
            assert (token, entries[token].logprob, entries[token].rank) == step[0]
