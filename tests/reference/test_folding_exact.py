"""Folding under pressure in the engine: fewer conversations are lost, and what is exact is as exact as ever."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from octavo.cache.receipt import Receipt
from octavo.engine import Engine
from octavo.params import SamplingParams
from support.engines import Answer, answers, finish, greedy, submit, together
from support.sizes import sized

ROOM = sized(5, 20)  # conversations that the arena holds
CONVERSATIONS = sized(8, 32)
TURNS, ASKED, NEW = 3, 50, 24
LADDER = ("int8", "int4")
KINDS = ("multi-query", "qwen2, mixed windows", "gpt2")


@dataclass(frozen=True)
class Turn:
    conversation: int
    prompt: list[int]
    answer: Answer
    receipt: Receipt


def converse(engine: Engine, script: list[Turn] | None = None) -> list[Turn]:
    """All conversations, turn by turn, or the same prompts as in `script`."""
    generator = torch.Generator().manual_seed(11)
    histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    turns: list[Turn] = []
    for _ in range(TURNS):
        for conversation, history in enumerate(histories):
            said = torch.randint(256, (ASKED,), generator=generator).tolist()
            prompt = script[len(turns)].prompt if script else [*history, *said]
            turns.append(turn(engine, conversation, prompt))
            history[:] = [*prompt, *turns[-1].answer.token_ids]
    return turns


def turn(engine: Engine, conversation: int, prompt: list[int], **options: Any) -> Turn:
    live = submit(engine, f"{conversation}", (prompt, params(**options)))
    finish(engine)
    return Turn(conversation, prompt, answers(live.output())[0], live.request.receipt)


def params(**options: Any) -> SamplingParams:
    return greedy(NEW, **options)


def tight(
    engine_of: Callable[..., Engine], kind: str, roomy: Engine, room: int = ROOM, **options: Any
) -> Engine:
    """An engine whose cache holds `room` whole conversations."""
    longest = TURNS * (ASKED + NEW)
    options = {"dtype": "bfloat16", "block_size": 32, "poison": True, **options}
    return engine_of(
        kind, num_threads=1, kv_cache_memory=room * roomy.layout.sequence_bytes(longest), **options
    )


def roomy(engine_of: Callable[..., Engine], kind: str, **options: Any) -> Engine:
    return engine_of(kind, num_threads=1, **{"dtype": "bfloat16", "block_size": 32, **options})


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_conversations_are_recomputed_and_exact_answers_stay_so(
    kind: str, engine_of: Callable[..., Engine]
) -> None:
    ample = roomy(engine_of, kind)
    script = converse(ample)
    plain_engine = tight(engine_of, kind, ample)
    folding_engine = tight(engine_of, kind, ample, compress_under_pressure=LADDER)
    plain, folding = converse(plain_engine, script), converse(folding_engine, script)
    lost = [
        [t for t in turns if t.receipt.miss and t.receipt.miss.reason == "reclaimed"]
        for turns in (plain, folding)
    ]
    assert len(lost[0]) > 2 * len(lost[1])
    computed = [sum(t.receipt.computed_tokens for t in turns) for turns in (plain, folding)]
    assert computed[1] < computed[0]
    assert [t.answer for t in plain] == [t.answer for t in script]
    for mine, right in zip(folding, script, strict=True):
        assert mine.receipt.exact or mine.receipt.compressed_tokens or mine.receipt.reused_tokens
        if mine.receipt.exact:
            assert mine.receipt.compressed_tokens == 0
            assert mine.answer == right.answer
    assert {t.receipt.exact for t in folding} == {True, False}
    assert sum(t.answer != s.answer for t, s in zip(folding, script, strict=True)) > 0
    check_exact(folding_engine, script)


def check_exact(engine: Engine, script: list[Turn]) -> None:
    """A request with `exact: true` is right to the bit, whether it can use what is there or not."""
    reasons = set()
    for right in reversed(script[-CONVERSATIONS:]):
        mine = turn(engine, right.conversation, right.prompt, exact=True)
        assert mine.answer == right.answer
        assert (mine.receipt.exact, mine.receipt.compressed_tokens) == (True, 0)
        assert mine.receipt.miss is not None
        reasons.add(mine.receipt.miss.reason)
    assert "exactness" in reasons


def test_the_receipt_tells_what_was_read_folded(engine_of: Callable[..., Engine]) -> None:
    ample = roomy(engine_of, "multi-query")
    engine = tight(engine_of, "multi-query", ample, CONVERSATIONS * 2 // 5, compress_under_pressure=LADDER)
    turns = converse(engine)
    folded = [t.receipt for t in turns if t.receipt.compressed_tokens]
    assert folded
    for receipt in folded:
        assert not receipt.exact
        assert receipt.compressed_tokens % 32 == 0
        assert receipt.compressed_tokens <= receipt.reused_tokens - 32  # the first block stays as it is
        by_format = sum(receipt.formats[name] for name in LADDER)
        assert by_format == receipt.compressed_tokens
        assert receipt.formats.total() == receipt.prompt_tokens + NEW - 1
        assert receipt.to_dict()["compressed_tokens"] == receipt.compressed_tokens
    totals = engine.scheduler.totals
    assert totals.compressed_tokens == sum(receipt.compressed_tokens for receipt in folded)
    counted = engine.totals().folded_blocks
    assert set(counted) == set(LADDER)
    kinds = [event.reason for event in engine.events() if event.kind == "folded"]
    assert kinds.count("pressure, bf16 to int8") == counted["int8"]
    assert kinds.count("pressure, int8 to int4") == counted["int4"]


def test_answers_without_pressure_are_those_of_an_engine_that_never_folds(
    engine_of: Callable[..., Engine],
) -> None:
    generator = torch.Generator().manual_seed(5)
    requests = [(torch.randint(256, (n,), generator=generator).tolist(), params()) for n in (5, 33, 150)]
    for kind in ("12 over 4 heads of 80", "multi-query"):
        expected = together(roomy(engine_of, kind), requests)
        assert together(roomy(engine_of, kind, compress_under_pressure=LADDER), requests) == expected


def test_neighbours_that_read_folded_blocks_change_nobody_elses_answer(
    engine_of: Callable[..., Engine],
) -> None:
    ample = roomy(engine_of, "multi-query")
    script = converse(ample)
    engine = tight(engine_of, "multi-query", ample, compress_under_pressure=LADDER, max_num_batched_tokens=40)
    converse(engine, script)
    last = script[-CONVERSATIONS:]
    lives = [submit(engine, f"{i}", (t.prompt, params(exact=i % 2 == 0))) for i, t in enumerate(last)]
    finish(engine)
    for live, right in zip(lives, last, strict=True):
        if live.request.receipt.exact:
            assert answers(live.output())[0] == right.answer
    assert {live.request.receipt.exact for live in lives} == {True, False}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_cache_of_8_bits_is_folded_to_4(dtype: str, engine_of: Callable[..., Engine]) -> None:
    options = {"kv_cache_dtype": "int8", "dtype": dtype}
    ample = roomy(engine_of, "multi-query", **options)
    script = converse(ample)
    engine = tight(engine_of, "multi-query", ample, compress_under_pressure="int4", **options)
    turns = converse(engine, script)
    assert engine.totals().folded_blocks["int4"] > 0
    for mine, right in zip(turns, script, strict=True):
        assert not mine.receipt.exact or mine.answer == right.answer
    check_exact(engine, script)
