"""Loading model directories: what comes out, and every reason to refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_builders import LLAMA, SMALL, save_model

from octavo.errors import ConfigError, InvalidRequest, ModelRefused
from octavo.model.load import choose_dtype, cpu_multiplies_bf16, load_model


@pytest.fixture(autouse=True)
def private_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return save_model(transformers.LlamaConfig(**LLAMA), tmp_path / "llama")


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(directory: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_model(str(directory), dtype="float32")
    assert caught.value.param == "model"
    assert str(directory) in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_one_directory_loads_in_both_dtypes(llama: Path, dtype: str, expected: torch.dtype) -> None:
    loaded = load_model(str(llama), dtype=dtype)
    assert {weight.dtype for weight in loaded.model.parameters()} == {expected}
    assert loaded.torch_dtype == expected
    assert not loaded.model.training
    assert not any(weight.requires_grad for weight in loaded.model.parameters())
    assert loaded.path == llama


def test_loading_leaves_the_attention_as_asked_and_prints_nothing(
    llama: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(str(llama), dtype="float32", attn_implementation="eager")
    assert loaded.model.config._attn_implementation == "eager"
    assert capfd.readouterr() == ("", "")


def test_digest_follows_weights_and_configuration(llama: Path, private_home: Path) -> None:
    first = load_model(str(llama), dtype="float32").digest
    assert load_model(str(llama), dtype="bfloat16").digest == first
    assert any((private_home / "digests").iterdir())
    edit_config(llama, rope_parameters={"rope_type": "default", "rope_theta": 77.0})
    second = load_model(str(llama), dtype="float32").digest
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    before = (llama / "config.json").read_text()
    model.save_pretrained(llama)
    (llama / "config.json").write_text(before)
    assert len({first, second, load_model(str(llama), dtype="float32").digest}) == 3


def test_dtype_auto_follows_the_cpu(tmp_path: Path) -> None:
    flags = {
        "flags\t\t: fpu avx2 avx512f": False,
        "flags\t\t: fpu avx512_bf16": True,
        "Features\t: asimd bf16": True,
    }
    flags |= {"flags : amx_bf16 amx_tile": True, "model name : bf16": False, "bugs : avx512_bf16": False}
    for text, expected in flags.items():
        (tmp_path / "cpuinfo").write_text(f"processor : 0\n{text}\n")
        assert cpu_multiplies_bf16(tmp_path / "cpuinfo") is expected, text
    assert cpu_multiplies_bf16(tmp_path / "absent") is False
    assert choose_dtype("auto") == (torch.bfloat16 if cpu_multiplies_bf16() else torch.float32)
    with pytest.raises(ConfigError, match="dtype='float16'"):
        choose_dtype("float16")


def test_a_directory_without_configuration_is_refused(tmp_path: Path) -> None:
    assert "no config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "not JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    assert "not a JSON object" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickle_weights_are_refused_and_never_opened(llama: Path, name: str) -> None:
    (llama / "model.safetensors").unlink()
    (llama / name).write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    message = refusal(llama)
    assert name in message
    assert "pickle" in message


def test_missing_and_broken_weights_are_refused(llama: Path) -> None:
    weights = llama / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in refusal(llama)
    weights.unlink()
    assert "no .safetensors weights" in refusal(llama)


def test_weights_that_are_not_in_the_checkpoint_are_not_made_up(llama: Path) -> None:
    edit_config(llama, num_hidden_layers=3)
    message = refusal(llama)
    assert "9 weights are missing" in message
    assert "model.layers.2." in message


def test_weights_that_have_no_place_are_named(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_config(llama, num_hidden_layers=1)
    load_model(str(llama), dtype="float32")
    [record] = caplog.records
    assert "have no place in the model that config.json describes" in record.getMessage()
    assert "model.layers.1." in record.getMessage()


def test_weights_of_another_shape_are_refused(llama: Path) -> None:
    edit_config(llama, intermediate_size=64)
    assert "weights" in refusal(llama)


def test_remote_code_is_refused(llama: Path) -> None:
    edit_config(llama, model_type="homemade", auto_map={"AutoModelForCausalLM": "code.Homemade"})
    (llama / "code.py").write_text("raise SystemExit('was run')")
    assert "remote code is never run" in refusal(llama)
    edit_config(llama, auto_map=None)
    edit_config(llama, model_type="homemade")
    assert "homemade" in refusal(llama)


def test_a_built_in_type_runs_as_built_in_even_if_the_repository_brings_code(llama: Path) -> None:
    edit_config(llama, auto_map={"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"})
    (llama / "code.py").write_text("raise SystemExit('was run')")
    assert type(load_model(str(llama), dtype="float32").model) is transformers.LlamaForCausalLM


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 64,
            "rope_theta": 10000.0,
        },
    ],
)
def test_rope_that_depends_on_length_is_refused(llama: Path, rope: dict[str, Any]) -> None:
    edit_config(llama, rope_parameters=rope)
    message = refusal(llama)
    assert repr(rope["rope_type"]) in message
    assert "length" in message


def test_rope_that_only_rescales_is_served(llama: Path) -> None:
    edit_config(llama, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0})
    assert load_model(str(llama), dtype="float32").spec.num_layers == 2


def test_quantised_checkpoints_are_refused(llama: Path) -> None:
    edit_config(llama, quantization_config={"quant_method": "gptq", "bits": 4})
    assert "gptq" in refusal(llama)


def test_a_null_quantisation_is_none(llama: Path) -> None:
    edit_config(llama, quantization_config=None)
    assert load_model(str(llama), dtype="float32").spec.num_layers == 2


def test_a_configuration_without_heads_is_refused(llama: Path) -> None:
    edit_config(llama, num_attention_heads=0)
    assert "config.json" in refusal(llama)


def test_a_recurrent_model_is_refused(tmp_path: Path) -> None:
    config = transformers.MambaConfig(**SMALL, hidden_size=32, num_hidden_layers=2, state_size=4)
    assert "recurrent state" in refusal(save_model(config, tmp_path / "mamba"))


def test_a_model_beside_the_attention_interface_is_refused(tmp_path: Path) -> None:
    config = transformers.BloomConfig(**SMALL, hidden_size=32, n_layer=2, n_head=4)
    message = refusal(save_model(config, tmp_path / "bloom"))
    assert "BloomForCausalLM does not call transformers' attention interface" in message


def test_encoder_decoder_and_bidirectional_models_are_refused(tmp_path: Path) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(tmp_path / "t5")
    assert "encoder-decoder" in refusal(tmp_path / "t5")
    bert = transformers.BertConfig(**small, intermediate_size=48, is_decoder=False)
    transformers.BertLMHeadModel(bert).save_pretrained(tmp_path / "bert")
    assert "not causal" in refusal(tmp_path / "bert")


def test_latent_attention_and_attention_sinks_are_refused(tmp_path: Path) -> None:
    latent = transformers.DeepseekV3Config(
        **LLAMA,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=2,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
    )
    assert "latent" in refusal(save_model(latent, tmp_path / "latent"))
    sinks = transformers.GptOssConfig(
        **LLAMA,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    assert "'s_aux'" in refusal(save_model(sinks, tmp_path / "sinks"))


def test_a_model_without_tokenizer_loads_and_complains_only_when_text_comes(tmp_path: Path) -> None:
    directory = save_model(transformers.LlamaConfig(**LLAMA), tmp_path / "bare", tokenizer=False)
    tokenizer = load_model(str(directory), dtype="float32").tokenizer
    assert tokenizer.eos_token_ids == (257,)
    with pytest.raises(InvalidRequest, match="no tokenizer; send token ids"):
        tokenizer.encode("hello")
