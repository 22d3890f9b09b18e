"""Puts `tests/` on the import path, and holds what is loaded once per session."""

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.engine import Engine
from octavo.errors import ModelNotFound

# A job in the background may start with Ctrl-C ignored, and so would the programs the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directory of a tiny random model, by its kind in `support.tiny`."""
    from support.tiny import save_tiny

    made: dict[str, Path] = {}

    def directory(kind: str) -> Path:
        if kind not in made:
            made[kind] = save_tiny(kind, tmp_path_factory.mktemp("tiny"))
        return made[kind]

    return directory


@pytest.fixture(scope="session")
def _session_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def engine_of(
    tiny: Callable[[str], Path], _session_home: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Engine]:
    """Makes an engine of a tiny model; what it learns at start-up is kept for this session only."""
    from support.engines import make_engine

    monkeypatch.setenv("OCTAVO_HOME", str(_session_home))
    return lambda kind, **options: make_engine(tiny(kind), **options)


@contextmanager
def _smollm2(**options: Any) -> Iterator[LLM]:
    try:
        llm = LLM("smollm2", **{"kv_cache_memory": "512MiB", **options})
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")
    with llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2_of() -> Callable[..., AbstractContextManager[LLM]]:
    """Opens SmolLM2 with other options."""
    return _smollm2


@pytest.fixture(scope="session")
def smollm2_bf16() -> Iterator[LLM]:
    """SmolLM2 in bf16, 512 MiB of cache, everything else by default."""
    with _smollm2(dtype="bfloat16") as llm:
        yield llm


@pytest.fixture(scope="session")
def smollm2_f32() -> Iterator[LLM]:
    """SmolLM2 in float32, 512 MiB of cache, everything else by default."""
    with _smollm2(dtype="float32") as llm:
        yield llm
