"""A `config.json` as its model family means it: what must be there, and what it leaves to the family's defaults.

Only what decides sizes is read. Defaults are those of the transformers configuration classes, with which every family
here is compared in the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.errors import ConfigError
from octavo.plan.fields import SHAPE, WEIGHTS, ModelConfig, check_fields, check_together

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_READ = {**SHAPE, **WEIGHTS}

LayerTypes = Callable[[ModelConfig], list[str]]


def _every(step: int) -> LayerTypes:
    """One full layer in `step`, the last of each run; the configuration may name another step."""

    def types(config: ModelConfig) -> list[str]:
        every = config.get("sliding_window_pattern", step)
        return ["sliding_attention" if (i + 1) % every else "full_attention" for i in _layers(config)]

    return types


def _qwen(config: ModelConfig) -> list[str]:
    first = config.max_window_layers if config.get("use_sliding_window") else config.num_hidden_layers
    return ["full_attention" if i < first else "sliding_attention" for i in _layers(config)]


def _qwen_moe(config: ModelConfig) -> list[str]:
    kind = "sliding_attention" if config.get("use_sliding_window") else "full_attention"
    return [kind for _ in _layers(config)]


def _layers(config: ModelConfig) -> range:
    return range(config.num_hidden_layers)


def _biases(qkv: bool, output: bool) -> Callable[[ModelConfig], tuple[bool, bool]]:
    return lambda _: (qkv, output)


_UNBIASED = _biases(False, False)


def _as_configured(config: ModelConfig) -> tuple[bool, bool]:
    return (bool(config.get("attention_bias")),) * 2


def _all_layers(config: ModelConfig, layer: int) -> bool:
    return True


def _no_layer(config: ModelConfig, layer: int) -> bool:
    return False


def _after_dense(config: ModelConfig, layer: int) -> bool:
    return bool(layer >= config.get("first_k_dense_replace", 0))


def _sparse_step(config: ModelConfig, layer: int) -> bool:
    return layer not in config.get("mlp_only_layers", []) and not (layer + 1) % config.decoder_sparse_step


@dataclass(frozen=True)
class Family:
    """What models of one `model_type` have in common.

    `norms` are those of the hidden size per layer, `biases` says whether queries, keys and values, and whether the
    output projection have one. `experts` names the fields of the number of experts and of their inner size.
    """

    defaults: Mapping[str, Any] = field(default_factory=dict)
    required: tuple[str, ...] = ()
    layer_types: LayerTypes | None = None
    norms: int = 2
    head_norms: bool = False
    sinks: bool = False
    biases: Callable[[ModelConfig], tuple[bool, bool]] = _UNBIASED
    is_sparse: Callable[[ModelConfig, int], bool] = _no_layer
    experts: tuple[str, str] = ("", "")
    expert_biases: bool = False


_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_MLA = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
_GEMMA = {
    "head_dim": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
}
_GEMMA3 = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262_208}
_DEEPSEEK = Family(
    required=(*_MLA, "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts"),
    is_sparse=_after_dense,
    experts=("n_routed_experts", "moe_intermediate_size"),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(biases=_as_configured),
    "mistral": Family({"sliding_window": 4096, "num_key_value_heads": 8}),
    "mixtral": Family(
        {"num_key_value_heads": 8},
        required=("num_local_experts", "num_experts_per_tok"),
        is_sparse=_all_layers,
        experts=("num_local_experts", "intermediate_size"),
    ),
    "qwen2": Family(_QWEN, layer_types=_qwen, biases=_biases(True, False)),
    "qwen3": Family({**_QWEN, "head_dim": 128}, layer_types=_qwen, head_norms=True, biases=_as_configured),
    "qwen3_moe": Family(
        {**_QWEN, "decoder_sparse_step": 1, "num_key_value_heads": 4},
        required=("num_experts", "num_experts_per_tok", "moe_intermediate_size"),
        layer_types=_qwen_moe,
        head_norms=True,
        biases=_as_configured,
        is_sparse=_sparse_step,
        experts=("num_experts", "moe_intermediate_size"),
    ),
    "gemma2": Family(
        {**_GEMMA, "num_key_value_heads": 4, "attn_logit_softcapping": 50.0},
        layer_types=_every(2),
        norms=4,
        biases=_as_configured,
    ),
    "gemma3_text": Family(
        {**_GEMMA, **_GEMMA3, "max_position_embeddings": 131_072},
        layer_types=_every(6),
        norms=4,
        head_norms=True,
        biases=_as_configured,
    ),
    "phi3": Family(),
    "deepseek_v2": _DEEPSEEK,
    "deepseek_v3": _DEEPSEEK,
    "gpt_oss": Family(
        {"head_dim": 64, "sliding_window": 128, "attention_bias": True, "num_key_value_heads": 8},
        required=("num_local_experts", "num_experts_per_tok"),
        layer_types=_every(2),
        sinks=True,
        biases=_as_configured,
        is_sparse=_all_layers,
        experts=("num_local_experts", "intermediate_size"),
        expert_biases=True,
    ),
}


def text_part(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a `config.json` that describes the language model."""
    inner = raw.get("text_config")
    if not isinstance(inner, Mapping):
        return raw
    outer = {name: raw[name] for name in ("tie_word_embeddings",) if name in raw}
    return {**outer, **inner}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The fields of `raw`, the text part of a configuration of one of `FAMILIES`, complete.

    Raises `ConfigError` naming a field that is missing or impossible.
    """
    family = FAMILIES[raw["model_type"]]
    given = {name: raw[name] for name in _READ if raw.get(name) is not None}
    values = {**family.defaults, **given}
    if "sliding_window" in raw and raw["sliding_window"] is None:
        values["sliding_window"] = None
    for name in (*_SIZES, *family.required):
        if name not in values:
            raise ConfigError(
                f"config.json has no {name!r}, which a model of type {raw['model_type']!r} must say",
                param=name,
            )
    check_fields(values, _READ)
    config = ModelConfig(values)
    if family.layer_types is not None and "layer_types" not in values:
        values["layer_types"] = family.layer_types(config)
    check_together(config)
    return config
