"""What was computed once is found again: at every length around a block's edge, and turn after turn."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from octavo import LLM
from octavo.engine import Engine
from support.engines import Request, greedy, varied
from support.sharing import Rows, assert_sums, hear, serve
from support.sizes import sized

BLOCKS = sized((5,), (2, 5, 10, 20))
NEW = 6
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}:{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def around_edges(block_size: int) -> list[int]:
    edges = [1, *BLOCKS]
    return sorted({1} | {k * block_size + d for k in edges for d in (-1, 0, 1)})


def asked(block_size: int) -> list[Request]:
    lengths = around_edges(block_size)
    return [(tokens(length, length), varied(i, NEW)) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("kind", ["llama", "qwen2, mixed windows"])
@pytest.mark.parametrize("block_size", [4, 16])
def test_the_same_prompt_three_times_in_a_row(
    kind: str, block_size: int, single_of: Callable[..., Engine]
) -> None:
    plain = single_of(kind, enable_prefix_caching=False)
    engine = single_of(kind, block_size=block_size, max_num_batched_tokens=block_size)
    rows, receipts = Rows(engine), []
    for prompt, params in asked(block_size):
        expected = hear(plain, [(prompt, params)])
        whole = (len(prompt) - 1) // block_size * block_size
        for reused in (0, whole, whole):
            before = rows.computed
            heard, [receipt] = serve(engine, [(prompt, params)])
            assert heard == expected
            assert receipt.reused_tokens == reused <= len(prompt) - 1
            assert receipt.computed_tokens == len(prompt) - reused
            assert rows.computed - before == receipt.computed_tokens + NEW - 1
            receipts.append(receipt)
    assert_sums(engine.scheduler.totals, receipts)


@pytest.mark.parametrize("block_size", [4, 16])
def test_the_same_prompt_eight_times_at_once(block_size: int, single_of: Callable[..., Engine]) -> None:
    plain = single_of("llama", enable_prefix_caching=False)
    engine = single_of("llama", block_size=block_size, max_num_batched_tokens=block_size)
    rows = Rows(engine)
    for prompt, params in asked(block_size):
        [expected] = hear(plain, [(prompt, params)])
        whole = (len(prompt) - 1) // block_size * block_size
        for reused in ([0] + [whole] * 7, [whole] * 8):
            before = rows.computed
            heard, receipts = serve(engine, [(prompt, params)] * 8)
            assert heard == [expected] * 8
            assert sorted(r.reused_tokens for r in receipts) == reused
            assert rows.computed - before == sum(r.computed_tokens + NEW - 1 for r in receipts)


@pytest.mark.parametrize("block_size", [4, 16, 256])
def test_a_thousand_tokens_cost_at_most_a_block_the_second_time(
    block_size: int, single_of: Callable[..., Engine]
) -> None:
    engine = single_of("llama", block_size=block_size)
    request = tokens(1000, 1), greedy(4)
    cold, [first] = serve(engine, [request])
    warm, [second] = serve(engine, [request])
    assert warm == cold
    assert first.to_dict()["computed_tokens"] == 1000
    assert second.to_dict()["computed_tokens"] == 1000 - 999 // block_size * block_size <= block_size
    assert second.to_dict()["reused_from"] == {"arena": 999 // block_size * block_size}


def test_the_next_prompt_reuses_prompt_and_answer(single_of: Callable[..., Engine]) -> None:
    plain = single_of("llama", enable_prefix_caching=False)
    engine = single_of("llama", block_size=4)
    prompt = tokens(9, 1)
    for turn in range(4):
        heard, [receipt] = serve(engine, [(prompt, greedy(10))])
        assert heard == hear(plain, [(prompt, greedy(10))])
        # The last answer's last token was sampled and never computed.
        assert receipt.reused_tokens == (0 if turn == 0 else (len(prompt) - 5 - 1) // 4 * 4)
        prompt = [*prompt, *heard[0].answers[0].token_ids, *tokens(5, 2 + turn)]


def test_a_conversation_reuses_its_earlier_turns(
    llm_of: Callable[..., AbstractContextManager[LLM]],
) -> None:
    """Though the answers are bytes that no text spells, so that tokenising them anew would give others."""
    params = greedy(21, allowed_token_ids=list(range(256)))
    with llm_of("llama", block_size=4, chat_template=TEMPLATE) as llm:
        messages = [{"role": "user", "content": "Where is Paris?"}]
        known = 0
        for turn in range(4):
            [output] = llm.chat(messages, params)
            assert output.num_cached_tokens == output.receipt.reused_tokens == known // 4 * 4
            [answer] = output.outputs
            known = len(output.prompt_token_ids) + len(answer.token_ids) - 1
            assert llm.engine.tokenizer.encode(answer.text) != answer.token_ids
            messages += [
                {"role": "assistant", "content": answer.text},
                {"role": "user", "content": f"And number {turn}?"},
            ]
        # Under another salt the conversation is new, and so are its token ids.
        [other] = llm.chat(messages, greedy(1, cache_salt="other"))
        assert other.num_cached_tokens == 0
        llm.check()
