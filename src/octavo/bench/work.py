"""How much work a step is: operations and bytes, from the model's shape alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.cache.layout import CacheLayout
from octavo.model.spec import ModelSpec

Span = tuple[int, int]
"""Positions `start .. stop - 1` of one sequence, computed in one step."""


@dataclass(frozen=True)
class Work:
    """Floating-point operations (a multiplication and an addition are two), and bytes that must be read."""

    flops: int
    bytes_read: int

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes_read + other.bytes_read)


@dataclass(frozen=True)
class ModelWork:
    """The work of a dense model's steps: `body` and `head` are the numbers in the matrices of the layers and the head.

    Counted are the matrix products and attention; norms, rotations and the sampler are small beside them. Where a step
    must read something once, it is counted once, however often a kernel reads it.
    """

    spec: ModelSpec
    layout: CacheLayout
    body: int
    head: int
    item_bytes: int

    @classmethod
    def of(cls, model: Any, spec: ModelSpec, layout: CacheLayout) -> ModelWork:
        """Read the shape of a transformers `model` (its weights are not touched; a meta model will do)."""
        head = model.get_output_embeddings().weight
        embeddings = [m for m in model.modules() if isinstance(m, torch.nn.Embedding)]
        tables = {id(m.weight) for m in embeddings} | {id(head)}
        body = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in tables)
        return cls(spec, layout, body, head.numel(), layout.item_bytes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step with logits reads."""
        return (self.body + self.head) * self.item_bytes

    def step(self, spans: Sequence[Span], logits: int) -> Work:
        """One forward pass over `spans`, with the logits of `logits` rows."""
        rows = sum(stop - start for start, stop in spans)
        flops = 2 * (self.body * rows + self.head * logits)
        read = (self.body + (self.head if logits else 0)) * self.item_bytes
        for start, stop in spans:
            flops += self.attention_flops(start, stop)
            read += self.cache_bytes(start, stop)
        return Work(flops, read)

    def prefill(self, tokens: int, chunk: int) -> Work:
        """A prompt of `tokens` tokens in chunks, with the logits of its last token."""
        work = Work(0, 0)
        for start in range(0, tokens, chunk):
            stop = min(tokens, start + chunk)
            work += self.step([(start, stop)], logits=int(stop == tokens))
        return work

    def decode(self, context: int, tokens: int) -> Work:
        """`tokens` steps of one token each; the first stands at position `context`."""
        work = Work(0, 0)
        for position in range(context, context + tokens):
            work += self.step([(position, position + 1)], logits=1)
        return work

    def attention_flops(self, start: int, stop: int) -> int:
        """Scores and weighted sums of the queries at `start .. stop - 1`, masked pairs not counted."""
        total = 0
        for group in self.layout.groups:
            pairs = sum(min(p + 1, group.window or stop) for p in range(start, stop))
            total += len(group.layers) * 4 * self.spec.num_attention_heads * group.head_dim * pairs
        return total

    def cache_bytes(self, start: int, stop: int) -> int:
        """Bytes of keys and values that the queries at `start .. stop - 1` see, each read once."""
        total = 0
        for group in self.layout.groups:
            first = 0 if group.window is None else max(0, start - group.window + 1)
            numbers = 2 * len(group.layers) * group.num_kv_heads * group.head_dim
            total += numbers * self.layout.item_bytes * (stop - first)
        return total


def model_work(path: Path, spec: ModelSpec, layout: CacheLayout) -> ModelWork:
    """The work of the model in directory `path`; no weights are read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return ModelWork.of(model, spec, layout)
