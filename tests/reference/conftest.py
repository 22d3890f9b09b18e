"""Every path of the kernels; and tiny models on one thread: tests of the cache take many short steps, which two
threads do not make shorter."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM
from octavo.engine import Engine
from octavo.kernels import native


@pytest.fixture(params=native.paths())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each path of the native kernels that this machine can run, in turn."""
    best = native.path()
    native.select(request.param)
    yield request.param
    native.select(best)


@pytest.fixture
def single_of(engine_of: Callable[..., Engine]) -> Callable[..., Engine]:
    """Makes an engine of a tiny model that runs on one thread."""
    return lambda kind, **options: engine_of(kind, **{"num_threads": 1, **options})


@pytest.fixture
def llm_of(tiny: Callable[[str], Path], engine_of: object) -> Callable[..., AbstractContextManager[LLM]]:
    """Opens an `LLM` of a tiny model; `engine_of` sees to it that start-up leaves nothing behind."""

    @contextmanager
    def opened(kind: str, **options: Any) -> Iterator[LLM]:
        with LLM(str(tiny(kind)), **{"kv_cache_memory": "8MiB", "num_threads": 1, **options}) as llm:
            yield llm

    return opened
