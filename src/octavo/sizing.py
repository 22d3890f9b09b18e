"""Start-up arithmetic: the format, the context and the cache that a configuration, a model and a machine allow."""

from __future__ import annotations

import logging
import re

import torch

from octavo.cache.formats import LEAST_STORED_BLOCK
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.config import BLOCK_SIZES, EngineConfig, format_bytes
from octavo.errors import ConfigError
from octavo.model.spec import ModelSpec
from octavo.ram import available_bytes
from octavo.schedule.limits import UNNAMED_CONTEXT

logger = logging.getLogger("octavo")


def cache_layout(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> CacheLayout:
    """How blocks lie. Raises `ConfigError` for a format that the model or its compute type cannot have."""
    own = "bf16" if dtype == torch.bfloat16 else "f32"
    groups = spec.layer_groups()
    format = _format(config.kv_cache_dtype, own, "kv_cache_dtype")
    overrides = {}
    for kind, wanted in config.kv_cache_dtype_overrides.items():
        overrides[kind] = _format(wanted, own, "kv_cache_dtype_overrides")
        if not any(_kind(group) == kind for group in groups):
            raise ConfigError(
                f"kv_cache_dtype_overrides={kind}={wanted}: this model has no such layers, only "
                f"{' and '.join(dict.fromkeys(_kind(group) for group in groups))} ones",
                param="kv_cache_dtype_overrides",
            )
    formats = tuple(overrides.get(_kind(group), format) for group in groups) if overrides else ()
    ladder = tuple(_format(step, own, "compress_under_pressure") for step in config.compress_under_pressure)
    return CacheLayout(groups, config.block_size, format, own, formats, ladder)


def _kind(group: LayerGroup) -> str:
    return "full" if group.window is None else "sliding"


def _format(wanted: str, own: str, param: str) -> str:
    """`wanted` with its compute parts checked; `auto` is the compute type."""
    parts = re.split(r"(?<==)|(?=,)|(?<=,)", wanted) if "=" in wanted else [wanted]
    if any(part in ("bf16", "f32") and part != own for part in parts):
        raise ConfigError(
            f"{param}={wanted!r} differs from the compute type {own!r}; use 'auto', or dtype="
            f"{'bfloat16' if own == 'f32' else 'float32'!r}",
            param=param,
        )
    return "".join(own if part == "auto" else part for part in parts)


def context_limit(config: EngineConfig, spec: ModelSpec) -> int:
    """Most tokens of a sequence, the cache's size aside. Raises `ConfigError` if the model cannot have them."""
    own, wanted = spec.max_position_embeddings, config.max_model_len
    if wanted is None:
        return own or UNNAMED_CONTEXT
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
    if free < least:
        smallest = LEAST_STORED_BLOCK if layout.is_stored else BLOCK_SIZES[0]
        smaller = f", or a block_size below {layout.block_size}" if layout.block_size > smallest else ""
        raise ConfigError(
            f"kv_cache_memory={wanted} bytes: with the weights loaded {free} bytes are free, and one block per "
            f"layer group takes {least}; {least - free} more bytes of memory are needed{smaller}",
            param="kv_cache_memory",
        )
    if wanted > free or least > wanted:
        raise ConfigError(
            f"kv_cache_memory={wanted} bytes: with the weights loaded {free} bytes are free, and one block per "
            f"layer group takes {least}; choose a value in between",
            param="kv_cache_memory",
        )
    return wanted
