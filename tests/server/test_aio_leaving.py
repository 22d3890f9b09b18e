"""Readers that leave at random points, again and again: nothing of them stays."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import resource
from collections import Counter
from pathlib import Path

import pytest
from transformers import LlamaConfig

from octavo import AsyncEngine, SamplingParams
from octavo.aio import _Stream
from octavo.answer import Answer
from octavo.cache.blocks import Lease
from octavo.live import LiveRequest
from octavo.params import StructuredOutputs
from octavo.schedule.request import Request, Sequence
from server.test_aio import OPTIONS, params, read
from support.sizes import sized
from unit.model_builders import LLAMA, save_model

ROUNDS = sized(140, 1000)
KINDS = (_Stream, LiveRequest, Answer, Request, Sequence, Lease)
FORM = StructuredOutputs(regex="[a-z ]{400}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LlamaConfig(**{**LLAMA, "max_position_embeddings": 2048})
    return str(save_model(config, tmp_path_factory.mktemp("tiny") / "model"))


def alive() -> Counter[str]:
    gc.collect()
    return Counter(type(thing).__name__ for thing in gc.get_objects() if type(thing) in KINDS)


def resident() -> int:
    """Bytes this process has in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


async def leave(engine: AsyncEngine, rng: random.Random, i: int) -> str:
    """One request that is left: before it begins, while it waits, while it is read, or not at all."""
    own = SamplingParams(
        n=rng.choice([1, 1, 2]),
        max_tokens=rng.choice([2, 40, 400]),
        ignore_eos=True,
        seed=i,
        structured_outputs=rng.choice([None, FORM]),
        prompt_logprobs=rng.choice([None, None, 2]),
        cache_ttl=rng.choice([None, None, 0.01]),
    )
    prompt = "shared beginning of everything " * rng.choice([1, 8]) + str(i % 7)
    stream = engine.generate(prompt, own, f"r{i}", tenant=rng.choice(["a", "b"]))
    how = rng.choice(["cancel", "close", "forget", "abort", "read"])
    if how == "cancel":
        reader = asyncio.create_task(anext(stream))
        for _ in range(rng.randrange(12)):
            await asyncio.sleep(0)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader
        return how
    seen = 0
    wanted = rng.randrange(1, 6)
    async for output in stream:
        seen += 1
        if output.finished:
            return how if output.outputs[0].finish_reason == "abort" else "finished"
        if seen == wanted and how == "abort":
            engine.abort(f"r{i}")
        if seen == wanted and how in ("close", "forget"):
            break
    if how == "close":
        await stream.aclose()
    return how


def test_a_thousand_readers_leave_and_nothing_stays(directory: str) -> None:
    rng = random.Random(11)
    grown: list[int] = []

    async def rounds(engine: AsyncEngine) -> tuple[Counter[str], Counter[str]]:
        how: Counter[str] = Counter()
        left: Counter[str] = Counter()
        for start in range(0, ROUNDS, 8):
            how.update(await asyncio.gather(*(leave(engine, rng, start + i) for i in range(8))))
            await asyncio.sleep(0.001)
            while (await engine.totals()).running or (await engine.totals()).waiting:
                await asyncio.sleep(0)
            await engine.check()
            if (start // 8) % 8 == 7:
                left += alive()
                grown.append(resident())
        return how, left

    async def whole() -> None:
        async with AsyncEngine(
            directory, **{**OPTIONS, "max_num_seqs": 4, "kv_cache_memory": "256KiB"}
        ) as engine:
            before = (await read(engine, "hello", params(3, 40)))[-1]
            await engine.check()  # the step that gave the last token is over
            assert alive() == Counter()
            how, left = await rounds(engine)
            assert left == Counter()
            assert min(how[kind] for kind in ("cancel", "close", "forget", "abort", "finished")) > 0
            assert not engine._streams
            stats = await engine.stats()
            assert (stats.running, stats.waiting, stats.bytes_running) == (0, 0, 0)
            totals = await engine.totals()
            assert totals.started == sum(totals.finished.values()) + totals.cancelled
            assert (await read(engine, "hello", params(3, 40)))[-1].outputs == before.outputs
            assert await engine.reset_prefix_cache() > 0
            assert (await engine.stats()).bytes_free == stats.bytes_total

    asyncio.run(asyncio.wait_for(whole(), sized(120, 1200)))
    half = len(grown) // 2
    assert max(grown[half:]) - max(grown[:half]) < 4 << 20


def test_the_cache_is_reset_while_requests_run(directory: str) -> None:
    """Again and again, under copies that wait for each other's blocks; answers stay as they are."""
    prompts = ["one beginning, twice " * 6 + str(i // 2) for i in range(8)]
    each = [params(i, 24) for i in range(8)]
    options = {**OPTIONS, "max_num_seqs": 4}

    async def answers(reset: bool) -> tuple[list[object], int]:
        async with AsyncEngine(directory, **options) as engine:
            done, forgotten = asyncio.Event(), 0

            async def again() -> int:
                count = 0
                while not done.is_set():
                    count += await engine.reset_prefix_cache()
                    await engine.check()
                return count

            task = asyncio.create_task(again()) if reset else None
            pairs = zip(prompts, each, strict=True)
            found = await asyncio.gather(*(read(engine, prompt, own) for prompt, own in pairs))
            done.set()
            if task is not None:
                forgotten = await task
            await engine.reset_prefix_cache()
            stats = await engine.stats()
            assert stats.bytes_free == stats.bytes_total
            return [outputs[-1].outputs for outputs in found], forgotten

    expected, _ = asyncio.run(answers(False))
    found, forgotten = asyncio.run(answers(True))
    assert found == expected
    assert forgotten > 0
