"""The plan: what fits, and what binds. All bytes come from `CacheLayout`, which the engine allocates by.

Devices share a model by tensor parallelism: weights are cut evenly, and KV heads too; heads fewer than devices, and
latent vectors, are replicated.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property

from octavo.cache.formats import block_format
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.plan.facts import ModelFacts
from octavo.plan.hardware import Hardware
from octavo.plan.roofline import Bounds, Roofline


@dataclass(frozen=True)
class Budget:
    """What the cache may take: a `share` of all memory, or `nbytes`; with neither, what the hardware leaves to it."""

    share: float | None = None
    nbytes: int | None = None


@dataclass(frozen=True)
class Case:
    """One question: sequences of `context` tokens, `output` of them generated, in a cache format."""

    facts: ModelFacts
    hardware: Hardware
    weights: str
    format: str
    context: int
    output: int
    block_size: int | None = None
    budget: Budget = Budget()
    concurrency: int | None = None

    def __post_init__(self) -> None:
        block_format(self.format)

    @cached_property
    def layout(self) -> CacheLayout:
        """The cache of the whole model, as one device would hold it."""
        return self._layout(self.facts.spec.layer_groups())

    @cached_property
    def device_layout(self) -> CacheLayout:
        """The cache of one device."""
        devices = self.hardware.count
        return self._layout(
            tuple(replace(g, num_kv_heads=-(-g.num_kv_heads // devices)) for g in self.layout.groups)
        )

    def _layout(self, groups: tuple[LayerGroup, ...]) -> CacheLayout:
        size = self.block_size or block_format(self.format).block_size
        return CacheLayout(groups, size, self.format, compute="f32" if self.weights == "f32" else "bf16")

    @cached_property
    def roofline(self) -> Roofline:
        """Times on this hardware."""
        return Roofline(self.facts, self.hardware, self.weights, self.device_layout)

    @cached_property
    def weights_bytes(self) -> int:
        """Bytes of the weights on all devices."""
        return self.facts.weights.nbytes(self.weights)

    @cached_property
    def cache_bytes(self) -> int:
        """Bytes of cache on all devices: what was asked for, as far as weights and the process leave it."""
        return self._cache_beside(self.weights_bytes)

    def _cache_beside(self, weights_bytes: int) -> int:
        hardware = self.hardware
        taken = weights_bytes + hardware.count * hardware.process_bytes
        wanted = self.asked_bytes
        if wanted is None:
            usable = hardware.usable_share * hardware.count * hardware.free_bytes
            return max(0, int((usable - taken) * hardware.cache_share))
        return max(0, min(wanted, hardware.count * hardware.free_bytes - taken))

    @property
    def asked_bytes(self) -> int | None:
        """Bytes of cache on all devices as the budget names them; None where it leaves them to the hardware."""
        share = self.budget.share
        return self.budget.nbytes if share is None else int(share * self.hardware.total_bytes)

    @property
    def bytes_per_request(self) -> int:
        """Bytes of one sequence's cache, one copy of it."""
        return self.layout.sequence_bytes(self.context)

    @property
    def replication(self) -> float:
        """How many times the devices together hold a sequence."""
        return self.hardware.count * self.device_layout.sequence_bytes(self.context) / self.bytes_per_request

    @cached_property
    def max_requests(self) -> int:
        """Sequences that fit at a time, with no block in common."""
        return self._fit(self.cache_bytes)

    def _fit(self, cache_bytes: int) -> int:
        return self.device_layout.sequences_that_fit(cache_bytes // self.hardware.count, self.context)

    @cached_property
    def max_context(self) -> int | None:
        """Longest sequence when as many as asked for (1 if not asked) share the cache; None where windows bound it."""
        each = self.cache_bytes // self.hardware.count // (self.concurrency or 1)
        longest = self.device_layout.longest_sequence(each)
        return None if longest == sys.maxsize else longest

    @property
    def batch(self) -> int:
        """Sequences that decode together: as many as are asked for and fit, at least 1."""
        return max(1, min(self.concurrency or self.max_requests, self.max_requests))

    @cached_property
    def decode(self) -> Bounds:
        """One step of `batch` sequences at their full length."""
        return self.roofline.decode(self.context, self.batch)

    @cached_property
    def prefill(self) -> Bounds:
        """The prompt of one sequence."""
        return self.roofline.prefill(self.prompt)

    @property
    def prompt(self) -> int:
        """Tokens of a sequence that are not generated."""
        return max(1, self.context - self.output)

    @property
    def prefill_share(self) -> float:
        """The part of the busy time that goes to prompts, when `batch` sequences always run."""
        halfway = self.context - min(self.output, self.context - self.prompt) // 2
        decode = self.output * self.roofline.decode(halfway, self.batch).low / self.batch
        return self.prefill.low / (self.prefill.low + decode)

    @property
    def binding(self) -> str:
        """What limits: `weights` or `cache` where they leave no room for more, else what takes a decode step's time."""
        if not self.max_requests:
            too_large = not self._cache_beside(self.weights_bytes)
            return "weights" if too_large or self._fit(self._cache_beside(0)) else "cache"
        if self.concurrency is None or self.concurrency > self.max_requests:
            return "cache"
        return self.decode.bound
