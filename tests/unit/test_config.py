"""Start-up options: what is accepted, and what a refusal says."""

import pytest

from octavo.cache.policy import POLICIES
from octavo.config import CACHE_POLICIES, EngineConfig, parse_bytes
from octavo.errors import ConfigError


def test_the_policies_are_those_of_the_cache() -> None:
    assert set(CACHE_POLICIES) == set(POLICIES)


@pytest.mark.parametrize(
    ("given", "value"), [("64MiB", 64 << 20), (1000, 1000), (0, 0), ("0", 0), (None, None)]
)
def test_max_pinned_is_a_size_or_nothing(given: object, value: int | None) -> None:
    assert EngineConfig.create("m", max_pinned=given).max_pinned == value


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"cache_policy": "fifo"}, "cache_policy"),
        ({"max_pinned": -1}, "max_pinned"),
        ({"max_pinned": True}, "max_pinned"),
        ({"max_pinned": "12 apples"}, "max_pinned"),
        ({"max_waiting": -1}, "max_waiting"),
        ({"max_waiting": True}, "max_waiting"),
        ({"kv_cache_memory": 0}, "kv_cache_memory"),
    ],
)
def test_an_impossible_option_is_named(options: dict[str, object], param: str) -> None:
    with pytest.raises(ConfigError, match=param) as error:
        EngineConfig.create("m", **options)
    assert error.value.param == param


def test_a_size_must_be_at_least_what_is_asked() -> None:
    with pytest.raises(ConfigError, match="size='0' must be at least 1"):
        parse_bytes("0")
    with pytest.raises(ConfigError, match="only 5"):
        EngineConfig.create("m", **{"only 5": 1})
