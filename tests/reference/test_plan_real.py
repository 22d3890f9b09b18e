"""Plans come true: what the planner says of bytes, limits and refusals is what a running engine does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MistralConfig

from octavo.cache.formats import FORMATS, LEAST_STORED_BLOCK
from octavo.cache.layout import CacheLayout
from octavo.engine import Engine
from octavo.errors import KVCacheTooSmall
from octavo.plan.planner import Case
from octavo.plan.report import make_plan
from octavo.plan.start import plan_engine
from octavo.schedule.limits import Limits
from support.engines import greedy, make_engine, submit
from support.sizes import sized
from support.tiny import BASE, VOCAB_SIZE, WINDOW

LONG = {**BASE, "max_position_embeddings": 4096}
SHAPES: dict[str, Callable[[], Any]] = {
    "grouped": lambda: LlamaConfig(**LONG),
    "all heads": lambda: LlamaConfig(**{**LONG, "num_key_value_heads": 4}),
    "Gemma: windows and one KV head": lambda: Gemma2Config(
        **{**LONG, "num_key_value_heads": 1}, head_dim=32, query_pre_attn_scalar=32, sliding_window=WINDOW
    ),
    "windows alone": lambda: MistralConfig(**LONG, sliding_window=WINDOW),
    "heads of 20": lambda: LlamaConfig(**{**LONG, "hidden_size": 80}, head_dim=20),
    "heads of 33": lambda: GPT2Config(
        vocab_size=VOCAB_SIZE,
        n_embd=66,
        n_layer=2,
        n_head=2,
        n_positions=4096,
        bos_token_id=256,
        eos_token_id=None,
    ),
}
HEADS = {"Gemma: windows and one KV head": 32, "heads of 20": 20, "heads of 33": 33}
BLOCK_SIZES = sized([4, 16, 64], [4, 8, 16, 32, 64, 128, 256])
BLOCKS = sized([3], [1, 2, 3, 5, 8])


def possible(shape: str, format: str, block_size: int) -> bool:
    """Whether the engine takes this, and does not say why not: bf16 holds numbers in pairs, stored blocks are of 16
    positions or more, and of heads that their format divides."""
    head_dim, sealed = HEADS.get(shape, 16), FORMATS[format]
    if not sealed.is_compute and (block_size < LEAST_STORED_BLOCK or head_dim % sealed.unit):
        return False
    return format == "f32" or head_dim % 2 == 0


CASES = [
    (shape, format, block_size)
    for shape in SHAPES
    for format in FORMATS
    for block_size in BLOCK_SIZES
    if possible(shape, format, block_size)
]


@pytest.fixture(scope="module")
def directory_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def directory(shape: str) -> Path:
        if shape not in made:
            torch.manual_seed(0)
            made[shape] = tmp_path_factory.mktemp("shape")
            AutoModelForCausalLM.from_config(SHAPES[shape]()).save_pretrained(made[shape])
        return made[shape]

    return directory


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path_factory.getbasetemp() / "home"))


def planned(directory: Path, format: str, block_size: int, context: int, budget: int = 1 << 30) -> Case:
    """The case of `octavo plan`, whose budget is that of the engine it is compared with."""
    weights = "f32" if format == "f32" else "bf16"
    options = {"context": str(context), "kv_cache_dtype": format, "weights": weights}
    plan = make_plan(str(directory), "cpu", kv_budget=str(budget), block_size=block_size, **options)
    return plan.first


def started(directory: Path, case: Case, budget: int, **options: Any) -> Engine:
    return make_engine(
        directory,
        dtype="float32" if case.weights == "f32" else "bfloat16",
        kv_cache_dtype=case.format,
        block_size=case.layout.block_size,
        kv_cache_memory=budget,
        num_threads=1,
        **{"enable_prefix_caching": False, "max_num_batched_tokens": 8, **options},
    )


def least_free(engine: Engine) -> int:
    """Serve what is queued; the fewest bytes that were free after a step, counted before what ends is freed."""
    free = engine.cache.arena.bytes_free
    extend = engine.cache.extend

    def watched(*arguments: Any) -> bool:
        nonlocal free
        done = extend(*arguments)
        free = min(free, engine.cache.arena.bytes_free)
        return done

    engine.cache.extend = watched  # type: ignore[method-assign]
    while engine.has_work:
        engine.step()
    engine.check()
    return free


@pytest.mark.parametrize("blocks", BLOCKS)
@pytest.mark.parametrize(("shape", "format", "block_size"), CASES)
def test_a_request_fills_its_cache_to_the_last_block(
    shape: str, format: str, block_size: int, blocks: int, directory_of: Callable[[str], Path]
) -> None:
    directory, context = directory_of(shape), blocks * block_size
    budget = planned(directory, format, block_size, context).bytes_per_request
    case = planned(directory, format, block_size, context, budget)
    assert (case.cache_bytes, case.max_requests) == (budget, 1)

    engine = started(directory, case, budget)
    assert case.max_context in (None, engine.scheduler.limits.arena)
    prompt = [1] * (context // 2)
    live = submit(engine, "exact", (prompt, greedy(context - len(prompt))))
    assert least_free(engine) == 0
    assert live.request.receipt.preemptions == 0
    assert len(live.output().outputs[0].token_ids) == context - len(prompt)
    assert engine.cache.arena.bytes_free == budget

    # Where windows drop the large first block, what follows it may fit in the bytes it had.
    if (longest := case.max_context) is not None:
        assert longest >= context
        over = planned(directory, format, block_size, longest + 1)
        with pytest.raises(KVCacheTooSmall, match="shorten it by 1 ") as error:
            engine.prepare("too long", [1] * longest, greedy(1))
        named = re.search(r"kv_cache_memory of at least (\d+)", error.value.message)
        assert named is not None
        assert int(named[1]) == over.bytes_per_request > budget


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", ["grouped", "Gemma: windows and one KV head"])
def test_as_many_requests_run_as_planned(
    shape: str, format: str, directory_of: Callable[[str], Path]
) -> None:
    directory, context, wanted = directory_of(shape), 64, 3
    budget = wanted * planned(directory, format, 16, context).bytes_per_request + 100
    case = planned(directory, format, 16, context, budget)
    assert case.max_requests == wanted
    engine = started(directory, case, budget, max_num_batched_tokens=512)
    lives = [submit(engine, str(i), ([1] * (context - 4), greedy(4))) for i in range(wanted + 2)]
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, len(engine.scheduler.running))
    assert most == wanted
    # While a chunk is computed, its stored blocks are there in both forms; that may cost others theirs.
    assert sum(live.request.receipt.preemptions for live in lives) == 0 or not FORMATS[format].is_compute


@pytest.mark.parametrize("shape", SHAPES)
def test_planner_and_engine_see_the_same_layer_groups(
    shape: str, directory_of: Callable[[str], Path]
) -> None:
    case = planned(directory_of(shape), "f32", 16, 64)
    engine = started(directory_of(shape), case, 1 << 20)
    assert engine.layout == case.layout == case.device_layout


def test_one_function_serves_planner_allocator_and_scheduler(
    directory_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = directory_of("grouped")
    case = planned(directory, "f32", 16, 64)
    engine = started(directory, case, 1 << 20)
    ours, theirs = case.layout.sequence_bytes, engine.cache.layout.sequence_bytes
    assert ours.__func__ is theirs.__func__ is CacheLayout.sequence_bytes  # type: ignore[attr-defined]
    assert engine.cache.layout is engine.layout

    asked: list[CacheLayout] = []
    right = CacheLayout.sequence_bytes

    def watched(layout: CacheLayout, *arguments: Any) -> int:
        asked.append(layout)
        return right(layout, *arguments)

    monkeypatch.setattr(CacheLayout, "sequence_bytes", watched)
    assert case.bytes_per_request == right(case.layout, 64)
    assert asked == [case.layout]
    submit(engine, "one", ([1] * 40, greedy(2)))
    engine.step()  # admission
    with pytest.raises(KVCacheTooSmall):
        Limits(engine.layout, 1 << 10, None).check(10_000)
    assert len(asked) > 2
    assert all(layout is engine.layout for layout in asked[1:])


def test_the_plan_of_a_started_engine(directory_of: Callable[[str], Path]) -> None:
    directory = directory_of("grouped")
    case = planned(directory, "bf16", 16, 64)
    engine = started(directory, case, 3 * case.bytes_per_request)
    plan = plan_engine(engine)
    assert plan.cache_bytes == 3 * case.bytes_per_request
    assert plan.limit == engine.scheduler.limit == 192
    assert plan.max_requests == 1
    assert plan.weights_bytes == engine.runner.weights_bytes > 0
    assert plan.scratch_bytes == engine.runner.scratch_bytes > 0
    assert plan.whole_bytes > plan.cache_bytes + plan.weights_bytes
    text = "\n".join(plan.lines())
    for words in (
        "of cache in bf16",
        "the longest request is 192 tokens",
        "1 of 192 tokens, 4 of 48",
        "at most 64",
    ):
        assert words in text


CHILD = """
import json, sys
from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.params import SamplingParams
from octavo.plan.start import plan_engine
from octavo.ram import resident_bytes

