"""Nobody's answer changes: cached or not, forked, preempted anywhere, beside neighbours that go away.

Compared are ids, text, log-probs, the pieces of the stream and the usage.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.engine import Engine
from octavo.live import LiveRequest
from octavo.params import SamplingParams
from octavo.schedule.request import Sequence
from support.engines import Request, greedy, submit, varied
from support.sharing import Preempting, Wanted, assert_sums, hear, pool, serve
from support.sizes import sized
from support.texts import spread

B = 4
POOL = 24
NEW = sized(20, 40)
LENGTHS = spread(sized(6, 32), 5, POOL * B - NEW - 2)
KINDS = sized(("llama", "qwen2, mixed windows"), ("llama", "qwen2, mixed windows", "qwen3", "gemma2", "gpt2"))
DTYPES = sized(("bfloat16",), ("bfloat16", "float32"))
EACH = [(kind, dtype) for kind in KINDS for dtype in DTYPES]


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def requests() -> list[Request]:
    """Greedy and sampled with penalties; some ask for log-probs of the prompt, some hold the end back."""
    asked: list[Request] = []
    for i, length in enumerate(LENGTHS):
        extra: dict[str, Any] = {"prompt_logprobs": 1} if i % 3 == 2 else {}
        params = varied(i, NEW)
        fields = {name: getattr(params, name) for name in params.__dataclass_fields__}
        asked.append((tokens(length, 70 + i), SamplingParams(**{**fields, **extra})))
    return asked


def narrow(kind: str, dtype: str) -> dict[str, Any]:
    """A pool of 24 blocks, and steps short enough that every prompt takes several."""
    memory = pool(POOL, B, kind, "bf16" if dtype == "bfloat16" else "f32")
    return {"dtype": dtype, "block_size": B, "kv_cache_memory": memory, "max_num_batched_tokens": 7}


def each_step(_: LiveRequest, __: Sequence) -> bool:
    return True


def before_first_token(live: LiveRequest, _: Sequence) -> bool:
    return not live.answers


def at_block_edge(live: LiveRequest, sequence: Sequence) -> bool:
    return bool(live.answers) and sequence.num_computed % B == 0


def one_off_block_edge(live: LiveRequest, sequence: Sequence) -> bool:
    return bool(live.answers) and sequence.num_computed % B in (1, B - 1)


MOMENTS: dict[str, Wanted] = {
    "at once": each_step,
    "before the first token": before_first_token,
    "at a block's edge": at_block_edge,
    "beside a block's edge": one_off_block_edge,
}


@pytest.mark.parametrize(("kind", "dtype"), EACH)
def test_cached_or_not_cold_or_warm(kind: str, dtype: str, single_of: Callable[..., Engine]) -> None:
    plain = single_of(kind, dtype=dtype, enable_prefix_caching=False)
    expected = hear(plain, requests())
    cached = single_of(kind, dtype=dtype, block_size=B, max_num_batched_tokens=30)
    for temperature in ("cold", "warm"):
        heard, receipts = serve(cached, requests())
        assert heard == expected
        reused = [receipt.reused_tokens for receipt in receipts]
        read = [params.prompt_logprobs is not None for _, params in requests()]
        warm = [temperature == "warm" and not r for r in read]
        assert [bool(count) for count in reused] == [w and n > B for w, n in zip(warm, LENGTHS, strict=True)]
    for request, right in zip(requests(), expected, strict=True):
        assert hear(plain, [request]) == hear(cached, [request]) == [right]


@pytest.mark.parametrize(("kind", "dtype"), EACH)
@pytest.mark.parametrize("moment", MOMENTS)
def test_preempted_three_times_each(
    moment: str, kind: str, dtype: str, single_of: Callable[..., Engine]
) -> None:
    """In a pool of 24 blocks against a large one. Few prompts take three steps, so more before the first token."""
    asked = requests()
    if moment == "before the first token":
        longest = POOL * B - NEW - 1
        asked = [(tokens(min(len(p) + 15, longest), i), params) for i, (p, params) in enumerate(asked)]
    expected = hear(single_of(kind, dtype=dtype, enable_prefix_caching=False), asked)
    engine = single_of(kind, poison=True, **narrow(kind, dtype))
    preempting = Preempting(engine, MOMENTS[moment])
    heard, receipts = serve(engine, asked, preempting)
    assert heard == expected
    assert list(preempting.count.values()) == [3] * len(asked)
    assert all(receipt.preemptions >= 3 for receipt in receipts)
    assert_sums(engine.scheduler.totals, receipts)


@pytest.mark.parametrize(("kind", "dtype"), EACH)
def test_preempted_by_pressure(kind: str, dtype: str, single_of: Callable[..., Engine]) -> None:
    """Eight answers that grow to 16 blocks each, in 24; now and then one is preempted on top of that."""
    asked = [(tokens(3 + i, 30 + i), varied(i, 58)) for i in range(8)]
    expected = hear(single_of(kind, dtype=dtype, enable_prefix_caching=False), asked)
    for times in (0, 3):
        engine = single_of(kind, poison=True, **narrow(kind, dtype))
        heard, receipts = serve(engine, asked, Preempting(engine, at_block_edge, times))
        assert heard == expected
        events = [event for event in engine.events() if event.kind == "preempted"]
        assert {event.reason for event in events} == ({"pressure", "asked"} if times else {"pressure"})
        assert len(events) == sum(receipt.preemptions for receipt in receipts)
        assert all(receipt.preemptions >= times for receipt in receipts)
        assert_sums(engine.scheduler.totals, receipts)


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_preempted_at_every_step_there_is(caching: bool, single_of: Callable[..., Engine]) -> None:
    [asked] = requests()[1:2]
    expected = hear(single_of("llama", enable_prefix_caching=False), [asked])
    engine = single_of("llama", enable_prefix_caching=caching, **narrow("llama", "bfloat16"))
    seen: set[int] = set()

    def new_length(_: LiveRequest, sequence: Sequence) -> bool:
        fresh = sequence.num_computed not in seen
        seen.add(sequence.num_computed)
        return fresh

    heard, [receipt] = serve(engine, [asked], Preempting(engine, new_length, times=1000))
    assert heard == expected
    assert receipt.preemptions >= NEW - 1
    assert (receipt.recomputed_tokens > NEW * len(asked[0])) == (not caching)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("length", [9, 12, 30])
def test_choices_preempted(moment: str, length: int, single_of: Callable[..., Engine]) -> None:
    """Choice 0 of three is the one of n = 1; each of them is preempted wherever that can be."""
    one, three = (greedy(NEW, temperature=1.2, seed=9, n=n) for n in (1, 3))
    prompt = tokens(length, length)
    roomy = single_of("llama", block_size=B)
    [expected] = hear(roomy, [(prompt, three)])
    assert len({answer.token_ids for answer in expected.answers}) == 3
    [alone] = hear(roomy, [(prompt, one)])
    assert (alone.answers[0], alone.chunks[0]) == (expected.answers[0], expected.chunks[0])
    assert expected.usage == (length, 3 * NEW)
    engine = single_of("llama", poison=True, **{**narrow("llama", "bfloat16"), "max_num_batched_tokens": 3})
    preempting = Preempting(engine, MOMENTS[moment])
    heard, [receipt] = serve(engine, [(prompt, three)], preempting)
    assert heard == [expected]
    choices = 1 if moment == "before the first token" else 3
    assert len(preempting.count) == choices
    assert receipt.preemptions >= sum(preempting.count.values()) == 3 * choices
    assert receipt.computed_tokens == length


def test_a_fork_stores_the_prompt_once(single_of: Callable[..., Engine]) -> None:
    """Four choices of ten and a half blocks: ten are shared, the open one is copied, cached or not."""
    prompt, params = tokens(10 * B + 2, 1), greedy(4, temperature=1.0, seed=1, n=4)
    for caching in (True, False):
        engine = single_of("llama", block_size=B, enable_prefix_caching=caching)
        submit(engine, "forked", (prompt, params))
        engine.step()
        assert engine.stats().blocks == {"open": 4, "sealed": 10}
        assert engine.stats().running == 4
        engine.check()


def letters(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer.encode(text)


def forced(engine: Engine, alphabet: str, seed: int, **options: Any) -> SamplingParams:
    """Tokens drawn from the bytes of `alphabet` alone."""
    allowed = sorted(set(letters(engine, alphabet)))
    defaults = {"temperature": 2.0, "top_k": 0, "seed": seed, "allowed_token_ids": allowed}
    return greedy(NEW, **{**defaults, **options})


@pytest.mark.parametrize("seed", range(3))
def test_preempted_inside_a_character(seed: int, single_of: Callable[..., Engine]) -> None:
    plain = single_of("llama", enable_prefix_caching=False)
    lead, _ = letters(plain, "é")

    def inside_character(live: LiveRequest, sequence: Sequence) -> bool:
        return bool(live.answers) and sequence.token_ids[-1] == lead

    asked = [(tokens(13, seed), forced(plain, "éa", 10 * seed + i)) for i in range(3)]
    expected = hear(plain, asked)
    assert any("é" in heard.answers[0].text for heard in expected)
    assert any(text == "" for heard in expected for _, text in heard.chunks[0])
    engine = single_of("llama", poison=True, **narrow("llama", "bfloat16"))
    preempting = Preempting(engine, inside_character)
    assert hear(engine, asked, preempting) == expected
    assert sum(preempting.count.values()) >= 6


def inside_stop_string(live: LiveRequest, sequence: Sequence) -> bool:
    """Text is held back: every letter is one token."""
    return any(len(a.text) < a.choice.new_tokens and a.finish_reason is None for a in live.answers)


@pytest.mark.parametrize("included", [False, True])
def test_preempted_inside_a_stop_string(included: bool, single_of: Callable[..., Engine]) -> None:
    """The stop string is what the answer says anyway; others only begin in it."""
    plain = single_of("llama", enable_prefix_caching=False)
    engine = single_of("llama", poison=True, **narrow("llama", "bfloat16"))
    for seed in range(sized(3, 12)):
        prompt, params = tokens(13, seed), forced(plain, "abc", seed)
        [free] = hear(plain, [(prompt, params)])
        text = free.answers[0].text
        assert len(text) == NEW
        stop = text[NEW - 9 : NEW - 1]
        end = text.index(stop) + len(stop)
        asked = [
            (
                prompt,
                forced(plain, "abc", seed, stop=[stop, "abcabcabc!"], include_stop_str_in_output=included),
            )
        ]
        [expected] = hear(plain, asked)
        [answer] = expected.answers
        assert (answer.text, answer.finish_reason) == (text[: end if included else end - len(stop)], "stop")
        preempting = Preempting(engine, inside_stop_string, times=5)
        heard, [receipt] = serve(engine, asked, preempting)
        assert heard == [expected]
        assert receipt.preemptions == 5


def test_what_sampling_remembers_survives_preemption(single_of: Callable[..., Engine]) -> None:
    """Penalties count the answer so far, min_tokens and bad words look at it, seeds draw by position."""
    plain = single_of("llama", enable_prefix_caching=False)
    some = sorted(set(letters(plain, "abcdefgh")))
    options: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7, "allowed_token_ids": some},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7, "allowed_token_ids": some},
        {"min_tokens": NEW - 4, "stop_token_ids": some[:4], "allowed_token_ids": some, "temperature": 1.0},
        {"min_tokens": 9, "stop": ["a", "b", "c"], "allowed_token_ids": some, "temperature": 1.0},
        {"bad_words": ["ab", "ba", "h"], "allowed_token_ids": some, "temperature": 1.0},
        {"temperature": 1.5, "top_p": 0.9, "min_p": 0.01, "logit_bias": {some[0]: 3.0}},
        {"temperature": 1.5, "logprobs": -1, "prompt_logprobs": 3},
    ]
    asked = [(tokens(9 + i, i), greedy(NEW, seed=i, **extra)) for i, extra in enumerate(options)]
    expected = hear(plain, asked)
    # Without what they are about, the answers are others: it had to be remembered.
    indifferent = [
        (prompt, greedy(NEW, seed=i, allowed_token_ids=some)) for i, (prompt, _) in enumerate(asked)
    ]
    assert all(h.answers[0] != o.answers[0] for h, o in zip(hear(plain, indifferent), expected, strict=True))
    assert len(expected[2].answers[0].token_ids) >= NEW - 4
    engine = single_of("llama", poison=True, **narrow("llama", "bfloat16"))
    preempting = Preempting(engine, lambda live, _: bool(live.answers), times=4)
    heard, receipts = serve(engine, asked, preempting)
    assert heard == expected
    assert all(receipt.preemptions >= 3 for receipt in receipts)


def test_a_drawn_seed_survives_preemption(single_of: Callable[..., Engine]) -> None:
    """It depends on the engine's seed and the arrival number alone, and the receipt names it."""
    asked = [(tokens(12, i), greedy(NEW, temperature=1.0)) for i in range(4)]
    expected, named = serve(single_of("llama", seed=5), asked)
    engine = single_of("llama", seed=5, **narrow("llama", "bfloat16"))
    heard, receipts = serve(engine, asked, Preempting(engine, each_step))
    assert heard == expected
    assert [receipt.seed for receipt in receipts] == [receipt.seed for receipt in named]
    seeded = [
        (prompt, greedy(NEW, temperature=1.0, seed=receipt.seed))
        for (prompt, _), receipt in zip(asked, receipts, strict=True)
    ]
    assert hear(single_of("llama", seed=6), seeded) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_neighbours_that_are_cancelled(kind: str, single_of: Callable[..., Engine]) -> None:
    """Every other request goes away after some step; some of them share a prefix with one that stays."""
    asked = requests()
    gone = [
        ([*prompt[: len(prompt) // 2], *tokens(6, 300 + i)], varied(i, NEW))
        for i, (prompt, _) in enumerate(asked)
    ]
    expected = hear(single_of(kind, enable_prefix_caching=False), asked)
    engine = single_of(kind, poison=True, **narrow(kind, "bfloat16"))
    both = [request for pair in zip(gone, asked, strict=True) for request in pair]
    steps = [0]

    def cancel(lives: list[LiveRequest]) -> None:
        steps[0] += 1
        for i, live in enumerate(lives[::2]):
            if steps[0] == 2 + 3 * i:
                engine.abort(live.request.request_id)
                engine.check()

    heard, receipts = serve(engine, both, cancel)
    assert heard[1::2] == expected
    cut = [h for h in heard[::2] if not h.answers or h.answers[0].finish_reason == "abort"]
    assert len(cut) >= len(asked) // 2
    assert_sums(engine.scheduler.totals, receipts)
