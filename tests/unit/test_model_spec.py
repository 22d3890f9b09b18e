"""What a configuration says about the cache, proved against what the model really does."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from model_builders import LLAMA, SMALL, save_model

from octavo.cache.layout import LayerGroup
from octavo.errors import ModelRefused
from octavo.model.load import load_model
from octavo.model.spec import ModelSpec

QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
GEMMA = {**LLAMA, "head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
FULL, WINDOWED = LayerGroup((0, 1), 2, 8, None), LayerGroup((0, 1), 2, 8, 8)
MIXED = (LayerGroup((0,), 2, 8, None), LayerGroup((1,), 2, 8, 8))
GPT2 = transformers.GPT2Config(**SMALL, n_embd=32, n_layer=2, n_head=4, n_positions=64)
NEOX = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}

CASES = {
    "llama": (transformers.LlamaConfig(**LLAMA), (FULL,)),
    "llama wide heads": (
        transformers.LlamaConfig(**(LLAMA | {"head_dim": 80, "num_key_value_heads": 1})),
        (LayerGroup((0, 1), 1, 80, None),),
    ),
    "mistral window": (transformers.MistralConfig(**LLAMA, sliding_window=8), (WINDOWED,)),
    "mistral no window": (transformers.MistralConfig(**LLAMA, sliding_window=None), (FULL,)),
    "mixtral": (transformers.MixtralConfig(**LLAMA, num_local_experts=2), (FULL,)),
    "mixtral window": (
        transformers.MixtralConfig(**LLAMA, num_local_experts=2, sliding_window=8),
        (WINDOWED,),
    ),
    "qwen2 window from layer 1": (transformers.Qwen2Config(**LLAMA, **QWEN_WINDOWS), MIXED),
    "qwen2 window switched off": (transformers.Qwen2Config(**LLAMA, sliding_window=8), (FULL,)),
    "qwen3": (transformers.Qwen3Config(**LLAMA, head_dim=8), (FULL,)),
    "gpt2": (GPT2, (LayerGroup((0, 1), 4, 8, None),)),
    "gpt-neox": (transformers.GPTNeoXConfig(**NEOX), (LayerGroup((0, 1), 4, 8, None),)),
    "gemma2": (
        transformers.Gemma2Config(**GEMMA, query_pre_attn_scalar=64, attn_logit_softcapping=30.0),
        (LayerGroup((0,), 2, 16, 8), LayerGroup((1,), 2, 16, None)),
    ),
    "gemma3": (
        transformers.Gemma3TextConfig(**GEMMA, query_pre_attn_scalar=64),
        (LayerGroup((0,), 2, 16, 8), LayerGroup((1,), 2, 16, None)),
    ),
}


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize("name", CASES)
def test_groups_read_from_the_configuration_are_those_the_loaded_model_shows(
    name: str, tmp_path: Path
) -> None:
    config, groups = CASES[name]
    claimed = ModelSpec.from_config(config)
    loaded = load_model(str(save_model(config, tmp_path)), dtype="float32")
    assert claimed.layer_groups() == groups
    assert loaded.spec.layer_groups() == groups
    assert loaded.spec.layers == claimed.layers  # scaling and soft-cap too
    assert loaded.spec.num_layers == 2
    assert loaded.spec.vocab_size == loaded.model.get_output_embeddings().out_features
    assert loaded.spec.eos_token_ids == (257,)


def test_scaling_and_softcap_of_gemma2_are_read() -> None:
    layer = ModelSpec.from_config(CASES["gemma2"][0]).layers[0]
    assert (layer.scaling, layer.softcap) == (1 / 8, 30.0)


def test_scaling_by_layer_number_is_taken_from_the_model(tmp_path: Path) -> None:
    config = transformers.GPT2Config(**(GPT2.to_dict() | {"scale_attn_by_inverse_layer_idx": True}))
    layers = load_model(str(save_model(config, tmp_path)), dtype="float32").spec.layers
    assert layers[1].scaling == pytest.approx(layers[0].scaling / 2)


def test_a_configuration_that_claims_other_heads_than_the_model_has_is_refused(tmp_path: Path) -> None:
    config = transformers.GPTNeoXConfig(**NEOX, num_key_value_heads=2)  # GPT-NeoX has no grouped heads
    with pytest.raises(ModelRefused, match=r"layer 0 has .* = \(4, 8, None\), but .* says \(2, 8, None\)"):
        load_model(str(save_model(config, tmp_path)), dtype="float32")


def test_context_length_goes_by_the_name_each_model_gives_it() -> None:
    assert ModelSpec.from_config(GPT2).max_position_embeddings == 64
    assert ModelSpec.from_config(CASES["llama"][0]).max_position_embeddings == 128


def test_several_end_tokens_in_the_generation_configuration_win(tmp_path: Path) -> None:
    save_model(transformers.LlamaConfig(**LLAMA), tmp_path)
    transformers.GenerationConfig(eos_token_id=[257, 5]).save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32")
    assert loaded.spec.eos_token_ids == (257, 5)
    assert loaded.tokenizer.eos_token_ids == (257, 5)


def test_layers_that_keep_something_else_than_keys_and_values_are_refused() -> None:
    config = transformers.LlamaConfig(**LLAMA)
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ModelRefused, match="layer 1 is of type 'linear_attention'"):
        ModelSpec.from_config(config)


def test_latent_attention_keeps_one_vector_for_all_heads() -> None:
    config = transformers.DeepseekV3Config(
        **(LLAMA | {"num_key_value_heads": 4}), kv_lora_rank=12, qk_rope_head_dim=4, qk_nope_head_dim=12
    )
    spec = ModelSpec.from_config(config)
    assert spec.layer_groups() == (LayerGroup((0, 1), 1, 16, None, value_dim=0),)
    assert spec.layers[0].scaling == 1 / 4


def test_layers_that_read_the_keys_and_values_of_others_are_in_no_group() -> None:
    types = ["sliding_attention", "full_attention"] * 2
    config = transformers.Gemma3nTextConfig(
        **(LLAMA | {"num_hidden_layers": 4}), layer_types=types, num_kv_shared_layers=2, sliding_window=8
    )
    spec = ModelSpec.from_config(config)
    assert [layer.borrows for layer in spec.layers] == [False, False, True, True]
    assert [group.layers for group in spec.layer_groups()] == [(0,), (1,)]
