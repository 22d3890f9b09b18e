"""How many conversations an arena keeps, by format, found by filling it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from octavo.cache.layout import CacheLayout
from octavo.engine import Engine
from support.engines import finish, greedy, make_engine, submit
from support.sizes import sized
from unit.model_builders import LLAMA, save_model

LENGTH = 2000
ROOM = sized(10, 20)
"""Conversations that the arena holds in bf16."""
AT_LEAST = {"int8": 1.7, "fp8": 1.7, "int4": 3.0, "int2": 4.8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {"head_dim": 64, "num_hidden_layers": 1, "max_position_embeddings": LENGTH + 1}
    return save_model(AutoConfig.for_model("llama", **{**LLAMA, **shape}), tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path_factory.getbasetemp()))


def engine_of(model: Path, format: str, memory: int | str = "8MiB") -> Engine:
    return make_engine(
        model,
        dtype="bfloat16",
        kv_cache_dtype=format,
        block_size=32,
        kv_cache_memory=memory,
        num_threads=1,
        max_num_batched_tokens=512,
    )


def kept(engine: Engine) -> int:
    """Conversations answered before the first block of one was taken back."""
    generator = torch.Generator().manual_seed(4)
    count = 0
    while True:
        prompt = torch.randint(256, (LENGTH,), generator=generator).tolist()
        submit(engine, f"conversation {count}", (prompt, greedy(1)))
        finish(engine)
        if engine.cache.pool.reclaimed:
            return count
        count += 1
        assert sum(engine.stats().formats.values()) == count * (LENGTH // 32)


def test_an_arena_keeps_as_many_conversations_as_the_bytes_say(model: Path) -> None:
    layout: CacheLayout = engine_of(model, "bf16").layout
    arena = ROOM * layout.sequence_bytes(LENGTH + 1)
    plain = kept(engine_of(model, "bf16", arena))
    assert plain == ROOM
    for format, times in AT_LEAST.items():
        found = kept(engine_of(model, format, arena))
        print(f"{format}: {found} instead of {plain}")
        assert found >= times * plain, format
