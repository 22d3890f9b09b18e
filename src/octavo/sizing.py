"""Start-up arithmetic: the format, the context and the cache that a configuration, a model and a machine allow."""

from __future__ import annotations

import logging

import torch

from octavo.cache.layout import CacheLayout
from octavo.config import KV_CACHE_DTYPES, EngineConfig, format_bytes
from octavo.errors import ConfigError
from octavo.model.spec import ModelSpec
from octavo.ram import available_bytes

logger = logging.getLogger("octavo")

_NO_LIMIT = 131_072  # context of a model whose configuration names none


def cache_format(config: EngineConfig, dtype: torch.dtype) -> str:
    """How sealed blocks are stored. Raises `ConfigError` for one that the engine does not have."""
    wanted, own = KV_CACHE_DTYPES[config.kv_cache_dtype], "bf16" if dtype == torch.bfloat16 else "f32"
    if wanted not in ("auto", own):
        raise ConfigError(
            f"kv_cache_dtype={wanted!r} differs from the compute type {own!r}; use 'auto', or dtype="
            f"{'bfloat16' if wanted == 'bf16' else 'float32'!r}",
            param="kv_cache_dtype",
        )
    return own


def context_limit(config: EngineConfig, spec: ModelSpec) -> int:
    """Most tokens of a sequence, the cache's size aside. Raises `ConfigError` if the model cannot have them."""
    own, wanted = spec.max_position_embeddings, config.max_model_len
    if wanted is None:
        return own or _NO_LIMIT
    if own is not None and wanted > own:
        raise ConfigError(
            f"max_model_len={wanted} is more than the {own} positions the model was made for; use at most {own}",
            param="max_model_len",
        )
    return wanted


def cache_budget(config: EngineConfig, layout: CacheLayout) -> int:
    """Bytes of the arena: as asked for, or half of what is free now that the weights are there.

    Raises `ConfigError` if that is less than one block per layer group or more than there is.
    """
    free, wanted = available_bytes(), config.kv_cache_memory
    least = sum(layout.block_sizes_bytes)
    if wanted is None:
        wanted = free // 2
        logger.info("kv_cache_memory: %s, half of the free memory", format_bytes(wanted))
    if wanted > free or least > wanted:
        raise ConfigError(
            f"kv_cache_memory={wanted} bytes: with the weights loaded {free} bytes are free, and one block per "
            f"layer group takes {least}; choose a value in between",
            param="kv_cache_memory",
        )
    return wanted
