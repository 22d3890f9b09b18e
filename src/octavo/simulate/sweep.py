"""What a command sweeps, as a user writes it: several values with commas, and every combination of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from octavo.cache.policy import POLICIES
from octavo.errors import ConfigError, show
from octavo.simulate.routing import ROUTINGS

MOST_BLOCKS = 10**12
MOST_REPLICAS = 100_000
_COUNT = re.compile(r"([0-9]{1,18})(k?)")


@dataclass(frozen=True)
class Setting:
    """One combination of what can be swept. `capacity` is the cache of a replica, in sealed blocks of the format; None
    is what fits."""

    kv_cache_dtype: str
    capacity: int | None
    cache_policy: str
    replicas: int
    routing: str


def settings(
    formats: Sequence[str], capacity: str | None, policy: str, replicas: str, routing: str
) -> list[Setting]:
    """Every combination of what is listed with commas, equal ones once. Raises `ConfigError`."""
    combinations = product(
        formats,
        _capacities(capacity),
        _names("cache_policy", policy, POLICIES),
        [_count("replicas", part.strip(), MOST_REPLICAS) for part in replicas.split(",")],
        _names("routing", routing, ROUTINGS),
    )
    return [Setting(*values) for values in dict.fromkeys(combinations)]


def cache_settings(capacity: str | None, policy: str) -> list[tuple[int | None, str]]:
    """Capacities and policies of `--cache-only`; no capacity, or `unlimited`, is None. Raises `ConfigError`."""
    combinations = product(_names("cache_policy", policy, POLICIES), _capacities(capacity))
    return [(blocks, name) for name, blocks in dict.fromkeys(combinations)]


def check_capacity(text: str, kv_budget: str | None) -> None:
    """Of a timed run, whose cache is as large as one of the two says. Raises `ConfigError`."""
    if kv_budget is not None:
        raise ConfigError(
            f"capacity={show(text)} and kv_budget={show(kv_budget)} both say how large the cache is; leave one out",
            param="capacity",
        )
    if None in _capacities(text):
        raise ConfigError(
            f"capacity={show(text)}: only --cache-only knows a cache without limit; give a number, or leave it out for "
            "what fits",
            param="capacity",
        )


def _capacities(text: str | None) -> list[int | None]:
    if text is None:
        return [None]
    parts = [part.strip() for part in text.split(",")]
    return [None if part == "unlimited" else _count("capacity", part, MOST_BLOCKS) for part in parts]


def _count(param: str, text: str, most: int) -> int:
    match = _COUNT.fullmatch(text)
    count = int(match[1]) * (1000 if match[2] else 1) if match else 0
    if not 1 <= count <= most:
        raise ConfigError(
            f"{param}={show(text)} must be a whole number from 1 to {most}, such as 8 or 10k", param=param
        )
    return count


def _names(param: str, text: str, known: dict[str, Any]) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if part not in known:
            raise ConfigError(f"{param}={show(part)} is not one of {', '.join(known)}", param=param)
    return parts
