"""A tiny model behind a real socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from octavo import AsyncEngine
from support.serving import SMALL, Served, serving


@pytest.fixture(scope="session")
def tiny_engine(
    tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AsyncEngine]:
    """One engine for all tests that leave it as they found it; its model never ends an answer by itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_HOME", str(tmp_path_factory.mktemp("home")))
        engine = AsyncEngine(str(tiny("llama")), **SMALL)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def served(tiny_engine: AsyncEngine) -> Iterator[Served]:
    """That engine behind a socket, as `tiny`, without keys, for the tests of a file.

    A test that counts from zero or wants other options takes `support.serving.serving`.
    """
    with serving(tiny_engine) as server:
        yield server
