"""What those who look on see: totals, timing, an observer, health."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from transformers import LlamaConfig

from octavo import AsyncEngine, RequestOutput, SamplingParams
from octavo.engine import Engine
from octavo.errors import OctavoError, Overloaded
from octavo.live import LiveRequest
from octavo.watch import EngineTotals, Health, Observer
from server.test_aio import LONG, OPTIONS, params, read, run
from support.sizes import sized
from unit.model_builders import LLAMA, save_model

ROUNDS = sized(120, 3000)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LlamaConfig(**{**LLAMA, "max_position_embeddings": 2048})
    return str(save_model(config, tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def engine(directory: str) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(directory, **OPTIONS)
    yield engine
    engine.close()


class Ledger(Observer):
    """Everything it was told."""

    def __init__(self) -> None:
        self.firsts: list[str] = []
        self.gaps: list[float] = []
        self.ends: dict[str, tuple[str, LiveRequest]] = {}

    def first_token(self, live: LiveRequest) -> None:
        assert live.timing.first_token is not None
        self.firsts.append(live.request.request_id)

    def token_gaps(self, seconds: Sequence[float]) -> None:
        self.gaps += seconds

    def ended(self, live: LiveRequest, reason: str) -> None:
        assert live.request.request_id not in self.ends
        self.ends[live.request.request_id] = (reason, live)


async def at_rest(engine: AsyncEngine) -> Health:
    """The engine's health once it has nothing to do."""
    while (health := engine.health()).has_work:
        await asyncio.sleep(0)
    return health


def balanced(totals: EngineTotals) -> bool:
    ended = sum(totals.finished.values()) + totals.cancelled + totals.rejected
    return totals.started == ended + totals.running + totals.waiting


def test_every_end_and_every_gap_is_told_although_snapshots_are_merged(engine: AsyncEngine) -> None:
    ledger = Ledger()
    engine.observe(ledger)

    async def slow_reader() -> RequestOutput:
        own = SamplingParams(n=3, max_tokens=20, ignore_eos=True)
        snapshots = []
        async for output in engine.generate("hello", own, "a"):
            snapshots.append(output)
            await asyncio.sleep(0.02)
        return snapshots[-1]

    output = run(slow_reader())
    assert ledger.firsts == ["a"]
    assert len(ledger.gaps) == 3 * 19
    assert all(gap >= 0 for gap in ledger.gaps)
    reason, live = ledger.ends["a"]
    assert (reason, live.timing) == ("length", output.timing)
    timing = output.timing
    assert timing is not None
    order = [timing.arrived, timing.admitted, timing.first_token, timing.last_token, timing.ended]
    assert None not in order
    assert order == sorted(order)


def test_gaps_of_one_answer_add_up_to_its_time(engine: AsyncEngine) -> None:
    ledger = Ledger()
    engine.observe(ledger)
    timing = run(read(engine, "hello", params(1, 30)))[-1].timing
    assert timing is not None
    assert sum(ledger.gaps) == pytest.approx(timing.last_token - timing.first_token)


def test_leaving_is_an_abort_and_refusals_are_no_ends(engine: AsyncEngine) -> None:
    ledger = Ledger()
    engine.observe(ledger)

    async def leave() -> EngineTotals:
        stream = engine.generate("hello", LONG, "a")
        await anext(stream)
        await stream.aclose()
        for prompt in ([], [-1], "x" * 4000):
            with pytest.raises(OctavoError):
                await read(engine, prompt)
        await read(engine, "hello", params(1))
        return await engine.totals()

    totals = run(leave())
    assert {name: reason for name, (reason, _) in ledger.ends.items()} == {
        "a": "abort",
        next(iter(ledger.ends.keys() - {"a"})): "length",
    }
    assert (totals.started, totals.cancelled, totals.rejected, totals.finished) == (5, 1, 3, {"length": 1})
    assert (totals.running, totals.waiting) == (0, 0)


def test_a_request_with_nothing_to_sample_ends_with_error(engine: AsyncEngine) -> None:
    ledger = Ledger()
    engine.observe(ledger)

    async def fail() -> EngineTotals:
        nothing = SamplingParams(allowed_token_ids=[257], min_tokens=4)
        with pytest.raises(OctavoError):
            await read(engine, "hello", nothing, "a")
        return await engine.totals()

    totals = run(fail())
    assert ledger.ends["a"][0] == "error"
    assert totals.finished == {"error": 1}
    assert balanced(totals)


def test_totals_count_tokens_as_receipts_do(engine: AsyncEngine) -> None:
    async def work() -> tuple[list[RequestOutput], EngineTotals]:
        prompts = ["the same beginning of all of them, " * 2 + str(i) for i in range(6)]
        streams = (read(engine, p, params(i, 9)) for i, p in enumerate(prompts))
        outputs = [snapshots[-1] for snapshots in await asyncio.gather(*streams)]
        return outputs, await engine.totals()

    outputs, totals = run(work())
    receipts = [output.receipt for output in outputs if output.receipt is not None]
    assert len(receipts) == 6
    prompt = sum(r.prompt_tokens for r in receipts)
    assert totals.prompt_tokens == totals.queried_tokens == prompt
    assert totals.reused_tokens + totals.computed_tokens == prompt
    assert totals.reused_tokens == sum(r.reused_tokens for r in receipts) > 0
    assert totals.generated_tokens == sum(r.completion_tokens for r in receipts) == 54
    assert totals.written_blocks == sum(r.written_blocks for r in receipts)
    assert totals.reclaimed_blocks == {}
    assert run(engine.reset_prefix_cache()) == totals.written_blocks
    assert run(engine.totals()).reclaimed_blocks == {"reset": totals.written_blocks}


