"""The cache alone: every request finishes before the next arrives, and blocks are those of the trace.

What is counted: sealed blocks found over all blocks asked for. A partial last block is never found, at least one token
of each request is computed, and children are reclaimed before their parents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cache.hashing import Namespace
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cache.manager import CacheManager
from octavo.errors import ConfigError
from octavo.simulate.trace import Arrival

# Only whole blocks matter here, so a block of the trace is one of few tokens.
_BLOCK = 4
_LAYOUT = CacheLayout((LayerGroup((0,), 1, 1),), _BLOCK, "bf16")


@dataclass(frozen=True)
class CacheOnly:
    """Hits of a trace on a cache of `capacity` blocks; None is one that holds everything."""

    capacity: int | None
    policy: str
    requests: int
    blocks: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """Blocks found over blocks asked for."""
        return self.hits / self.blocks

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "capacity_blocks": self.capacity,
            "cache_policy": self.policy,
            "requests": self.requests,
            "blocks": self.blocks,
            "hit_blocks": self.hits,
            "hit_rate": self.hit_rate,
        }


def cache_only(arrivals: Sequence[Arrival], capacity: int | None, policy: str = "lru") -> CacheOnly:
    """Replay `arrivals`. Raises `ConfigError` for a trace without blocks, or a capacity that a request exceeds."""
    blocks = sum(_blocks(arrival) for arrival in arrivals)
    if not blocks:
        raise ConfigError(
            "trace: it says nothing of shared prefixes, so there is nothing to find", param="trace"
        )
    longest = max(_blocks(arrival) for arrival in arrivals)
    if capacity is not None and capacity < longest:
        raise ConfigError(
            f"capacity={capacity} blocks cannot hold the longest request, which has {longest}",
            param="capacity",
        )
    cache = CacheManager(_LAYOUT, (capacity or blocks) * _LAYOUT.block_bytes(0), policy=policy)
    hits = 0
    for arrival in arrivals:
        tokens = [name for name in arrival.ids[: arrival.full] for _ in range(_BLOCK)]
        tokens += arrival.ids[arrival.full :]
        if not tokens:
            continue
        lease = cache.lease(Namespace())
        hits += cache.match(lease, tokens) // _BLOCK
        done = cache.extend(lease, len(tokens))
        assert done
        cache.commit(lease, tokens, len(tokens))
        cache.release(lease)
    return CacheOnly(capacity, policy, len(arrivals), blocks, hits)


def _blocks(arrival: Arrival) -> int:
    return len(arrival.ids)
