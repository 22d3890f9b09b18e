"""What a `config.json` may say, and how it is refused: the field at fault is named, whatever it holds."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.plan.facts import facts_of
from support.configs import LLAMA

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
}


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size"])
def test_a_missing_field_is_named(name: str) -> None:
    raw = {key: value for key, value in LLAMA.items() if key != name}
    with pytest.raises(ConfigError, match=name) as error:
        facts_of("x", raw, "", "bf16")
    assert error.value.param == name


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers", "-1"),
        ({"num_hidden_layers": 10_001}, "num_hidden_layers", "from 1 to 10000"),
        ({"num_hidden_layers": 10**18, "model_type": "gpt_neox"}, "num_hidden_layers", "from 1 to 10000"),
        ({"num_hidden_layers": None, "n_layer": 10**18, "model_type": "gpt2"}, "n_layer", "from 1 to 10000"),
        ({"hidden_size": "64"}, "hidden_size", "'64'"),
        ({"hidden_size": 3}, "hidden_size", "at least 4"),
        ({"vocab_size": True}, "vocab_size", "True"),
        ({"num_key_value_heads": 3}, "num_key_value_heads", "not a multiple"),
        ({"num_key_value_heads": 3, "model_type": "starcoder2"}, "num_key_value_heads", "not a multiple"),
        ({"layer_types": ["full_attention"]}, "layer_types", "names 1 layers"),
        ({"layer_types": 5}, "layer_types", "a list of names"),
        ({"layer_types": [[1], [1]]}, "layer_types", "a list of names"),
        ({"layer_types": "ab"}, "layer_types", "a list of names"),
        ({"model_type": "no_such"}, "model_type", "no_such"),
        ({"model_type": ["llama"]}, "model_type", "must be text"),
        ({"model_type": {}}, "model_type", "must be text"),
        ({"model_type": "gemma3", "text_config": {"model_type": 1}}, "model_type", "must be text"),
        ({"model_type": "deepseek_v3"}, "kv_lora_rank", "kv_lora_rank"),
        ({"model_type": "deepseek_v3", **LATENT, "q_lora_rank": -3}, "q_lora_rank", "-3"),
        ({"model_type": "deepseek_v3", **LATENT, "q_lora_rank": "x"}, "q_lora_rank", "'x'"),
        (
            {"model_type": "deepseek_v3", **LATENT, "first_k_dense_replace": "x"},
            "first_k_dense_replace",
            "'x'",
        ),
        ({"model_type": "mixtral"}, "num_local_experts", "num_local_experts"),
        (
            {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 8},
            "num_experts_per_tok",
            "at most 2",
        ),
        ({"model_type": "olmoe", "num_experts": 2}, "num_experts_per_tok", "at most 2"),
        ({"model_type": "gpt_neox", "num_hidden_layers": None}, "num_hidden_layers", "num_hidden_layers"),
        ({"model_type": "mistral", "sliding_window": "x"}, "sliding_window", "'x'"),
        ({"model_type": "mistral", "sliding_window": 4096.5}, "sliding_window", "4096.5"),
        ({"model_type": "mistral", "sliding_window": 2**31 - 1}, "sliding_window", "to 10000000"),
        ({"model_type": "starcoder2", "sliding_window": "x"}, "sliding_window", "'x'"),
        ({"model_type": "qwen2", "max_window_layers": "x"}, "max_window_layers", "'x'"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern", "from 1"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": "a"}, "sliding_window_pattern", "'a'"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar", "above 0"),
        ({"model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 0}, "decoder_sparse_step", "from 1"),
        ({"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": 3}, "mlp_only_layers", "a list"),
        ({"model_type": "qwen3_moe", **EXPERTS, "mlp_only_layers": "abc"}, "mlp_only_layers", "a list"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings", "true or false"),
        ({"attention_bias": "x"}, "attention_bias", "true or false"),
        ({"eos_token_id": 1.5}, "eos_token_id", "1.5"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers", "at most 1 works"),
        (
            {"model_type": "gemma3n_text", "num_kv_shared_layers": 40},
            "num_kv_shared_layers",
            "at most 1 works",
        ),
    ],
)
def test_an_impossible_field_is_named(change: dict[str, Any], param: str, words: str) -> None:
    raw = {key: value for key, value in (LLAMA | change).items() if value is not None}
    with pytest.raises(ConfigError, match=words) as error:
        facts_of("x", raw, "", "bf16")
    assert error.value.param == param
    assert param in error.value.message


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("whisper", "transformers cannot read model_type='whisper': "),
        ("mamba2", "Inconsistent configuration"),  # on the second line of what transformers says
        ("gemma4_text", "head_dim"),
    ],
)
def test_what_transformers_cannot_read_is_said_as_it_says_it(kind: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        facts_of("x", LLAMA | {"model_type": kind}, "", "bf16")
    assert error.value.param == "model_type"


def test_a_configuration_without_a_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="no model_type"):
        facts_of("x", {"hidden_size": 8}, "", "bf16")