def test_the_balance_holds_whenever_it_is_looked_at(directory: str) -> None:
    """Requests that come, leave, are refused and finish at random; the balance is looked at all the time."""
    rng = random.Random(4)
    looks: list[EngineTotals] = []
    ends: Counter[str] = Counter()
    ledger = Ledger()

    async def client(engine: AsyncEngine, i: int) -> None:
        await asyncio.sleep(rng.random() * ROUNDS / 300 if i % 2 else 0)
        own = SamplingParams(n=rng.choice([1, 1, 3]), max_tokens=rng.randrange(1, 30), ignore_eos=True)
        prompt = rng.choice(["hello", "hello" * 60, "x" * 4000, "another"])
        stream = engine.generate(prompt, own, f"r{i}", tenant=rng.choice("ab"))
        patience = rng.choice([1, 3, 1000])
        reason = None
        try:
            async for output in stream:
                patience -= 1
                if output.finished:
                    reason = output.outputs[0].finish_reason
                elif not patience:
                    reason = "left"
                    break
        except OctavoError as error:
            reason = "overload" if isinstance(error, Overloaded) else "refused"
        await stream.aclose()
        ends[reason or ""] += 1

    async def look(engine: AsyncEngine) -> None:
        while True:
            looks.append(await engine.totals())
            await asyncio.sleep(0.001)

    async def crowd() -> EngineTotals:
        options = {**OPTIONS, "max_num_seqs": 4, "max_waiting": 6, "kv_cache_memory": "128KiB"}
        async with AsyncEngine(directory, **options) as engine:
            engine.observe(ledger)
            watcher = asyncio.create_task(look(engine))
            await asyncio.gather(*(client(engine, i) for i in range(ROUNDS)))
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher
            await engine.check()
            return await engine.totals()

    totals = run(crowd())
    assert [look for look in [*looks, totals] if not balanced(look)] == []
    assert any(look.waiting for look in looks)
    assert (totals.running, totals.waiting) == (0, 0)
    assert totals.started == ROUNDS == sum(ends.values())
    assert totals.rejected == ends["overload"] + ends["refused"]
    assert min(ends["overload"], ends["refused"], ends["left"], ends["length"]) > 0
    reasons = Counter(reason for reason, _ in ledger.ends.values())
    assert totals.finished == {k: v for k, v in reasons.items() if k != "abort"}
    assert totals.cancelled == reasons["abort"] <= ends["left"]
    assert totals.started - totals.rejected == len(ledger.ends)


def test_health_of_an_idle_engine(engine: AsyncEngine) -> None:
    run(read(engine, "hello", params(1, 5)))
    health = run(at_rest(engine))
    assert (health.steps, health.has_work, health.failed) == (5, False, None)


def test_health_does_not_enter_the_engine_thread(engine: AsyncEngine) -> None:
    """A call that hangs, then a step that hangs: seen as work without progress, from any thread."""
    release, entered = threading.Event(), threading.Event()

    def hang(_: Engine) -> None:
        entered.set()
        release.wait()

    before = engine.health()
    held = engine.ask(hang)
    entered.wait()
    first = engine.health()
    engine.ask(Engine.stats)
    later = engine.health()
    while later.seconds_since_progress <= first.seconds_since_progress:
        later = engine.health()
    assert not before.has_work
    assert first.has_work
    assert later.has_work
    release.set()
    held.result()
    assert not run(at_rest(engine)).failed


def test_health_sees_a_step_that_hangs(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    release, entered = threading.Event(), threading.Event()
    step = Engine.step

    def hang(self: Engine) -> Any:
        if self.steps == 3:
            entered.set()
            release.wait()
        return step(self)

    monkeypatch.setattr(Engine, "step", hang)

    async def work() -> None:
        reader = asyncio.create_task(read(engine, "hello", params(1, 9)))
        await asyncio.to_thread(entered.wait)
        one = engine.health()
        await asyncio.sleep(0.05)
        two = engine.health()
        assert one.steps == two.steps == 3
        assert two.has_work
        assert two.seconds_since_progress >= one.seconds_since_progress + 0.05
        release.set()
        await reader

    run(work())
    assert not run(at_rest(engine)).failed


def test_steps_without_progress_are_none(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that runs and computes nothing does not look healthy."""
    step, stuck = Engine.step, threading.Event()
    monkeypatch.setattr(Engine, "step", lambda self: [] if stuck.is_set() else step(self))

    async def work() -> None:
        stuck.set()
        reader = asyncio.create_task(read(engine, "hello", params(1, 9)))
        while not engine.health().has_work:
            await asyncio.sleep(0)
        one = engine.health()
        await asyncio.sleep(0.05)
        assert engine.health().seconds_since_progress >= one.seconds_since_progress + 0.05
        stuck.clear()
        await reader

    run(work())


def test_calls_without_end_do_not_keep_the_engine_from_its_steps(engine: AsyncEngine) -> None:
    stop = threading.Event()

    def again(inner: Engine) -> None:
        if not stop.is_set():
            engine.ask(again)

    async def work() -> int:
        for _ in range(3):
            engine.ask(again)
        output = (await read(engine, "hello", params(1, 20)))[-1]
        stop.set()
        return len(output.outputs[0].token_ids)

    assert run(work()) == 20


def test_health_of_an_engine_that_has_ended(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Engine) -> None:
        raise ZeroDivisionError("by design")

    monkeypatch.setattr(Engine, "step", fail)
    with pytest.raises(OctavoError, match="has failed"):
        run(read(engine, "hello"))
    health = engine.health()
    assert not health.has_work
    assert health.failed is not None
    assert "by design" in health.failed
    engine.close()
    assert "by design" in (engine.health().failed or "")
