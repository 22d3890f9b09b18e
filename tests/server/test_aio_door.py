"""What enters the engine: whose request it is, and work beside the steps."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import LlamaConfig

from octavo import AsyncEngine, RequestOutput, SamplingParams
from octavo.errors import ContextLengthExceeded, InvalidRequest, RequestCancelled
from server.test_aio import LONG, OPTIONS, read, run
from unit.model_builders import LLAMA, save_model

PROMPT = "a prompt of some blocks, the same for everybody who asks"
SHORT = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = LlamaConfig(**{**LLAMA, "max_position_embeddings": 2048})
    return str(save_model(config, tmp_path_factory.mktemp("tiny") / "model"))


@pytest.fixture
def engine(directory: str) -> Iterator[AsyncEngine]:
    engine = AsyncEngine(directory, **OPTIONS)
    yield engine
    engine.close()


async def last(engine: AsyncEngine, *args: Any, **options: Any) -> RequestOutput:
    return [output async for output in engine.generate(*args, **options)][-1]


def test_a_tenant_finds_its_own_blocks_only(engine: AsyncEngine) -> None:
    async def reused() -> list[int | None]:
        tenants = ("ann", "ben", "ann", None, "", "ben")
        return [(await last(engine, PROMPT, SHORT, tenant=t)).num_cached_tokens for t in tenants]

    ann, ben, ann_again, nobody, engines_own, ben_again = run(reused())
    assert (ann, ben, nobody) == (0, 0, 0)
    assert ann_again == ben_again == engines_own == 48


def test_the_answer_is_the_same_for_every_tenant(engine: AsyncEngine) -> None:
    async def answers() -> list[RequestOutput]:
        return [await last(engine, PROMPT, SHORT, tenant=t) for t in ("ann", "ben", None)]

    first, *others = run(answers())
    assert all(other.outputs == first.outputs for other in others)


def test_a_label_goes_along(engine: AsyncEngine) -> None:
    async def label() -> str | None:
        stream = engine.generate(PROMPT, LONG, "a", label="chat 7", tenant="ann")
        await anext(stream)
        found = await engine.call(lambda e: e.scheduler.requests["a"])
        await stream.aclose()
        assert found.namespace.tenant == "ann"
        return found.label

    assert run(label()) == "chat 7"


@pytest.mark.parametrize("field", ["tenant", "label"])
def test_tenant_and_label_are_strings(engine: AsyncEngine, field: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{field}=7 is not a string") as error:
        run(last(engine, PROMPT, SHORT, **{field: 7}))
    assert error.value.param == field


def test_aside_runs_in_the_door_and_gives_back_results_and_errors(engine: AsyncEngine) -> None:
    async def names() -> tuple[str, str]:
        inside = await engine.aside(lambda: threading.current_thread().name)
        with pytest.raises(ZeroDivisionError):
            await engine.aside(lambda: 1 // 0)
        return inside, threading.current_thread().name

    inside, outside = run(names())
    assert inside.startswith("octavo-door")
    assert not outside.startswith("octavo-door")


def test_aside_delays_no_step(engine: AsyncEngine) -> None:
    """A stream goes on to its end while the door is held."""

    async def hold() -> int:
        stream = engine.generate(PROMPT, SamplingParams(max_tokens=50, ignore_eos=True))
        await anext(stream)
        release = threading.Event()
        held = asyncio.create_task(engine.aside(release.wait))
        tokens = [len(output.outputs[0].token_ids) async for output in stream][-1]
        release.set()
        assert await held
        return tokens

    assert run(hold()) == 50


def test_aside_ends_with_the_engine(directory: str) -> None:
    async def late() -> None:
        engine = AsyncEngine(directory, **OPTIONS)
        engine.close()
        with pytest.raises(RequestCancelled, match="closed"):
            await engine.aside(lambda: 1)
        assert engine.tokenizer.encode("a")

    run(late())


def test_prompt_logprobs_and_masks_come_through(engine: AsyncEngine) -> None:
    params = SamplingParams(
        max_tokens=6, seed=1, prompt_logprobs=2, allowed_token_ids=[70, 71], logprobs=1, ignore_eos=True
    )
    output = run(read(engine, PROMPT, params))[-1]
    assert output.prompt_logprobs is not None
    assert [entry is None for entry in output.prompt_logprobs] == [True] + [False] * (len(PROMPT))
    assert all(ids in (70, 71) for ids in output.outputs[0].token_ids)
    assert len(output.outputs[0].logprobs or ()) == 6


def test_a_text_beyond_all_bounds_is_refused_before_it_is_encoded(
    engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(*_: Any) -> list[int]:
        raise AssertionError("encoded")

    longest = len("</s>")
    with monkeypatch.context() as patched:
        patched.setattr(engine.tokenizer, "encode", encode)
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 2048 tokens") as error:
            run(last(engine, "x" * longest * 2048, SHORT))
        assert error.value.param == "prompt"
        with pytest.raises(ContextLengthExceeded, match="the prompt has at least 2048 and needs"):
            engine.check_text("x" * longest * 2048)
        engine.check_text("x" * longest * 2047)
    assert run(engine.totals()).rejected == 1


def test_a_long_list_is_refused_before_its_ids_are_looked_at(engine: AsyncEngine) -> None:
    class Ids(list[int]):
        def __iter__(self) -> Iterator[int]:
            raise AssertionError("looked at")

    with pytest.raises(
        ContextLengthExceeded, match="maximum context length is 2048 tokens, the prompt has 9000"
    ):
        run(last(engine, Ids([5] * 9000), SHORT))
    output = run(last(engine, [5] * 2047, SHORT))
    assert len(output.outputs[0].token_ids) == 1
