"""The fields of a `config.json` that a plan reads, and what each may be: a configuration is untrusted input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError, show

_MOST_COUNT = 10_000  # layers and experts: several times those of any model there is, and walked in seconds
_MOST_WINDOW = 10_000_000  # blocks of a window are walked too
_MOST_SIZE = 2**31 - 1
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What families call the number of their experts."""


@dataclass(frozen=True)
class Kind:
    """What a field may be, in `words` and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _whole(least: int, most: int = _MOST_SIZE) -> Kind:
    return Kind(f"a whole number from {least} to {most}", lambda v: type(v) is int and least <= v <= most)


def _list_of(kind: type, words: str) -> Kind:
    return Kind(f"a list of {words}", lambda v: isinstance(v, list) and all(type(e) is kind for e in v))


_SIZE, _COUNT = _whole(1), _whole(1, _MOST_COUNT)
_SWITCH = Kind("true or false", lambda v: isinstance(v, bool))
_TEXT = Kind("text", lambda v: isinstance(v, str))
_NUMBER = Kind("a number above 0", lambda v: type(v) in (int, float) and 0 < v <= _MOST_SIZE)
_IDS = Kind(
    "a whole number or a list of them",
    lambda v: all(type(e) is int for e in (v if isinstance(v, list) else [v])),
)

SHAPE: Mapping[str, Kind] = {
    "model_type": _TEXT,
    **dict.fromkeys(("num_hidden_layers", *EXPERTS, "num_experts_per_tok"), _COUNT),
    **dict.fromkeys(("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"), _SIZE),
    **dict.fromkeys(("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), _SIZE),
    **dict.fromkeys(("vocab_size", "max_position_embeddings"), _SIZE),
    "sliding_window": _whole(0, _MOST_WINDOW),
    "use_sliding_window": _SWITCH,
    "layer_types": _list_of(str, "names"),
    "num_kv_shared_layers": _whole(0, _MOST_COUNT),
    "eos_token_id": _IDS,
    "scale_attn_weights": _SWITCH,
    **dict.fromkeys(("attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"), _NUMBER),
}
"""Of every model: what decides the shape of its cache, and how many of its experts a token meets."""

WEIGHTS: Mapping[str, Kind] = {
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "q_lora_rank"), _SIZE),
    "n_shared_experts": _whole(0, _MOST_COUNT),
    **dict.fromkeys(("first_k_dense_replace", "max_window_layers"), _whole(0)),
    **dict.fromkeys(("decoder_sparse_step", "sliding_window_pattern"), _SIZE),
    "mlp_only_layers": _list_of(int, "whole numbers"),
    **dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias"), _SWITCH),
}
"""Of the families that are counted here: what else decides the number of their weights."""


class ModelConfig:
    """The fields of a configuration as attributes, like those of a transformers configuration of the text part."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where it is missing or null."""
        value = self._values.get(name)
        return default if value is None else value

    def get_text_config(self) -> ModelConfig:
        return self


def wrong(text: str, param: str) -> ConfigError:
    """The error that says of a configuration what is wrong, and of which field."""
    return ConfigError(f"config.json: {text}", param=param)


def check_fields(
    values: Mapping[str, Any], fields: Mapping[str, Kind], names: Mapping[str, str] | None = None
) -> None:
    """Raise `ConfigError` for the first of `fields` that is neither missing nor null nor of its kind. `names` are those
    that `values` has for fields, where they differ."""
    for field, kind in fields.items():
        name = (names or {}).get(field, field)
        value = values.get(name)
        if value is not None and not kind.holds(value):
            raise wrong(f"{name}={show(value)} must be {kind.words}", name)


def check_together(config: ModelConfig) -> None:
    """Raise `ConfigError` where fields of `config`, each possible for itself, contradict each other."""
    layers, hidden, heads = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    if heads % (kv_heads := config.get("num_key_value_heads", heads)):
        raise wrong(
            f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads}",
            "num_key_value_heads",
        )
    if hidden < heads and not config.get("head_dim"):
        raise wrong(
            f"hidden_size={hidden} leaves nothing to each of num_attention_heads={heads}; at least {heads}, or a "
            "head_dim, works",
            "hidden_size",
        )
    types = config.get("layer_types")
    if types is not None and len(types) != layers:
        raise wrong(f"layer_types names {len(types)} layers, num_hidden_layers={layers}", "layer_types")
    if (shared := config.get("num_kv_shared_layers", 0)) >= layers:
        raise wrong(
            f"num_kv_shared_layers={shared} leaves none of num_hidden_layers={layers} with keys and values of its "
            f"own; at most {layers - 1} works",
            "num_kv_shared_layers",
        )
    for name in EXPERTS:
        most, met = config.get(name), config.get("num_experts_per_tok", 1)
        if most is not None and met > most:
            raise wrong(
                f"num_experts_per_tok={met} is more than {name}={most}; at most {most} works",
                "num_experts_per_tok",
            )
