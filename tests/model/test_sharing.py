"""SmolLM2: prefixes are shared, and nobody's answer changes, on real prompts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from octavo import LLM
from octavo.live import LiveRequest
from octavo.schedule.request import Sequence
from support.engines import Request, answers, greedy, varied
from support.sharing import Heard, Preempting, Rows, assert_sums, hear, serve
from support.sizes import sized
from support.texts import real_prompts, spread

pytestmark = pytest.mark.model

B = 16
POOL = 24
COUNT, NEW = sized(5, 32), sized(12, 48)
LENGTHS = spread(COUNT, 5, POOL * B - NEW - 1)
Opens = Callable[..., AbstractContextManager[LLM]]


@pytest.fixture(scope="module", params=sized(["bfloat16"], ["bfloat16", "float32"]))
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def base(dtype: str, smollm2_of: Opens) -> Iterator[LLM]:
    """A large pool, prefix caching."""
    with smollm2_of(dtype=dtype) as llm:
        yield llm


@pytest.fixture(scope="module")
def requests(base: LLM) -> list[Request]:
    prompts = real_prompts(LENGTHS, base.engine.tokenizer.encode, seed=3)
    return [(prompt, varied(i, NEW)) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def expected(dtype: str, smollm2_of: Opens, requests: list[Request]) -> list[Heard]:
    """Nothing is shared."""
    with smollm2_of(dtype=dtype, enable_prefix_caching=False) as llm:
        return hear(llm.engine, requests)


def test_cold_and_warm(base: LLM, requests: list[Request], expected: list[Heard]) -> None:
    assert hear(base.engine, requests) == expected
    heard, receipts = serve(base.engine, requests)
    assert heard == expected
    assert [receipt.reused_tokens for receipt in receipts] == [(n - 1) // B * B for n in LENGTHS]


MOMENTS = ("anywhere", "before the first token", "at a block's edge")


@pytest.mark.parametrize("moment", sized(MOMENTS[:1], MOMENTS))
def test_preempted_in_a_small_pool(
    moment: str, dtype: str, smollm2_of: Opens, requests: list[Request], expected: list[Heard]
) -> None:
    """Twenty-four blocks against a large pool."""

    def wanted(live: LiveRequest, sequence: Sequence) -> bool:
        if moment == "anywhere":
            return True
        edge = bool(live.answers) and sequence.num_computed % B == 0
        return edge if moment == "at a block's edge" else not live.answers

    per_token = 30 * 2 * 3 * 64 * (2 if dtype == "bfloat16" else 4)
    with smollm2_of(
        dtype=dtype,
        kv_cache_memory=POOL * B * per_token,
        max_num_batched_tokens=sized(5 * B, B),
    ) as llm:
        assert llm.engine.scheduler.limit == POOL * B
        preempting = Preempting(llm.engine, wanted)
        heard, receipts = serve(llm.engine, requests, preempting)
        assert heard == expected
        assert_sums(llm.engine.scheduler.totals, receipts)
        forced = sum(preempting.count.values())
        assert forced >= COUNT // 2
        if moment == "anywhere":
            assert all(receipt.preemptions >= 3 for receipt in receipts)


def test_choices(base: LLM, requests: list[Request]) -> None:
    prompt = requests[-1][0]
    one, three = (greedy(NEW, temperature=0.9, seed=4, n=n) for n in (1, 3))
    rows = Rows(base.engine)
    [alone], [cold], [warm] = (hear(base.engine, [(prompt, p)]) for p in (one, three, three))
    assert cold == warm
    assert cold.answers[0] == alone.answers[0]
    assert len({answer.token_ids for answer in cold.answers}) == 3
    tail = len(prompt) - (len(prompt) - 1) // B * B
    assert rows.computed <= len(prompt) + 2 * tail + 7 * (NEW - 1)


def test_a_thousand_tokens_cost_at_most_a_block_the_second_time(base: LLM) -> None:
    [prompt] = real_prompts([1000], base.engine.tokenizer.encode, seed=8)
    [cold], [warm] = (base.generate([prompt], greedy(8)) for _ in range(2))
    assert answers(cold) == answers(warm)
    assert cold.receipt is not None
    assert warm.receipt is not None
    assert cold.receipt.computed_tokens == 1000
    assert warm.receipt.to_dict()["computed_tokens"] == 1000 - 999 // B * B <= B


@pytest.mark.parametrize("copies", sized([4], [2, 4, 16]))
def test_copies_of_a_cold_prompt_in_one_call(copies: int, base: LLM) -> None:
    [prompt] = real_prompts([10 * B + 3], base.engine.tokenizer.encode, seed=20 + copies)
    rows = Rows(base.engine)
    outputs = base.generate([prompt] * copies, greedy(4))
    assert rows.computed == 10 * B + copies * (3 + 3)
    assert len({answer for output in outputs for answer in answers(output)}) == 1


def test_a_conversation_reuses_prompts_and_answers(base: LLM) -> None:
    messages, known = [], 0
    for question in ("Name three rivers of Europe.", "Which is the longest?", "Where does it end?"):
        messages.append({"role": "user", "content": question})
        [output] = base.chat(messages, greedy(sized(20, 60), ignore_eos=False))
        assert output.num_cached_tokens == known // B * B
        known = len(output.prompt_token_ids) + len(output.outputs[0].token_ids) - 1
        messages.append({"role": "assistant", "content": output.outputs[0].text})
    assert known > 4 * B
