"""An answer never depends on company, on a cancelled neighbour, or on recycled memory."""

import ctypes
from collections.abc import Callable

import pytest
import torch

from octavo.engine import Engine
from octavo.params import SamplingParams
from support.engines import Answer, Request, alone, answers, finish, greedy, submit, together, varied
from support.sizes import sized

KINDS = ["12 over 4 heads of 80", "qwen2, mixed windows", "gpt2"]
NEW = sized(12, 40)


def make_requests(count: int, longest: int = 90, seed: int = 3) -> list[Request]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest, (count,), generator=generator).tolist()
    return [
        (torch.randint(256, (n,), generator=generator).tolist(), varied(i, NEW))
        for i, n in enumerate(lengths)
    ]


def blocks(engine: Engine, count: int) -> int:
    """Bytes of `count` blocks of every layer group."""
    return count * sum(engine.layout.block_sizes_bytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_full_of_nan_changes_nothing(kind: str, dtype: str, engine_of: Callable[..., Engine]) -> None:
    requests = make_requests(6)
    expected = together(engine_of(kind, dtype=dtype), requests)
    poisoned = engine_of(kind, dtype=dtype, poison=True)
    for _ in ("cold", "warm"):
        assert together(poisoned, requests) == expected
    memory = blocks(poisoned, 22)
    for caching in (True, False):
        tight = engine_of(
            kind, dtype=dtype, poison=True, kv_cache_memory=memory, enable_prefix_caching=caching
        )
        for _ in ("fresh", "recycled"):
            assert together(tight, requests) == expected
    # The last engine holds nothing now, so what was ever used is NaN; the rest is as the system gave it.
    assert set(ctypes.string_at(tight._memory.address, memory)) <= {0x00, 0xFF}
    assert ctypes.string_at(tight._memory.address, blocks(tight, 1)).count(0xFF) > 0


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
@pytest.mark.parametrize(
    ("kind", "count"), [(kind, sized(9, 16)) for kind in ("12 over 4 heads of 80", "qwen2, mixed windows")]
)
def test_preempted_and_resumed(
    kind: str, count: int, caching: bool, engine_of: Callable[..., Engine]
) -> None:
    large = engine_of(kind)
    requests = [(prompt, varied(i, 3 * NEW)) for i, (prompt, _) in enumerate(make_requests(8, longest=60))]
    expected = together(large, requests)
    small = engine_of(kind, kv_cache_memory=blocks(large, count), enable_prefix_caching=caching, poison=True)
    lives = [submit(small, f"request {i}", request) for i, request in enumerate(requests)]
    finish(small)
    assert [answers(live.output()) for live in lives] == expected
    receipts = [live.request.receipt for live in lives]
    assert sum(receipt.preemptions for receipt in receipts) > 0
    assert sum(receipt.recomputed_tokens for receipt in receipts) > 0
    assert small.stats().bytes_running == 0


def until_first_step(engine: Engine, victim: str) -> bool:
    return True


def until_half_its_prompt(engine: Engine, victim: str) -> bool:
    sequence = engine.scheduler.requests[victim].sequences[0]
    return 0 < sequence.num_computed < len(sequence.request.prompt_token_ids)


def until_it_decodes(engine: Engine, victim: str) -> bool:
    return len(engine.scheduler.requests[victim].sequences[0].output_token_ids) >= 3


@pytest.mark.parametrize("moment", [until_first_step, until_half_its_prompt, until_it_decodes])
@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_neighbour(
    kind: str, moment: Callable[[Engine, str], bool], engine_of: Callable[..., Engine]
) -> None:
    requests = make_requests(4)
    reference = engine_of(kind, max_num_batched_tokens=32)
    expected = alone(reference, requests)
    # The victim shares the first request's prompt, so that it shares its blocks too, and goes on much longer.
    [first, *_] = requests
    victim = ([*first[0], *range(100)], greedy(40))
    engine = engine_of(kind, max_num_batched_tokens=32, poison=True)
    for request in ([victim, *requests], [*requests, victim]):
        lives = {}
        for i, asked in enumerate(request):
            name = "victim" if asked is victim else f"request {i}"
            lives[name] = submit(engine, name, asked)
        while not moment(engine, "victim"):
            engine.step()
        cancelled = engine.abort("victim")
        assert cancelled is lives["victim"]
        assert cancelled.finished
        assert engine.abort("victim") is None
        engine.check()
        finish(engine)
        found = [answers(live.output()) for name, live in lives.items() if name != "victim"]
        assert found == expected
        assert all(a.finish_reason == "abort" for a in answers(lives["victim"].output()))
        assert engine.stats().bytes_running == 0


def test_late_company_changes_nothing(engine_of: Callable[..., Engine]) -> None:
    """A request's answer, whatever arrives while it runs, with the same prompt or another."""
    engine = engine_of("multi-query", max_num_batched_tokens=40)
    [target] = make_requests(1, longest=80)
    expected = alone(engine, [target])[0]
    engine = engine_of("multi-query", max_num_batched_tokens=40, poison=True)
    live = submit(engine, "target", target)
    for i, request in enumerate([*make_requests(5, seed=4), target, (target[0][:33], greedy(5))]):
        engine.step()
        submit(engine, f"late {i}", request)
    finish(engine)
    assert answers(live.output()) == expected


def test_a_neighbour_whose_logits_break_fails_alone(engine_of: Callable[..., Engine]) -> None:
    """All tokens masked is an error of that request; the others finish as if it had not been there."""
    engine = engine_of("llama")
    requests = make_requests(3)
    expected: list[list[Answer]] = together(engine, requests)
    everything = dict.fromkeys(range(5), -100.0)
    doomed = greedy(4, allowed_token_ids=[1], bad_words=[engine.tokenizer.decode([1])], logit_bias=everything)
    lives = [submit(engine, f"again {i}", request) for i, request in enumerate(requests)]
    bad = submit(engine, "doomed", ([1, 2, 3], doomed))
    finish(engine)
    assert bad.error is not None
    assert "leave no token to choose" in str(bad.error)
    assert [answers(live.output()) for live in lives] == expected
    assert engine.stats().bytes_running == 0


def test_a_choice_that_has_no_token_left_ends_its_request_alone(engine_of: Callable[..., Engine]) -> None:
    """Of several choices one is stuck (after an A nothing is allowed) while others of the request go on."""
    engine = engine_of("llama")
    [neighbour] = make_requests(1)
    [expected] = together(engine, [neighbour])
    a, b = (engine.tokenizer.encode(letter, False)[0] for letter in "AB")
    stuck = SamplingParams(
        n=8, seed=1, temperature=100.0, max_tokens=20, allowed_token_ids=[a, b], bad_words=["AA", "AB"]
    )
    live = submit(engine, "neighbour", neighbour)
    bad = submit(engine, "stuck", ([7, 8, 9], stuck))
    finish(engine)
    assert bad.error is not None
    assert "leave no token to choose" in str(bad.error)
    assert {len(answer.choice.token_ids) for answer in bad.answers} == {3 + 1}
    assert answers(live.output()) == expected
    assert engine.stats().bytes_running == 0
