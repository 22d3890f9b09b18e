"""What a machine has no room for is said with what would help."""

from __future__ import annotations

import re

import pytest

from octavo import sizing
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.config import EngineConfig
from octavo.errors import ConfigError


def refused(monkeypatch: pytest.MonkeyPatch, free: int, wanted: int | None, layout: CacheLayout) -> str:
    """What is said of a cache of `wanted` bytes where `free` are free."""
    monkeypatch.setattr(sizing, "available_bytes", lambda: free)
    with pytest.raises(ConfigError) as error:
        sizing.cache_budget(EngineConfig.create("m", kv_cache_memory=wanted), layout)
    assert error.value.param == "kv_cache_memory"
    return str(error.value)


@pytest.mark.parametrize("wanted", [None, 300, 5000])
@pytest.mark.parametrize(
    ("format", "block_size", "helps"),
    [("bf16", 16, True), ("bf16", 4, False), ("int8", 32, True), ("int8", 16, False)],
)
def test_memory_for_less_than_a_block_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None, format: str, block_size: int, helps: bool
) -> None:
    layout = CacheLayout((LayerGroup((0,), 2, 64),), block_size, format)
    least = sum(layout.block_sizes_bytes)
    text = refused(monkeypatch, least - 24, wanted, layout)
    assert "24 more bytes of memory are needed" in text
    assert "in between" not in text
    assert ("block_size" in text) is helps
    monkeypatch.setattr(sizing, "available_bytes", lambda: least)
    assert sizing.cache_budget(EngineConfig.create("m", kv_cache_memory=least), layout) == least


@pytest.mark.parametrize("wanted", [None, 100, 1 << 30])
def test_a_size_that_does_not_fit_names_a_range_that_is_not_empty(
    monkeypatch: pytest.MonkeyPatch, wanted: int | None
) -> None:
    layout = CacheLayout((LayerGroup((0,), 2, 64),), 16, "bf16")
    least = sum(layout.block_sizes_bytes)
    text = refused(monkeypatch, least + 10, wanted, layout)
    assert "choose a value in between" in text
    free, takes = (int(re.search(words, text)[1]) for words in (r"(\d+) bytes are free", r"takes (\d+)"))  # type: ignore[index]
    assert takes <= free
