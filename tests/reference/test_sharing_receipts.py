"""What the cache did for each request, told truly: receipts, misses with their place, events, pins."""

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch

from octavo import LLM
from octavo.cache.receipt import Receipt
from octavo.engine import Engine
from octavo.live import LiveRequest
from support.cache_world import Clock
from support.engines import Request, greedy, submit, varied
from support.sharing import Preempting, Rows, assert_sums, hear, pool, serve
from support.sizes import sized

B = 4


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPT = tokens(10 * B + 2, 1)


def receipt_of(engine: Engine, prompt: list[int], **options: Any) -> Receipt:
    _, [receipt] = serve(engine, [(prompt, greedy(2, **options))])
    return receipt


def miss_of(engine: Engine, prompt: list[int], **options: Any) -> tuple[str, int | None]:
    miss = receipt_of(engine, prompt, **options).to_dict()["miss"]
    return miss["reason"], miss["at_token"]


@pytest.fixture
def engine(single_of: Callable[..., Engine]) -> Engine:
    return single_of("llama", block_size=B)


def test_a_miss_is_cold_then_the_tail(engine: Engine) -> None:
    assert miss_of(engine, PROMPT) == ("cold", 0)
    assert miss_of(engine, PROMPT) == ("tail", 10 * B)
    assert miss_of(engine, PROMPT[: 10 * B + 1]) == ("tail", None)
    assert miss_of(engine, PROMPT[: 10 * B]) == ("tail", 9 * B)
    assert miss_of(engine, tokens(1, 9)) == ("cold", None)


