"""What the planner knows of models: derived counts against published ones and against what transformers would build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from octavo.cache.layout import LayerGroup
from octavo.errors import ConfigError, ModelNotFound
from octavo.model.spec import ModelSpec
from octavo.plan.facts import facts_of, find_model, table
from octavo.plan.families import FAMILIES, read_config
from octavo.plan.weights import WEIGHT_FORMATS, count, count_by_transformers
from support.configs import LLAMA
from support.sizes import FULL


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-2-7b", 6_738_415_616),
        ("mistral-7b-v0.1", 7_241_732_096),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gemma-2-9b", 9_241_705_984),
        ("gemma-3-1b", 999_885_952),
        ("phi-4", 14_659_507_200),
        ("smollm2-135m", 134_515_008),
    ],
)
def test_derived_parameters_are_the_published_ones(name: str, parameters: int) -> None:
    """Source: the parameter count that huggingface.co shows for the safetensors of each model's `hub` entry."""
    assert find_model(name).weights.total == parameters


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),  # arXiv 2401.04088: 47B and 13B; mistral.ai: 46.7B and 12.9B
        ("deepseek-v2", 236, 21),  # arXiv 2405.04434
        ("deepseek-v3", 671, 37),  # arXiv 2412.19437; counted without the embedding, see below
        ("qwen3-30b-a3b", 30.5, 3.3),  # Qwen3 model card
        ("qwen3-235b-a22b", 235, 22),  # Qwen3 model card
    ],
)
def test_parameters_that_one_token_meets(name: str, total: float, active: float) -> None:
    weights = find_model(name).weights
    assert weights.total / 1e9 == pytest.approx(total, rel=0.003)
    assert weights.active / 1e9 == pytest.approx(active, rel=0.025)


@pytest.mark.parametrize(
    ("name", "total", "active", "checkpoint_gib"),
    [("gpt-oss-120b", 116.83, 5.13, 60.8), ("gpt-oss-20b", 20.91, 3.61, 12.8)],
)
def test_gpt_oss_is_as_its_card_says(name: str, total: float, active: float, checkpoint_gib: float) -> None:
    """Source: arXiv 2508.10925, table 1, which counts the unembedding towards the active parameters, but not the
    embedding."""
    facts = find_model(name)
    weights = facts.weights
    assert round(weights.total / 1e9, 2) == total
    assert round((weights.active - weights.embedding) / 1e9, 2) == active
    assert weights.nbytes(facts.published) / 2**30 == pytest.approx(checkpoint_gib, rel=0.002)


def test_published_bytes_of_deepseek_v3() -> None:
    """Source: `total_size` 688,586,727,753 in the index of its safetensors, which holds one more layer of 11.5 billion
    numbers and its own embedding and head (README_WEIGHTS.md: 685B with it, 671B without)."""
    facts = find_model("deepseek-v3")
    assert facts.published == "fp8"
    assert facts.weights.nbytes("fp8") == pytest.approx(688_586_727_753 - 14e9, rel=0.005)


def whole_table() -> list[str]:
    """One model per family, or all of them."""
    by_family = {entry["config"]["model_type"]: name for name, entry in reversed(table().items())}
    return list(table()) if FULL else list(by_family.values())


@pytest.mark.parametrize("name", whole_table())
def test_a_family_is_read_and_counted_as_transformers_does(name: str) -> None:
    raw = dict(table()[name]["config"])
    config = read_config(raw)
    theirs = transformers.CONFIG_MAPPING[raw.pop("model_type")](**raw)
    assert count(config) == count_by_transformers(theirs)
    ours, spec = ModelSpec.from_config(config), ModelSpec.from_config(theirs)
    assert ours.layers == spec.layers
    assert (ours.vocab_size, ours.max_position_embeddings) == (spec.vocab_size, spec.max_position_embeddings)


