"""Odd input is refused with field and value, and a running neighbour never notices."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from octavo import LLM, SamplingParams
from octavo.errors import ContextLengthExceeded, InvalidRequest, KVCacheTooSmall
from octavo.live import LiveRequest
from support.engines import answers, greedy, together

pytestmark = pytest.mark.model

V = 49152
LIMIT = 512
Prompt = str | list[int]
ODD: dict[str, tuple[Callable[[], tuple[Any, Any]], str, str]] = {
    "no text": (lambda: ("", greedy(4)), "prompt", "empty"),
    "no tokens": (lambda: ([], greedy(4)), "prompt", "empty"),
    "token -1": (lambda: ([5, -1], greedy(4)), "prompt", r"prompt\[1\]=-1"),
    "token V": (lambda: ([V], greedy(4)), "prompt", rf"prompt\[0\]={V}"),
    "token 2^31": (lambda: ([1, 2, 2**31], greedy(4)), "prompt", rf"prompt\[2\]={2**31}"),
    "token 2^63": (lambda: ([2**63], greedy(4)), "prompt", rf"prompt\[0\]={2**63}"),
    "token 1.0": (lambda: ([7, 1.0], greedy(4)), "prompt", r"prompt\[1\]=1\.0"),
    "token True": (lambda: ([True, 3], greedy(4)), "prompt", r"prompt\[0\]=True"),
    "bytes": (lambda: ([b"abc"], greedy(4)), "prompt", "prompt.*bytes|abc"),
    "half a surrogate": (lambda: ("a\ud800", greedy(4)), "prompt", "surrogate at character 1"),
    "max_tokens -1": (lambda: ("Hi", SamplingParams(max_tokens=-1)), "max_tokens", "max_tokens=-1"),
    "max_tokens 1.5": (lambda: ("Hi", SamplingParams(max_tokens=1.5)), "max_tokens", r"max_tokens=1\.5"),
    "n 0": (lambda: ("Hi", SamplingParams(n=0)), "n", "n=0"),
    "temperature NaN": (
        lambda: ("Hi", SamplingParams(temperature=float("nan"))),
        "temperature",
        "temperature=nan",
    ),
    "temperature -1": (lambda: ("Hi", SamplingParams(temperature=-1)), "temperature", "temperature=-1"),
    "top_p 0": (lambda: ("Hi", SamplingParams(top_p=0)), "top_p", "top_p=0"),
    "top_p 2": (lambda: ("Hi", SamplingParams(top_p=2)), "top_p", "top_p=2"),
    "stop ''": (lambda: ("Hi", SamplingParams(stop=[""])), "stop", r"stop=\[''\]"),
    "logit_bias of V": (lambda: ("Hi", SamplingParams(logit_bias={V: 1.0})), "logit_bias", str(V)),
    "allowed token V": (lambda: ("Hi", SamplingParams(allowed_token_ids=[V])), "allowed_token_ids", str(V)),
    "too long": (lambda: ([9] * (LIMIT + 100), greedy(4)), "prompt", f"{LIMIT} tokens.*{LIMIT + 100}"),
}


@pytest.fixture(scope="module")
def llm(smollm2_of: Callable[..., AbstractContextManager[LLM]]) -> Iterator[LLM]:
    """512 positions of context."""
    with smollm2_of(max_model_len=LIMIT, kv_cache_memory="64MiB") as llm:
        yield llm


@pytest.fixture
def neighbour(llm: LLM) -> Iterator[LiveRequest]:
    """Running before and during the test; afterwards its answer must be the one it gives alone."""
    request = (llm.engine.tokenizer.encode("The quick brown fox"), greedy(12))
    [alone] = together(llm.engine, [request])
    live = llm.engine.prepare("neighbour", *request)
    llm.engine.submit(live)
    for _ in range(3):
        llm.engine.step()
    yield live
    while llm.engine.has_work:
        llm.engine.step()
    assert answers(live.output()) == alone
    llm.check()
    assert llm.stats().bytes_running == 0


@pytest.mark.parametrize(("make", "field", "message"), ODD.values(), ids=ODD.keys())
def test_odd_input_is_refused(
    make: Callable[[], tuple[Any, Any]], field: str, message: str, llm: LLM, neighbour: LiveRequest
) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        llm.engine.prepare("odd", *make())
    assert caught.value.param == field
    assert caught.value.status == 400
    assert not neighbour.finished
    assert llm.stats().running == 1
    assert llm.stats().waiting == 0


def test_generate_refuses_before_it_computes_any(llm: LLM) -> None:
    steps = llm.engine.steps
    for bad in ([], [-1], [V], [9] * LIMIT):
        with pytest.raises(InvalidRequest):
            llm.generate([[1, 2, 3], bad], greedy(2))
    with pytest.raises(InvalidRequest, match="prompt"):
        llm.generate(["fine", ""], greedy(2))
    assert llm.engine.steps == steps
    assert (llm.stats().running, llm.stats().waiting) == (0, 0)
    llm.check()


def test_an_exact_fit_works_and_one_more_is_refused(llm: LLM, neighbour: LiveRequest) -> None:
    fits = [11] * (LIMIT - 1)
    live = llm.engine.prepare("fits", fits, greedy(100))
    llm.engine.submit(live)
    with pytest.raises(ContextLengthExceeded) as caught:
        llm.engine.prepare("one more", [*fits, 11], greedy(100))
    assert f"maximum context length is {LIMIT} tokens" in str(caught.value)
    assert f"the prompt has {LIMIT}" in str(caught.value)
    assert "'one more'" in str(caught.value)
    while not live.finished:
        llm.engine.step()
    [answer] = answers(live.output())
    assert (len(answer.token_ids), answer.finish_reason) == (1, "length")


def test_an_answer_ends_where_the_context_does(llm: LLM) -> None:
    room = 5
    [output] = llm.generate([[11] * (LIMIT - room)], greedy(1000))
    [completion] = output.outputs
    assert (len(completion.token_ids), completion.finish_reason) == (room, "length")
    [exact] = llm.generate([[11] * (LIMIT - room)], greedy(room))
    assert exact.outputs[0].token_ids == completion.token_ids
    [rest] = llm.generate([[11] * (LIMIT - room)], SamplingParams(temperature=0, max_tokens=None))
    assert rest.outputs[0].token_ids == completion.token_ids


def test_an_exact_fit_of_the_cache_works_and_one_more_is_refused(
    smollm2_of: Callable[..., AbstractContextManager[LLM]],
) -> None:
    layers, kv_heads, head_dim, block_size = 30, 3, 64, 16
    block = layers * kv_heads * 2 * block_size * head_dim * 2
    with smollm2_of(dtype="bfloat16", kv_cache_memory=3 * block) as small:
        [output] = small.generate([[11] * 47], greedy(1000))
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")
        with pytest.raises(KVCacheTooSmall, match="holds at most 48 tokens, the prompt has 48") as caught:
            small.generate([[11] * 48], greedy(1))
        assert f"kv_cache_memory of at least {4 * block}" in str(caught.value)


def test_a_text_that_cannot_fit_is_refused_before_it_is_encoded(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    text = "The quick brown fox jumps over the lazy dog. 0123456789 Grüße \U0001f600\x04\x06" * 50
    assert 0 < tokenizer.fewest_tokens(text) <= len(tokenizer.encode(text))
    with pytest.raises(ContextLengthExceeded, match=f"maximum context length is {LIMIT} tokens, .* at least"):
        llm.generate(text * 1000)
