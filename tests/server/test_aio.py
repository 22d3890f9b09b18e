"""AsyncEngine on a tiny random model: many readers, readers that leave, and an engine that fails."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from transformers import LlamaConfig

from octavo import LLM, AsyncEngine, RequestOutput, SamplingParams
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.errors import (
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    OctavoError,
    Overloaded,
    RequestCancelled,
)
from octavo.kernels import native
from octavo.structured import StructuredOutputs
from unit.model_builders import LLAMA, save_model

OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "kv_cache_memory": "8MiB",
    "max_num_batched_tokens": 16,
    "num_threads": 1,
}
LONG = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LlamaConfig(**{**LLAMA, "max_position_embeddings": 2048})
    return str(save_model(config, tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def engine(directory: str) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(directory, **OPTIONS)
    yield engine
    engine.close()


def params(seed: int, max_tokens: int = 12) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, seed=seed, ignore_eos=True, logprobs=2)


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def bounded() -> Any:
        return await asyncio.wait_for(coroutine, 60)

    return asyncio.run(bounded())


async def read(engine: AsyncEngine, *args: Any) -> list[RequestOutput]:
    return [output async for output in engine.generate(*args)]


async def is_idle(engine: AsyncEngine) -> bool:
    """After a call that was sent later than anything before it."""
    stats = await engine.stats()
    await engine.check()
    return (stats.running, stats.waiting, stats.bytes_running) == (0, 0, 0)


def test_many_at_once_answer_as_the_offline_api_does(engine: AsyncEngine, directory: str) -> None:
    prompts = [f"prompt number {i} " * (i + 1) for i in range(6)]
    each = [params(seed) for seed in range(6)]

    async def together() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(read(engine, *pair) for pair in zip(prompts, each, strict=True)))

    with LLM(directory, **OPTIONS) as llm:
        expected = llm.generate(prompts, each)
    for snapshots, whole in zip(run(together()), expected, strict=True):
        last = snapshots[-1].outputs[0]
        assert (last.token_ids, last.logprobs) == (whole.outputs[0].token_ids, whole.outputs[0].logprobs)
        assert (last.text, last.finish_reason) == (whole.outputs[0].text, "length")
        assert [s.finished for s in snapshots] == [False] * (len(snapshots) - 1) + [True]
        assert snapshots[-1].receipt is not None
        assert snapshots[-1].receipt.completion_tokens == 12
        assert snapshots[-1].prompt == whole.prompt


def test_snapshots_grow(engine: AsyncEngine) -> None:
    snapshots = run(read(engine, "hello", params(3)))
    for before, after in itertools.pairwise(snapshots):
        one, other = before.outputs[0], after.outputs[0]
        assert other.token_ids[: len(one.token_ids)] == one.token_ids
        assert other.text.startswith(one.text)
        assert len(other.token_ids) > len(one.token_ids)


def test_a_slow_reader_misses_no_token(engine: AsyncEngine) -> None:
    async def slowly() -> list[RequestOutput]:
        snapshots = []
        async for output in engine.generate("hello", params(3, 40)):
            snapshots.append(output)
            while not await is_idle(engine):
                pass
        return snapshots

    quick = run(read(engine, "hello", params(3, 40)))[-1]
    snapshots = run(slowly())
    assert len(snapshots) <= 2
    assert snapshots[-1].outputs[0].token_ids == quick.outputs[0].token_ids
    assert len(quick.outputs[0].token_ids) == 40


def test_several_answers_of_one_prompt(engine: AsyncEngine) -> None:
    last = run(read(engine, "hello", SamplingParams(n=3, max_tokens=5, seed=2, ignore_eos=True)))[-1]
    assert [len(answer.token_ids) for answer in last.outputs] == [5, 5, 5]


def test_leaving_the_loop_aborts(engine: AsyncEngine) -> None:
    async def leave() -> bool:
        async for output in engine.generate("hello", LONG, "a"):
            assert not output.finished
            break
        for _ in range(3):  # the event loop closes the iterator, in turns of its own
            await asyncio.sleep(0)
        return await is_idle(engine)

    assert run(leave())


def test_cancelling_the_reader_aborts_and_leaves_the_neighbour_alone(engine: AsyncEngine) -> None:
    async def cancel() -> RequestOutput:
        neighbour = asyncio.create_task(read(engine, "neighbour", params(5, 200), "neighbour"))
        reader = asyncio.create_task(read(engine, "hello", LONG, "a"))
        while (await engine.stats()).running < 2:
            pass
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert (await engine.stats()).running <= 1
        last = (await neighbour)[-1]
        assert await is_idle(engine)
        return last

    alone = run(read(engine, "neighbour", params(5, 200)))[-1]
    assert run(cancel()).outputs == alone.outputs


@pytest.mark.parametrize("ticks", range(6))
def test_cancelling_at_any_moment_leaves_nothing_behind(engine: AsyncEngine, ticks: int) -> None:
    async def cancel() -> bool:
        reader = asyncio.create_task(read(engine, "hello" * 20, LONG, "a"))
        for _ in range(ticks):
            await asyncio.sleep(0)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        return await is_idle(engine)

    assert run(cancel())


def test_abort_from_another_thread_ends_the_iterator_with_what_there_is(engine: AsyncEngine) -> None:
    async def reader() -> list[RequestOutput]:
        snapshots = []
        async for output in engine.generate("hello", LONG, "a"):
            if not snapshots:
                thread = threading.Thread(target=engine.abort, args=("a",))
                thread.start()
                thread.join()
            snapshots.append(output)
        assert await is_idle(engine)
        return snapshots

    snapshots = run(reader())
    assert snapshots[-1].finished
    assert snapshots[-1].outputs[0].finish_reason == "abort"
    assert len(snapshots[-1].outputs[0].token_ids) >= len(snapshots[0].outputs[0].token_ids) >= 1


def test_abort_before_the_first_token(engine: AsyncEngine) -> None:
    async def abort() -> list[RequestOutput]:
        hold = threading.Event()
        held = asyncio.create_task(engine.call(lambda _: hold.wait()))
        reader = asyncio.create_task(read(engine, "hello", SamplingParams(n=2), "a"))
        while not await asyncio.to_thread(lambda: engine._inbox.qsize()):
            pass
        engine.abort("a")
        hold.set()
        await held
        return await reader

    (only,) = run(abort())
    assert only.finished
    assert [(a.index, a.text, a.token_ids, a.finish_reason) for a in only.outputs] == [
        (0, "", [], "abort"),
        (1, "", [], "abort"),
    ]


def test_aborting_what_is_not_there_is_no_error(engine: AsyncEngine) -> None:
    engine.abort("nobody")
    assert run(is_idle(engine))


def test_errors_of_a_request_are_its_own(engine: AsyncEngine) -> None:
    async def both() -> tuple[list[RequestOutput], list[BaseException]]:
        neighbour = asyncio.create_task(read(engine, "neighbour", params(5, 60)))
        bad = [
            ("x" * 2048, None),
            ([-1], None),
            ([], None),
            ([10**20], None),
            ("x", 5),
            (b"x", None),
            ("x", None, 7),
        ]
        errors = await asyncio.gather(*(read(engine, *args) for args in bad), return_exceptions=True)
        return await neighbour, errors

    snapshots, errors = run(both())
    assert [error for error in errors if not isinstance(error, InvalidRequest)] == []
    assert len(snapshots[-1].outputs[0].token_ids) == 60


def test_a_form_that_takes_long_delays_nobody_else(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiling, go_on = threading.Event(), threading.Event()

    def slow(self: Any, form: Any) -> Any:
        compiling.set()
        assert go_on.wait(60)
        raise InvalidRequest("this form is none", param="structured_outputs")

    monkeypatch.setattr("octavo.grammar.Grammars.compile", slow)

    async def both() -> tuple[int, int]:
        before = await engine.totals()
        form = StructuredOutputs(choice=["a", "b"])
        held = asyncio.create_task(read(engine, "x", SamplingParams(max_tokens=3, structured_outputs=form)))
        await asyncio.to_thread(compiling.wait, 60)
        assert (await read(engine, "hello", params(1, 5)))[-1].finished
        go_on.set()
        with pytest.raises(InvalidRequest, match="this form is none"):
            await held
        after = await engine.totals()
        return after.rejected - before.rejected, after.started - before.started

    assert run(both()) == (1, 2)


def test_a_taken_id_is_refused_and_its_owner_goes_on(engine: AsyncEngine) -> None:
    async def twice() -> RequestOutput:
        first = engine.generate("hello", params(1, 60), "a")
        await anext(first)
        with pytest.raises(InvalidRequest, match="request_id='a' is already in use"):
            await read(engine, "other", params(2), "a")
        last = [output async for output in first][-1]
        assert (await read(engine, "hello", params(1, 60), "a"))[-1].outputs == last.outputs
        return last

    assert len(run(twice()).outputs[0].token_ids) == 60


def test_two_of_one_id_at_the_same_moment(engine: AsyncEngine) -> None:
    async def twice() -> list[Any]:
        return await asyncio.gather(
            *(read(engine, "hello", params(1), "a") for _ in range(2)), return_exceptions=True
        )

    first, second = run(twice())
    assert first[-1].finished
    assert isinstance(second, InvalidRequest)


def test_a_full_queue_is_the_newcomers_error(directory: str) -> None:
    async def crowd() -> list[Any]:
        async with AsyncEngine(directory, **OPTIONS, max_num_seqs=1, max_waiting=1) as engine:
            crowd = (read(engine, "hello", params(1, 30)) for _ in range(4))
            return await asyncio.gather(*crowd, return_exceptions=True)

    results = run(crowd())
    refused = [r for r in results if isinstance(r, Overloaded)]
    assert refused
    assert all(r[-1].finished for r in results if r not in refused)


def test_a_failing_engine_fails_every_reader_and_later_calls(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def crash() -> list[Any]:
        first, second = engine.generate("one", LONG), engine.generate("two", LONG)
        await anext(first)
        await anext(second)

        def fail(_: Engine) -> None:
            raise ZeroDivisionError("by design")

        monkeypatch.setattr(Engine, "step", fail)
        errors = []
        for reader in (first, second):
            try:
                async for _ in reader:
                    pass
            except OctavoError as error:
                errors.append(error)
        for later in (read(engine, "three"), engine.stats(), engine.check()):
            try:
                await later
            except OctavoError as error:
                errors.append(error)
        engine.abort("request-0")
        return errors

    errors = run(crash())
    assert [str(e) for e in errors] == [
        "the engine has failed (ZeroDivisionError: by design); make a new one"
    ] * 5
    assert isinstance(errors[0].__cause__, ZeroDivisionError)


def test_closing_ends_open_readers_and_gives_the_arena_back(directory: str) -> None:
    async def close() -> None:
        engine = AsyncEngine(directory, **OPTIONS)
        reader = engine.generate("hello", LONG)
        await anext(reader)
        await asyncio.to_thread(engine.close)
        with pytest.raises(RequestCancelled, match="closed"):
            async for _ in reader:
                pass
        with pytest.raises(RequestCancelled, match="closed"):
            await read(engine, "hello")
        with pytest.raises(RequestCancelled, match="closed"):
            await engine.stats()
        engine.close()
        assert engine._engine is None
        assert not engine._thread.is_alive()

    run(close())


def test_an_idle_engine_computes_nothing_and_waits(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: calls.append(1) or step(engine))
    run(read(engine, "hello", params(1, 5)))
    assert run(is_idle(engine))
    done = len(calls)
    assert done == 5
    assert run(is_idle(engine))
    assert len(calls) == done


def test_the_engine_thread_has_the_threads_asked_for(directory: str) -> None:
    import torch

    async def threads(engine: AsyncEngine) -> tuple[int, int]:
        return await engine.call(lambda _: (torch.get_num_threads(), native.observed_threads()))

    for count in (2, 1):
        engine = AsyncEngine(EngineConfig.create(directory, **{**OPTIONS, "num_threads": count}))
        assert run(threads(engine)) == (count, count)
        engine.close()


def test_errors_of_the_start_are_raised_by_the_constructor() -> None:
    with pytest.raises(ModelNotFound, match="no-such-model"):
        AsyncEngine("no-such-model")
    with pytest.raises(ConfigError, match="unknown option 'blocksize'"):
        AsyncEngine("no-such-model", blocksize=16)
    with pytest.raises(ConfigError, match="seed"):
        AsyncEngine(EngineConfig("no-such-model"), seed=1)


def test_readers_in_two_event_loops_at_once(engine: AsyncEngine) -> None:
    results: dict[int, RequestOutput] = {}

    def reader(seed: int) -> None:
        results[seed] = run(read(engine, "hello", params(seed, 30)))[-1]

    threads = [threading.Thread(target=reader, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in (1, 2):
        assert results[seed].outputs == run(read(engine, "hello", params(seed, 30)))[-1].outputs