@pytest.mark.parametrize("common", [B, 3 * B, 3 * B + 1, 9 * B + 3])
def test_a_miss_where_prompts_diverge(common: int, engine: Engine) -> None:
    receipt_of(engine, PROMPT)
    other = [*PROMPT[:common], *(255 - token for token in PROMPT[common:]), *tokens(5, 2)]
    assert miss_of(engine, other) == ("diverged", common // B * B)
    assert miss_of(engine, [255 - token for token in PROMPT]) == ("cold", 0)


def test_a_miss_because_sharing_is_off(single_of: Callable[..., Engine], engine: Engine) -> None:
    off = single_of("llama", block_size=B, enable_prefix_caching=False)
    assert [miss_of(off, PROMPT) for _ in range(2)] == [("disabled", 0)] * 2
    # Log-probs of the prompt need its rows, so nothing of it is reused; others reuse what it wrote.
    assert [miss_of(engine, PROMPT, prompt_logprobs=0) for _ in range(2)] == [("disabled", 0)] * 2
    assert miss_of(engine, PROMPT) == ("tail", 10 * B)


def test_a_miss_because_of_the_namespace(engine: Engine) -> None:
    receipt_of(engine, PROMPT)
    assert miss_of(engine, PROMPT[: 4 * B + 1], cache_salt="s") == ("namespace", 0)
    assert miss_of(engine, PROMPT, cache_salt="s") == ("namespace", 4 * B)
    assert miss_of(engine, tokens(20, 5), cache_salt="s") == ("cold", 0)


def test_a_miss_because_blocks_were_reclaimed(single_of: Callable[..., Engine]) -> None:
    """Tails go first, so what is left is a prefix."""
    engine = single_of("llama", block_size=B, kv_cache_memory=pool(16, B))
    receipt_of(engine, PROMPT)
    receipt_of(engine, tokens(13 * B, 3))
    kept = 16 - 14
    assert miss_of(engine, PROMPT) == ("reclaimed", kept * B)
    # A prompt that was never there is not called reclaimed.
    assert miss_of(engine, [*PROMPT[: kept * B], *tokens(9, 4)]) == ("diverged", kept * B)


def mixed(seed: int) -> Request:
    """Prompts of three families, some with several choices, salts, prompt log-probs."""
    extra: list[dict[str, Any]] = [{}, {"n": 3}, {"cache_salt": "s"}, {"prompt_logprobs": 0}, {"n": 2}]
    params = greedy(9, temperature=1.0, seed=seed, **extra[seed % len(extra)])
    return [*tokens(4 * B + 1, 1000 + seed % 3), *tokens(1 + seed % 7, seed)], params


def test_sums_over_receipts_are_the_engine_s_counters(single_of: Callable[..., Engine]) -> None:
    """Under pressure, with cancelled and preempted requests; and the rows computed are those accounted for."""
    engine = single_of("llama", block_size=B, kv_cache_memory=pool(24, B), max_num_batched_tokens=9)
    rows, asked = Rows(engine), [mixed(seed) for seed in range(sized(30, 200))]
    steps = [0]
    preempting = Preempting(engine, lambda _, sequence: sequence.num_computed % 7 == 3, times=1)

    def disturb(lives: list[LiveRequest]) -> None:
        steps[0] += 1
        preempting(lives)
        if steps[0] % 20 == 0:
            engine.abort(f"request {steps[0] // 20 * 3}")

    _, receipts = serve(engine, asked, disturb)
    totals = engine.scheduler.totals
    assert_sums(totals, receipts)
    assert rows.computed == totals.formats["bf16"] - totals.reused_tokens + totals.recomputed_tokens
    assert min(totals.reused_tokens, totals.recomputed_tokens, totals.preemptions) > 0
    events = Counter(event.kind for event in engine.events())
    assert events["preempted"] == totals.preemptions
    assert 0 < events["resumed"] <= events["preempted"]
    assert (
        events["stored"] - events["reclaimed"]
        == len(engine.cache.pool.blocks)
        == engine.stats().blocks["sealed"]
    )


def test_written_blocks_and_formats(engine: Engine) -> None:
    """Three choices of ten and a half blocks: 42 prompt positions, and all generated ones but the last."""
    prompt = tokens(10 * B + 2, 7)
    _, [cold] = serve(engine, [(prompt, greedy(11, temperature=1.0, seed=1, n=3))])
    assert cold.formats == {"bf16": 42 + 3 * 10}
    # 52 positions are 13 blocks: ten of the prompt, and three more of each choice.
    assert cold.written_blocks == 10 + 3 * 3
    _, [warm] = serve(engine, [(prompt, greedy(11))])
    assert (warm.written_blocks, warm.formats, warm.reused_tokens) == (3, {"bf16": 52}, 40)


def test_a_receipt_names_the_time_in_the_queue(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama", block_size=B, max_num_seqs=1)
    engine.cache.clock = clock = Clock()
    lives = [submit(engine, f"{i}", (tokens(5, i), greedy(3))) for i in range(3)]
    while engine.has_work:
        engine.step()
        clock.now += 0.5
    assert [live.request.receipt.queued_ms for live in lives] == [0.0, 1500.0, 3000.0]


def test_the_receipt_of_a_stream(single_of: Callable[..., Engine]) -> None:
    """The account of the prompt is there with the first token and stays; the rest grows with the answer."""
    engine = single_of("llama", block_size=B, max_num_batched_tokens=10)
    receipt_of(engine, PROMPT[: 5 * B])
    live = submit(engine, "stream", (PROMPT, greedy(9)))
    assert (live.output().receipt or Receipt()).miss is None
    seen: list[dict[str, Any]] = []
    while engine.has_work:
        for touched in engine.step():
            output = touched.output()
            assert output.receipt is not None
            seen.append(output.receipt.to_dict())
            assert output.num_cached_tokens == output.receipt.reused_tokens
    assert [receipt["completion_tokens"] for receipt in seen] == list(range(1, 10))
    for receipt in seen:
        assert receipt["miss"] == {"reason": "diverged", "at_token": 5 * B}
        assert (receipt["reused_tokens"], receipt["computed_tokens"]) == (5 * B, 5 * B + 2)
    assert [receipt["written_blocks"] for receipt in seen] == [(42 + i) // B - 5 for i in range(9)]


def test_events_tell_what_happened_and_why(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama", block_size=B, kv_cache_memory=pool(16, B))
    hear(engine, [(PROMPT, greedy(1))])
    stored = engine.events()
    assert [(event.kind, event.reason, event.tokens) for event in stored] == [("stored", "sealed", B)] * 10
    assert len({event.digest for event in stored}) == 10
    assert engine.events() == []
    hear(engine, [(tokens(13 * B, 3), greedy(1))])
    reclaimed = [event for event in engine.events() if event.kind == "reclaimed"]
    assert [event.reason for event in reclaimed] == ["pressure"] * 7
    assert [event.digest for event in reclaimed] == [event.digest for event in reversed(stored)][:7]
    live = submit(engine, "asked", (tokens(6, 4), greedy(5)))
    engine.step()
    engine.scheduler.preempt(live.request.sequences[0])
    while engine.has_work:
        engine.step()
    told = [(e.kind, e.reason, e.request_id, e.tokens) for e in engine.events() if e.request_id]
    assert told == [("preempted", "asked", "asked", 7), ("resumed", "room", "asked", 7)]
    engine.cache.reset()
    assert {event.reason for event in engine.events()} == {"reset"}


def test_the_offline_api_tells_events(llm_of: Callable[..., AbstractContextManager[LLM]]) -> None:
    with llm_of("llama", block_size=B, kv_cache_memory=pool(24, B)) as llm:
        llm.generate([tokens(10, i) for i in range(6)], varied(0, 40))
        kinds = Counter((event.kind, event.reason) for event in llm.events())
        assert set(kinds) == {
            ("stored", "sealed"),
            ("reclaimed", "pressure"),
            ("preempted", "pressure"),
            ("resumed", "room"),
        }
        assert llm.events() == []


@pytest.mark.parametrize("least", range(3))
def test_the_least_important_is_preempted_first(least: int, single_of: Callable[..., Engine]) -> None:
    """Whenever it came; the newest of equals goes first."""
    engine = single_of("llama", block_size=B, kv_cache_memory=pool(24, B))
    asked = [(tokens(9, i), greedy(50, priority=3 if i == least else -1)) for i in range(3)]
    _, receipts = serve(engine, asked)
    preempted = [event.request_id for event in engine.events() if event.kind == "preempted"]
    first, *rest = [least, *sorted(set(range(3)) - {least}, reverse=True)]
    assert preempted[0] == f"request {first}"
    assert receipts[first].preemptions >= 1
    assert f"request {rest[-1]}" not in preempted
    assert receipts[rest[-1]].preemptions == 0


def test_a_more_important_request_takes_the_blocks_of_running_ones(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama", block_size=B, kv_cache_memory=pool(24, B))
    common = submit(engine, "common", (tokens(9, 1), greedy(80, priority=5)))
    for _ in range(10):
        engine.step()
    urgent = submit(engine, "urgent", (tokens(9, 2), greedy(70, priority=-5)))
    while not urgent.finished:
        engine.step()
    assert not common.finished
    assert (common.request.receipt.preemptions, urgent.request.receipt.preemptions) == (1, 0)
    while engine.has_work:
        engine.step()
    engine.check()
    assert len(common.output().outputs[0].token_ids) == 80


def test_a_pin_keeps_blocks_until_its_time_is_over(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama", block_size=B, kv_cache_memory=pool(24, B), max_pinned=pool(12, B))
    engine.cache.clock = clock = Clock()
    pinned = receipt_of(engine, PROMPT, cache_ttl=60.0)
    size = 10 * engine.layout.block_bytes(0)
    assert pinned.to_dict()["pinned"] == {
        "ttl_s": 60.0,
        "tokens": 10 * B,
        "blocks": 10,
        "bytes": size,
        "refused": None,
    }
    assert receipt_of(engine, tokens(9, 8)).to_dict()["pinned"] is None
    crowd = [tokens(12 * B, 20 + i) for i in range(4)]
    for prompt in crowd:
        receipt_of(engine, prompt)
    clock.now = 59.9
    assert receipt_of(engine, PROMPT).reused_tokens == 10 * B
    clock.now = 60.0
    for prompt in crowd:
        receipt_of(engine, prompt)
    assert miss_of(engine, PROMPT)[0] == "reclaimed"
    told = [(e.kind, e.reason, e.tokens) for e in engine.events() if e.kind.startswith("pin")]
    assert told == [("pinned", "cache_ttl", 10 * B)]


def test_a_pin_over_budget_is_refused_in_the_receipt(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama", block_size=B, max_pinned=pool(12, B))
    block = engine.layout.block_bytes(0)
    assert receipt_of(engine, PROMPT, cache_ttl=60.0).to_dict()["pinned"]["refused"] is None
    # The same blocks again cost nothing more; another ten do not fit.
    assert receipt_of(engine, PROMPT, cache_ttl=90.0).to_dict()["pinned"]["blocks"] == 10
    refused = receipt_of(engine, tokens(10 * B + 1, 2), cache_ttl=60.0).to_dict()["pinned"]
    assert refused == {
        "ttl_s": 60.0,
        "tokens": 0,
        "blocks": 0,
        "bytes": 0,
        "refused": f"over max_pinned={12 * block} bytes by {8 * block}",
    }
    assert [e.kind for e in engine.events() if e.kind.startswith("pin")] == [
        "pinned",
        "pinned",
        "pin_refused",
    ]


def test_without_a_budget_every_pin_is_refused(single_of: Callable[..., Engine]) -> None:
    none = single_of("llama", block_size=B, max_pinned=0)
    refused = receipt_of(none, PROMPT, cache_ttl=1.0).to_dict()["pinned"]["refused"]
    assert refused.startswith("over max_pinned=0 bytes")
    off = single_of("llama", enable_prefix_caching=False)
    assert (
        receipt_of(off, PROMPT, cache_ttl=1.0).to_dict()["pinned"]["refused"] == "prefix caching is disabled"
    )


def test_by_default_a_quarter_of_the_cache_can_be_pinned(single_of: Callable[..., Engine]) -> None:
    for blocks, refused in ((40, False), (39, True)):
        engine = single_of("llama", block_size=B, kv_cache_memory=pool(blocks, B))
        pinned = receipt_of(engine, PROMPT, cache_ttl=1.0).to_dict()["pinned"]
        assert (pinned["refused"] is not None) == refused


def test_pins_never_shorten_an_answer(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama", block_size=B, kv_cache_memory=pool(24, B), max_pinned=pool(24, B))
    receipt_of(engine, PROMPT, cache_ttl=3600.0)
    [heard], [receipt] = serve(engine, [(tokens(9, 2), greedy(1000))])
    assert len(heard.answers[0].token_ids) == 24 * B - 9
    assert receipt.preemptions == 0
    assert ("reclaimed", "pressure on pins") in {(e.kind, e.reason) for e in engine.events()}
