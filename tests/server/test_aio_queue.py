"""A full queue: who comes then is turned away before anything is done for it, and as soon as there is room, let in."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngine, SamplingParams
from octavo.door import Door
from octavo.engine import Engine
from octavo.errors import Overloaded
from support.serving import SMALL

LONG = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=2, ignore_eos=True, seed=2)
PATIENCE_S = 60
STEP_S = 0.002


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the requests that reach the door."""
    names: list[str] = []
    prepare = Door.prepare

    def counted(door: Door, name: str, *args: Any) -> Any:
        names.append(name)
        return prepare(door, name, *args)

    monkeypatch.setattr(Door, "prepare", counted)
    return names


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that take their time, so that a long answer outlasts the test."""
    step = Engine.step

    def slowly(engine: Engine) -> Any:
        time.sleep(STEP_S)
        return step(engine)

    monkeypatch.setattr(Engine, "step", slowly)


@pytest.mark.usefixtures("slow")
def test_who_finds_it_full_reaches_no_door_and_room_is_seen_at_once(
    tiny: Callable[[str], Path], prepared: list[str]
) -> None:
    async def waiting(engine: AsyncEngine) -> int:
        return (await engine.stats()).waiting

    async def crowd() -> None:
        async with AsyncEngine(str(tiny("llama")), **SMALL, max_num_seqs=1, max_waiting=1) as engine:
            first, second = engine.generate("one", LONG), engine.generate("two", LONG)
            await anext(first)
            queued = asyncio.ensure_future(anext(second))
            while await waiting(engine) < 1:
                await asyncio.sleep(0.001)
            refused, stopped_at_the_door = 0, 0
            while not stopped_at_the_door:
                refused += 1
                with pytest.raises(Overloaded, match="1 requests wait and max_waiting=1") as caught:
                    await anext(engine.generate("three", SHORT, f"three-{refused}"))
                assert caught.value.retry_after_s >= 1
                stopped_at_the_door = refused + 2 - len(prepared)
                await asyncio.sleep(0.001)  # a step has to end before it is seen
            totals = await engine.totals()
            assert (totals.rejected, totals.started) == (refused, refused + 2)

            queued.cancel()
            await asyncio.gather(queued, return_exceptions=True)
            await second.aclose()
            fourth = asyncio.ensure_future(anext(engine.generate("four", SHORT)))
            while await waiting(engine) < 1:
                assert not fourth.done(), fourth.exception()
                await asyncio.sleep(0.001)
            await first.aclose()
            assert await fourth
            await engine.check()

    asyncio.run(asyncio.wait_for(crowd(), PATIENCE_S))