VARIED: dict[str, list[dict[str, Any]]] = {
    "llama": [{"attention_bias": True, "mlp_bias": True}, {"tie_word_embeddings": True, "head_dim": 24}],
    "mistral": [{}, {"sliding_window": None}],
    "qwen2": [{"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}],
    "qwen3": [{}, {"head_dim": 24, "attention_bias": True}],
    "qwen3_moe": [
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]},
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 8,
        },
    ],
    "mixtral": [{"num_local_experts": 4, "num_experts_per_tok": 2}],
    "gemma2": [{"head_dim": 32, "sliding_window": 8}, {"attention_bias": True}],
    "gemma3_text": [{"num_hidden_layers": 7, "sliding_window_pattern": 3}],
    "phi3": [{"pad_token_id": 0}],
    "deepseek_v2": [
        {
            "kv_lora_rank": 16,
            "q_lora_rank": q,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 12,
            "v_head_dim": 10,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
        }
        for q in (None, 20)
    ],
    "gpt_oss": [{"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}],
}


@pytest.mark.parametrize(("kind", "index"), [(k, i) for k, v in VARIED.items() for i in range(len(v))])
def test_odd_configurations_are_read_as_transformers_does(kind: str, index: int) -> None:
    raw = {**LLAMA, "model_type": kind, **VARIED[kind][index]}
    theirs = transformers.CONFIG_MAPPING[kind](**{k: v for k, v in raw.items() if k != "model_type"})
    config = read_config(raw)
    assert count(config) == count_by_transformers(theirs)
    assert ModelSpec.from_config(config).layer_groups() == ModelSpec.from_config(theirs).layer_groups()


def test_every_family_is_in_the_table_and_every_entry_has_a_source() -> None:
    assert {entry["config"]["model_type"] for entry in table().values()} == set(FAMILIES)
    for name, entry in table().items():
        assert entry["source"], name
        assert entry["hub"].count("/") == 1
        assert entry["weights"] in WEIGHT_FORMATS
        assert name == name.lower()


def test_a_model_of_a_family_of_its_own_is_read_by_transformers(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=264, n_embd=64, n_layer=2, n_head=2, n_positions=128)
    config.save_pretrained(tmp_path)
    facts = find_model(str(tmp_path))
    assert facts.spec.layer_groups() == (LayerGroup((0, 1), 2, 32),)
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert facts.weights.total == sum(p.numel() for p in model.parameters())
    assert facts.context == 128


def test_a_model_is_found_by_name_hub_id_directory_and_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    by_directory, by_file = find_model(str(tmp_path)), find_model(str(tmp_path / "config.json"))
    assert by_directory.spec == by_file.spec
    assert by_directory.weights == by_file.weights
    assert by_directory.source == str(tmp_path / "config.json")
    assert find_model("HuggingFaceTB/SmolLM2-135M").name == find_model("SMOLLM2").name == "smollm2-135m"


def test_the_text_part_of_a_model_of_several_media_is_planned() -> None:
    inner = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 6}
    facts = facts_of("x", {"model_type": "gemma3", "text_config": inner}, "", "bf16")
    assert facts.spec.vocab_size == 262_208
    assert [layer.window for layer in facts.spec.layers] == [4096] * 5 + [None]


@pytest.mark.parametrize(
    ("quantization", "format"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        (None, "bf16"),
    ],
)
def test_weights_are_planned_as_they_are_published(
    tmp_path: Path, quantization: dict[str, Any] | None, format: str
) -> None:
    raw = {**LLAMA, **({"quantization_config": quantization} if quantization else {})}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert find_model(str(tmp_path)).published == format


def test_bytes_of_weight_formats() -> None:
    weights = find_model("llama-3-8b").weights
    matrices = weights.body
    rest = weights.total - matrices
    assert weights.nbytes("bf16") == 2 * weights.total
    assert weights.nbytes("f32") == 4 * weights.total
    assert weights.nbytes("fp8") == pytest.approx(matrices * (1 + 4 / 128**2) + 2 * rest, abs=1)
    assert weights.nbytes("int4") == pytest.approx(matrices * (0.5 + 2.5 / 128) + 2 * rest, abs=1)


@pytest.mark.parametrize(
    ("text", "words"),
    [("llama-3-7b", "did you mean llama-3-70b"), ("\0", "no known model"), ("zzzz", "known: llama-2-7b")],
)
def test_an_unknown_model_gets_a_hint(text: str, words: str) -> None:
    with pytest.raises(ModelNotFound, match=words):
        find_model(text)


def test_what_is_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"without a config\.json"):
        find_model(str(tmp_path))
    file = tmp_path / "config.json"
    deep = "[" * 100_000
    for text, words in (("{", "cannot be read"), (deep, "cannot be read"), ("[]", "not a JSON object")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            find_model(str(file))
