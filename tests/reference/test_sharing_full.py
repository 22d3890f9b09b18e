"""A full pool: what never fits is refused at the door, what fits finishes, whoever is in the way."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from octavo import LLM
from octavo.engine import Engine
from octavo.errors import KVCacheTooSmall
from support.engines import Request, greedy, make_engine, submit
from support.sharing import Rows, assert_sums, hear, pool, serve
from support.sizes import sized

B = 16
POOL = 512
CONTEXT = 2048


def tokens(count: int, seed: int = 0) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.fixture(scope="session")
def long_llama(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama, made for 2,048 positions."""
    directory = shutil.copytree(tiny("llama"), tmp_path_factory.mktemp("long") / "llama")
    config = directory / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": CONTEXT}))
    return directory


@pytest.fixture
def engine(long_llama: Path, single_of: object) -> Engine:
    """A pool of 512 tokens under a context limit of 2,048."""
    return make_engine(long_llama, kv_cache_memory=pool(POOL // B, B), max_model_len=CONTEXT, num_threads=1)


def test_the_warning_at_start_names_the_real_limit(
    long_llama: Path, single_of: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "octavo"):
        engine = make_engine(long_llama, kv_cache_memory=pool(POOL // B, B), max_model_len=CONTEXT)
    [record] = caplog.records
    assert f"max_model_len={CONTEXT}" in record.getMessage()
    assert "the real limit is 512 tokens" in record.getMessage()
    assert engine.scheduler.limit == POOL
    caplog.clear()
    with caplog.at_level(logging.WARNING, "octavo"):
        make_engine(long_llama, kv_cache_memory=pool(POOL // B, B), max_model_len=POOL)
    assert not caplog.records


def test_a_prompt_that_never_fits_is_refused_and_those_behind_it_finish(engine: Engine) -> None:
    running = submit(engine, "running", (tokens(40, 1), greedy(30)))
    for _ in range(3):
        engine.step()
    with pytest.raises(KVCacheTooSmall) as caught:
        engine.prepare("large", tokens(600, 2), greedy(5))
    message = str(caught.value)
    total, least = engine.stats().bytes_total, engine.layout.sequence_bytes(601)
    for number in (total, least, "at most 512 tokens", "prompt has 600", "shorten it by 89"):
        assert str(number) in message
    assert (caught.value.param, caught.value.code, caught.value.status) == (
        "prompt",
        "kv_cache_too_small",
        400,
    )
    small = [submit(engine, f"small {i}", (tokens(20, 10 + i), greedy(10))) for i in range(10)]
    while engine.has_work:
        engine.step()
    engine.check()
    assert [len(live.output().outputs[0].token_ids) for live in [running, *small]] == [30] + [10] * 10


def test_one_call_with_a_prompt_that_never_fits_computes_none(long_llama: Path, single_of: object) -> None:
    memory = pool(POOL // B, B)
    with LLM(str(long_llama), kv_cache_memory=memory, max_model_len=CONTEXT, num_threads=1) as llm:
        rows = Rows(llm.engine)
        with pytest.raises(KVCacheTooSmall, match="prompt has 600"):
            llm.generate([tokens(20, 1), tokens(600, 2)], greedy(2))
        assert rows.computed == 0
        assert not llm.engine.has_work
        outputs = llm.generate([tokens(20, i) for i in range(10)], greedy(2))
        assert len(outputs) == 10


@pytest.mark.parametrize("length", [511, 512, 513])
def test_a_prompt_as_long_as_the_pool(length: int, engine: Engine) -> None:
    if length == POOL - 1:
        [heard], [receipt] = serve(engine, [(tokens(length), greedy(100))])
        assert len(heard.answers[0].token_ids) == 1
        assert heard.answers[0].finish_reason == "length"
        assert receipt.computed_tokens == length
        return
    with pytest.raises(KVCacheTooSmall, match=rf"at most 512 tokens.*has {length}.*by {length - 511} or"):
        engine.prepare("full", tokens(length), greedy(1))


@pytest.mark.parametrize("neighbours", [0, 3])
def test_an_answer_ends_where_the_pool_does(neighbours: int, engine: Engine) -> None:
    """Neighbours may cost time, never tokens."""
    others: list[Request] = [(tokens(50, 1 + i), greedy(60)) for i in range(neighbours)]
    heard = hear(engine, [(tokens(500), greedy(100)), *others])
    assert len(heard[0].answers[0].token_ids) == 12
    assert [h.answers[0].finish_reason for h in heard] == ["length"] * (1 + neighbours)
    assert [len(h.answers[0].token_ids) for h in heard[1:]] == [60] * neighbours


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_two_rivals_both_finish(caching: bool, long_llama: Path, single_of: Callable[..., Engine]) -> None:
    """Of 20 blocks each, in a pool of 32."""
    options = {"enable_prefix_caching": caching, "num_threads": 1, "max_model_len": CONTEXT}
    engine = make_engine(long_llama, kv_cache_memory=pool(32, B), **options)
    rivals = [(tokens(100, seed), greedy(220, temperature=0.7, seed=seed)) for seed in (1, 2)]
    rows = Rows(engine)
    heard, receipts = serve(engine, rivals)
    assert heard == hear(make_engine(long_llama, **options), rivals)
    assert [receipt.preemptions for receipt in receipts] == [0, 1]
    useful = 2 * (20 * B - 1)
    assert rows.computed == useful + receipts[1].recomputed_tokens
    # The loser held at most 16 blocks when the pool was full, and computes none of them twice.
    assert receipts[1].recomputed_tokens <= 16 * B
    assert_sums(engine.scheduler.totals, receipts)


def test_many_rivals_finish_with_bounded_work(single_of: Callable[..., Engine]) -> None:
    count = sized(12, 40)
    rivals = [(tokens(10, seed), greedy(60, temperature=0.7, seed=seed)) for seed in range(count)]
    engine = single_of("llama", block_size=4, kv_cache_memory=pool(40, 4))
    rows = Rows(engine)
    heard, receipts = serve(engine, rivals)
    assert heard == hear(single_of("llama"), rivals)
    useful = count * 69
    recomputed = sum(receipt.recomputed_tokens for receipt in receipts)
    assert rows.computed == useful + recomputed <= 2 * useful
    assert sum(receipt.preemptions for receipt in receipts) > 0
    assert_sums(engine.scheduler.totals, receipts)


@pytest.mark.parametrize("length", [31 * B - 1, 31 * B, 31 * B + 1])
def test_two_choices_of_a_prompt_of_the_pool_less_one_block(length: int, engine: Engine) -> None:
    """They run one after the other, and both end by length."""
    running: list[int] = []
    both = greedy(1000, temperature=0.9, seed=5, n=2)
    [heard], [receipt] = serve(
        engine, [(tokens(length), both)], lambda _: running.append(len(engine.scheduler.running))
    )
    assert [answer.finish_reason for answer in heard.answers] == ["length", "length"]
    assert [len(answer.token_ids) for answer in heard.answers] == [POOL - length] * 2
    assert receipt.computed_tokens == length
    # Where the fork had room for both, it has none for their next block.
    parted = len(running) - running[::-1].index(2) if 2 in running else 0
    assert parted <= 3
    assert set(running[parted:]) == {0, 1}
    [single] = hear(engine, [(tokens(length), greedy(1000, temperature=0.9, seed=5))])
    assert single.answers[0] == heard.answers[0]
    assert heard.answers[0].token_ids != heard.answers[1].token_ids


def test_windows_bound_what_a_sequence_holds(single_of: Callable[..., Engine]) -> None:
    """Where every layer has a window, an answer may be longer than the arena."""
    kind, limit = "mistral, window", 300
    engine = single_of(kind, block_size=4, kv_cache_memory=pool(12, 4, kind), max_model_len=limit)
    assert engine.scheduler.limit == limit
    asked = [(tokens(30), greedy(500))]
    heard = hear(engine, asked)
    assert len(heard[0].answers[0].token_ids) == limit - 30
    assert heard == hear(single_of(kind, max_model_len=limit), asked)
