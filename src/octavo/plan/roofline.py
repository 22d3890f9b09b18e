"""Bounds on time from work and rates: no step is faster than its operations or its reads at the peak rate allow.

The roofline model (Williams, Waterman, Patterson, 2009). The lower bound takes the slower of both as if they overlapped
perfectly at peak; the upper one does them one after the other at the slowest rate that sound kernels reach. What
devices tell each other is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.plan.facts import ModelFacts
from octavo.plan.hardware import Hardware
from octavo.plan.weights import bits

_MOST_BATCH = 1 << 20


@dataclass(frozen=True)
class Bounds:
    """Seconds: at least `low`, at most `high`. `bound` says what takes them: `compute` or `bandwidth`."""

    low: float
    high: float
    bound: str


@dataclass(frozen=True)
class Roofline:
    """Work and time of a model's steps on a machine. `layout` is the cache of one device."""

    facts: ModelFacts
    hardware: Hardware
    weights: str
    layout: CacheLayout

    def prefill(self, tokens: int) -> Bounds:
        """A prompt of `tokens` tokens and nothing beside it."""
        return self._bounds(self.prefill_flops(tokens), self.weight_reads(tokens), 0)

    def decode(self, context: int, batch: int) -> Bounds:
        """One step that gives each of `batch` sequences its token number `context`."""
        flops = batch * self.decode_flops(context)
        return self._bounds(flops, self.weight_reads(batch), batch * self.cache_reads(context))

    def step(
        self,
        rows: int,
        logits: int,
        seen: Sequence[int],
        pairs: Sequence[int],
        prompt_pairs: Sequence[int],
    ) -> Bounds:
        """A step of `rows` tokens, of which `logits` are sampled. By layer group: positions `seen`, and `pairs` of a
        query and a position, those of whole prompts apart."""
        weights, heads = self.facts.weights, self.facts.spec.num_attention_heads
        flops = 2.0 * ((weights.body + weights.active_experts) * rows + weights.head_matrix * logits)
        cache_bytes = 0.0
        for g, (group_flops, prompt_flops, nbytes) in enumerate(self._per_position):
            flops += heads * (group_flops * pairs[g] + prompt_flops * prompt_pairs[g])
            cache_bytes += nbytes * seen[g]
        return self._bounds(flops, self.weight_reads(rows), cache_bytes)

    @cached_property
    def _per_position(self) -> list[tuple[float, float, float]]:
        """By layer group: operations of one head on one pair, the same in prompts, and bytes of one position."""
        found = []
        for g, (group, readers) in enumerate(self._readers()):
            dims = group.head_dim + (group.values or group.head_dim)
            per_layer = self.layout.sealed_sizes_bytes[g] / len(group.layers) / self.layout.block_size
            found.append(
                (2.0 * readers * dims, 2.0 * readers * sum(self.facts.prefill_dims), readers * per_layer)
            )
        return found

    def compute_bound_batch(self, context: int) -> int | None:
        """The smallest batch whose decode step takes longer to compute than to read; None if there is none."""
        if self.decode(context, _MOST_BATCH).bound != "compute":
            return None
        low, high = 0, 1
        while self.decode(context, high).bound != "compute":
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            if self.decode(context, middle).bound == "compute":
                high = middle
            else:
                low = middle
        return high

    def prefill_flops(self, tokens: int) -> float:
        """Operations of a prompt, with the logits of its last token; masked pairs are not counted."""
        weights, spec = self.facts.weights, self.facts.spec
        flops = 2.0 * ((weights.body + weights.active_experts) * tokens + weights.head_matrix)
        for group, (_, per_pair, _) in zip(self.layout.groups, self._per_position, strict=True):
            flops += spec.num_attention_heads * per_pair * pairs_seen(tokens, group.window)
        return flops

    def decode_flops(self, context: int) -> float:
        """Operations for one token of a sequence that is `context` tokens long then. Latent attention is counted on
        its vectors, each as long for values as for keys."""
        weights, spec = self.facts.weights, self.facts.spec
        flops = 2.0 * (weights.body + weights.active_experts + weights.head_matrix)
        for group, (per_pair, _, _) in zip(self.layout.groups, self._per_position, strict=True):
            flops += spec.num_attention_heads * per_pair * min(context, group.window or context)
        return flops

    def weight_reads(self, tokens: int) -> float:
        """Bytes of weights, over all devices, that a step of `tokens` tokens reads once."""
        weights, (body, experts, rest) = self.facts.weights, self._number_bytes
        return weights.body * body + weights.experts_met(tokens) * experts + weights.head_matrix * rest

    @cached_property
    def _number_bytes(self) -> tuple[float, float, float]:
        """Bytes of a number of the layers, of the experts, and of the rest."""
        body, experts, rest = (float(bits(self.weights, part)) / 8 for part in ("body", "experts", "rest"))
        return body, experts, rest

    def cache_reads(self, context: int) -> float:
        """Bytes of keys and values on one device that a query reads as token number `context` of its sequence."""
        return sum(
            nbytes * min(context, group.window or context)
            for group, (_, _, nbytes) in zip(self.layout.groups, self._per_position, strict=True)
        )

    def _readers(self) -> list[tuple[LayerGroup, int]]:
        """Groups, and how many layers read each: its own and those that borrow from it."""
        own = self.facts.spec.layers
        found = []
        for group in self.layout.groups:
            shape = own[group.layers[0]].kv_shape
            found.append((group, sum(layer.kv_shape == shape for layer in own)))
        return found

    def _bounds(self, flops: float, weight_bytes: float, cache_bytes: float) -> Bounds:
        hardware = self.hardware
        compute = flops / (hardware.count * hardware.flops(self.weights))
        read = (weight_bytes / hardware.count + cache_bytes) / hardware.read_bytes_per_s
        slowest = compute / hardware.slowest["compute"] + read / hardware.slowest["read"]
        return Bounds(max(compute, read), slowest, "compute" if compute > read else "bandwidth")


def pairs_seen(tokens: int, window: int | None) -> int:
    """Pairs of a query and a position it sees in a sequence of `tokens` tokens."""
    inside = tokens if window is None else min(window, tokens)
    return inside * (inside + 1) // 2 + (tokens - inside) * inside
