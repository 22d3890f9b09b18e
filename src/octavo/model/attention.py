"""The hook into transformers: attention over Octavo's cache for models that are not fused.

transformers calls the function registered here once per layer; the step it belongs to is the one being run on this
thread. Masks are not made: what a row may see follows from its position and the layer's window.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from octavo.kernels import native
from octavo.kernels.native import LayerCache
from octavo.model.batch import Batch
from octavo.model.spec import LayerSpec

NAME = "octavo"
"""The name this attention is registered under."""


class _Current(threading.local):
    batch: Batch | None = None
    caches: tuple[tuple[int, LayerCache, LayerSpec], ...] = ()
    dtype: torch.dtype = torch.float32


_current = _Current()


def register() -> None:
    """Make `attn_implementation="octavo"` known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, _no_mask)


@contextmanager
def running(
    batch: Batch, caches: tuple[tuple[int, LayerCache, LayerSpec], ...], dtype: torch.dtype
) -> Iterator[None]:
    """Attention calls on this thread belong to `batch`; `caches[layer]` is (layer group, cache, spec)."""
    _current.batch, _current.caches, _current.dtype = batch, caches, dtype
    try:
        yield
    finally:
        _current.batch, _current.caches = None, ()


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    """`query [1, heads, rows, d]`, `key` and `value [1, kv heads, rows, d]` to `[1, rows, heads, d]`.

    Rows beyond the batch are padding and come out as zeros.
    """
    batch = _current.batch
    assert batch is not None, "octavo attention was called outside a step"
    group, cache, spec = _current.caches[module.layer_idx]
    rows = len(batch)
    q, k, v = (x[0].transpose(0, 1)[:rows].to(_current.dtype) for x in (query, key, value))
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    out = torch.zeros(query.shape[2], *q.shape[1:], dtype=_current.dtype)
    native.cache_write(cache, batch.placements[group], k, v)
    native.seal(_current.dtype, cache, batch.seals[group])
    native.attention(cache, batch.plans[group], q.contiguous(), out, spec.scaling, spec.softcap or 0.0)
    return out.to(query.dtype)[None], None