options = json.loads(sys.argv[1])
engine = Engine(EngineConfig.create("smollm2", num_threads=1, **options))
plan = plan_engine(engine)
number = 0
while engine.cache.arena.bytes_free >= engine.layout.sequence_bytes(512):
    prompt = [1 + (7 * number + i) % 40_000 for i in range(511)]
    engine.submit(engine.prepare(str(number), prompt, SamplingParams(max_tokens=1)))
    number += 1
    while engine.has_work:
        engine.step()
print(json.dumps({"planned": plan.whole_bytes, "real": resident_bytes(), "free": engine.cache.arena.bytes_free,
                  "weights": plan.weights_bytes, "scratch": plan.scratch_bytes, "cache": plan.cache_bytes}))
"""


@pytest.mark.model
@pytest.mark.skipif(
    sized(True, False), reason="fills caches of 256 and 512 MiB with SmolLM2, which takes minutes"
)
@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", "512MiB"), ("float32", "256MiB")])
def test_the_whole_process_is_as_large_as_planned(
    dtype: str, size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 5 %: the plan printed at start, and the one that `octavo plan --hardware this` makes of parts."""
    monkeypatch.delenv("OCTAVO_HOME")
    options = json.dumps({"dtype": dtype, "kv_cache_memory": size})
    child = subprocess.run([sys.executable, "-c", CHILD, options], capture_output=True, text=True, check=True)
    found = json.loads(child.stdout)
    assert found["free"] < 24 << 20  # one more request of 512 tokens would not fit
    assert found["planned"] == pytest.approx(found["real"], rel=0.05)
    process = subprocess.run(
        [sys.executable, "-m", "octavo.plan.process"], capture_output=True, text=True, check=True
    )
    parts = int(process.stdout) + found["weights"] + found["scratch"] + found["cache"]
    assert parts == pytest.approx(found["real"], rel=0.05)
