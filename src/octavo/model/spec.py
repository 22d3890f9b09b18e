"""The facts of a model that decide the shape of its cache and of its attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from octavo.cache.layout import LayerGroup
from octavo.errors import ModelRefused

_MOST = 2**31 - 1  # what the kernels count positions with
_LAYER_TYPES = {"full_attention", "sliding_attention"}


@dataclass(frozen=True)
class LayerSpec:
    """One attention layer. `window` w: position p reads p-w+1 .. p (None: everything before it).

    Scores are `softcap * tanh(q·k * scaling / softcap)`, or `q·k * scaling` where `softcap` is None. `value_dim` is 0
    where one latent vector per position is all that is kept (MLA). A layer that `borrows` reads the keys and values
    of an earlier one and keeps none.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None
    scaling: float
    softcap: float | None
    value_dim: int | None = None
    borrows: bool = False

    @property
    def kv_shape(self) -> tuple[int, int, int | None]:
        """What the cache depends on: (KV heads, head_dim, window)."""
        return self.num_kv_heads, self.head_dim, self.window


@dataclass(frozen=True)
class ModelSpec:
    """A causal language model as the cache, the planner and the runner see it."""

    model_type: str
    hidden_size: int
    num_attention_heads: int
    layers: tuple[LayerSpec, ...]
    vocab_size: int
    max_position_embeddings: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)

    @cached_property
    def _groups(self) -> tuple[LayerGroup, ...]:
        members: dict[tuple[int, int, int | None, int | None], list[int]] = {}
        for index, layer in enumerate(self.layers):
            if not layer.borrows:
                members.setdefault((*layer.kv_shape, layer.value_dim), []).append(index)
        return tuple(LayerGroup(tuple(layers), *shape) for shape, layers in members.items())

    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Layers that share a KV shape and a window, in the order of their first layer."""
        return self._groups

    @classmethod
    def from_config(cls, config: Any, generation_config: Any = None) -> ModelSpec:
        """Read a transformers configuration (of text and other media: its text part).

        `generation_config` wins over `config` for the end tokens, as in transformers. Raises `ModelRefused`
        when a layer keeps something other than the keys and values of one attention.
        """
        text = config.get_text_config()
        heads = int(text.num_attention_heads)
        head_dim = getattr(text, "head_dim", None) or text.hidden_size // heads
        kv_heads = getattr(text, "num_key_value_heads", None) or heads
        scaling, softcap = _scaling(text, head_dim), getattr(text, "attn_logit_softcapping", None)
        value_dim = None
        if rank := getattr(text, "kv_lora_rank", None):
            scaling = (text.qk_nope_head_dim + text.qk_rope_head_dim) ** -0.5
            kv_heads, head_dim, value_dim = 1, rank + text.qk_rope_head_dim, 0
        eos = getattr(generation_config, "eos_token_id", None)
        for name, least in (("num_hidden_layers", 1), ("sliding_window", 0), ("max_position_embeddings", 1)):
            value = getattr(text, name, None)
            if value is not None and not least <= value <= _MOST:
                raise ModelRefused(
                    f"model type {text.model_type!r}: {name}={value} must be from {least} to {_MOST}",
                    param="model",
                )
        windows = _windows(text)
        lenders = len(windows) - (getattr(text, "num_kv_shared_layers", None) or 0)
        return cls(
            model_type=text.model_type,
            hidden_size=int(text.hidden_size),
            num_attention_heads=heads,
            layers=tuple(
                LayerSpec(int(kv_heads), int(head_dim), w, scaling, softcap, value_dim, i >= lenders)
                for i, w in enumerate(windows)
            ),
            vocab_size=int(text.vocab_size),
            max_position_embeddings=getattr(text, "max_position_embeddings", None),
            eos_token_ids=id_tuple(getattr(text, "eos_token_id", None) if eos is None else eos),
        )


def id_tuple(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    """Token ids as transformers configurations write them: one, several or none."""
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _windows(text: Any) -> list[int | None]:
    """Per layer, as transformers 5.24 reads it: by `layer_types` where there are any, else one window for
    all."""
    window = getattr(text, "sliding_window", None) or None
    types = getattr(text, "layer_types", None)
    if types is None:
        return [window if getattr(text, "use_sliding_window", True) else None] * text.num_hidden_layers
    for index, kind in enumerate(types):
        if kind not in _LAYER_TYPES:
            raise ModelRefused(
                f"model type {text.model_type!r}: layer {index} is of type {kind!r}; the cache holds the "
                f"keys and values of {' and '.join(sorted(_LAYER_TYPES))} layers only",
                param="model",
            )
    return [window if kind == "sliding_attention" else None for kind in types]


def _scaling(text: Any, head_dim: int) -> float:
    if (multiplier := getattr(text, "attention_multiplier", None)) is not None:
        return float(multiplier)
    if getattr(text, "scale_attn_weights", True) is False:
        return 1.0
    return float((getattr(text, "query_pre_attn_scalar", None) or head_dim) ** -0.5)
