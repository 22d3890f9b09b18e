"""Copies of one cold prompt that arrive together compute it once, whoever of them goes away."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from octavo import LLM
from octavo.engine import Engine
from octavo.live import LiveRequest
from octavo.schedule.request import Status
from support.engines import answers, greedy, submit
from support.sharing import Ear, Rows, assert_sums, hear, serve

B = 4
PROMPT = [(7 * i) % 251 for i in range(10 * B + 3)]
NEW = 3
COPIES = (2, 4, 16)


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("block_size", [B, 16])
def test_one_call_computes_a_common_prefix_once(
    copies: int, block_size: int, llm_of: Callable[..., AbstractContextManager[LLM]]
) -> None:
    prompt = [(7 * i) % 251 for i in range(10 * block_size + 3)]
    with llm_of("llama", block_size=block_size, max_num_batched_tokens=16) as llm:
        rows = Rows(llm.engine)
        outputs = llm.generate([prompt] * copies, greedy(NEW))
        assert rows.computed == 10 * block_size + copies * (3 + NEW - 1)
        assert sorted(output.num_cached_tokens or 0 for output in outputs) == [0] + [10 * block_size] * (
            copies - 1
        )
        # Written once too: two answers' worth of blocks at most, for a prompt of ten.
        assert sum(output.receipt.written_blocks for output in outputs if output.receipt) == 10 + copies * (
            (3 + NEW - 1) // block_size
        )
        [alone] = LLM.generate(llm, [prompt], greedy(NEW))
        assert [answers(output) for output in outputs] == [answers(alone)] * copies
        llm.check()


@pytest.mark.parametrize("copies", COPIES)
@pytest.mark.parametrize("chunks", [0, 1, 2])
def test_the_first_copy_is_cancelled(copies: int, chunks: int, single_of: Callable[..., Engine]) -> None:
    """Before it starts, or while it is prefilled, 16 tokens at a time."""
    plain = single_of("llama", enable_prefix_caching=False)
    [expected] = hear(plain, [(PROMPT, greedy(NEW))])
    engine = single_of("llama", block_size=B, max_num_batched_tokens=16, poison=True)
    rows = Rows(engine)
    ears = [Ear(submit(engine, f"copy {i}", (PROMPT, greedy(NEW)))) for i in range(copies)]
    for _ in range(chunks):
        assert engine.step() == []
    assert rows.computed == 16 * chunks
    engine.abort("copy 0")
    engine.check()
    while engine.has_work:
        engine.step()
        for ear in ears[1:]:
            ear.listen()
    engine.check()
    assert [ear.heard() for ear in ears[1:]] == [expected] * (copies - 1)
    assert rows.computed == 10 * B + (copies - 1) * (3 + NEW - 1)
    assert_sums(engine.scheduler.totals, [ear.live.request.receipt for ear in ears])


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_chunk_that_ends_inside_a_block_costs_that_block_again(
    chunks: int, single_of: Callable[..., Engine]
) -> None:
    engine = single_of("llama", block_size=B, max_num_batched_tokens=10)
    rows = Rows(engine)
    ears = [Ear(submit(engine, f"copy {i}", (PROMPT, greedy(NEW)))) for i in range(4)]
    for _ in range(chunks):
        engine.step()
    engine.abort("copy 0")
    lost = 10 * chunks % B
    while engine.has_work:
        engine.step()
    assert rows.computed == 10 * B + 3 * (3 + NEW - 1) + lost
    assert len({ear.heard().answers for ear in ears[1:]}) == 1


def test_the_one_who_fills_is_preempted(single_of: Callable[..., Engine]) -> None:
    plain = single_of("llama", enable_prefix_caching=False)
    [expected] = hear(plain, [(PROMPT, greedy(NEW))])
    engine = single_of("llama", block_size=B, max_num_batched_tokens=16)
    rows, left = Rows(engine), [2]

    def preempt_the_filler(_: list[LiveRequest]) -> None:
        for sequence in list(engine.scheduler.running):
            if left[0] and sequence.status is Status.RUNNING and sequence.num_computed < len(PROMPT):
                engine.scheduler.preempt(sequence)
                left[0] -= 1

    heard, receipts = serve(engine, [(PROMPT, greedy(NEW))] * 4, preempt_the_filler)
    assert heard == [expected] * 4
    assert sum(receipt.preemptions for receipt in receipts) == 2
    assert rows.computed == 10 * B + 4 * (3 + NEW - 1)
    assert sum(receipt.recomputed_tokens for receipt in receipts) == 0


def test_choices_of_copies_share_too(single_of: Callable[..., Engine]) -> None:
    """n choices of each of 4 copies: the prompt is computed and stored once."""
    engine = single_of("llama", block_size=B, max_num_batched_tokens=16)
    rows = Rows(engine)
    params = greedy(NEW, temperature=1.0, seed=1, n=3)
    heard, _ = serve(engine, [(PROMPT, params)] * 4)
    assert len(set(heard)) == 1
    assert rows.computed == 10 * B + 4 * (3 + 3 * (NEW - 1))


def test_sharing_off_computes_every_copy(single_of: Callable[..., Engine]) -> None:
    """What the counters above would show if nothing were shared."""
    engine = single_of("llama", block_size=B, max_num_batched_tokens=16, enable_prefix_caching=False)
    rows = Rows(engine)
    serve(engine, [(PROMPT, greedy(NEW))] * 4)
    assert rows.computed == 4 * (len(PROMPT) + NEW - 1)
