"""The offline API on tiny models."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM


@pytest.fixture
def llm_of(tiny: Callable[[str], Path], engine_of: object) -> Callable[..., AbstractContextManager[LLM]]:
    """Opens an `LLM` of a tiny model; `engine_of` sees to it that start-up leaves nothing behind."""

    @contextmanager
    def opened(kind: str, **options: Any) -> Iterator[LLM]:
        with LLM(str(tiny(kind)), **{"kv_cache_memory": "8MiB", **options}) as llm:
            yield llm

    return opened
