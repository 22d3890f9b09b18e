"""The real SmolLM2: fetched, converted, and the same model as in its GGUF file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from octavo.config import Environment
from octavo.errors import ModelNotFound
from octavo.model import pull as pull_module
from octavo.model.load import LoadedModel, load_model
from octavo.model.source import resolve

pytestmark = pytest.mark.model

# Names in transformers and in the file, of the weights both store alike.
PLAIN_WEIGHTS = {
    "mlp.down_proj": "ffn_down",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    try:
        return load_model("smollm2", dtype="float32")
    except ModelNotFound as error:
        pytest.skip(f"SmolLM2 cannot be fetched: {error}")


def test_facts_of_the_model(smollm2: LoadedModel) -> None:
    spec, config = smollm2.spec, smollm2.config
    [group] = spec.layer_groups()
    assert (group.layers, group.num_kv_heads, group.head_dim, group.window) == (tuple(range(30)), 3, 64, None)
    assert (spec.num_layers, spec.num_attention_heads, spec.hidden_size) == (30, 9, 576)
    assert (spec.vocab_size, spec.max_position_embeddings, spec.eos_token_ids) == (49152, 8192, (2,))
    assert {layer.scaling for layer in spec.layers} == {1 / 8}
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}
    assert torch.tensor(config.rms_norm_eps, dtype=torch.float32) == torch.tensor(1e-5, dtype=torch.float32)
    assert config.tie_word_embeddings


def test_weights_are_those_of_the_file_rounded_to_bf16(smollm2: LoadedModel) -> None:
    file = Environment.read().home / "models" / pull_module.ALIASES["smollm2"].filename
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(str(file)).tensors}
    weights = dict(smollm2.model.named_parameters())

    def original(name: str) -> torch.Tensor:
        data = gguf.dequantize(stored[name].data, stored[name].tensor_type)
        return torch.from_numpy(data.copy()).bfloat16().float()

    names = {"embed_tokens": "token_embd", "norm": "output_norm"}
    for layer in range(30):
        for ours, theirs in PLAIN_WEIGHTS.items():
            names[f"layers.{layer}.{ours}"] = f"blk.{layer}.{theirs}"
    for ours, theirs in names.items():
        assert torch.equal(weights[f"model.{ours}.weight"], original(f"{theirs}.weight")), theirs
    for layer in range(
        30
    ):  # GGUF interleaves the two rotated halves of a head, transformers keeps them apart
        for name, heads in {"q": 9, "k": 3}.items():
            halves = original(f"blk.{layer}.attn_{name}.weight").view(heads, 32, 2, 576).transpose(1, 2)
            assert torch.equal(
                weights[f"model.layers.{layer}.self_attn.{name}_proj.weight"], halves.reshape(-1, 576)
            )


def test_both_dtypes_load_the_same_directory(smollm2: LoadedModel) -> None:
    half = load_model("smollm2", dtype="bfloat16")
    assert (half.path, half.digest) == (smollm2.path, smollm2.digest)
    for one, other in zip(smollm2.model.parameters(), half.model.parameters(), strict=True):
        assert torch.equal(one, other.float())


def test_tokenizer_is_the_models_own(smollm2: LoadedModel) -> None:
    tokenizer = smollm2.tokenizer
    assert tokenizer.eos_token_ids == (2,)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id) == (49152, 1)
    assert 1 not in tokenizer.encode("Hello")
    tokens = [tokenizer.decoded_token(token) for token in tokenizer.encode("In 1984,  12 men")]
    assert tokens == ["In", " ", "1", "9", "8", "4", ",", "  ", "1", "2", " men"]
    text = "naïve 日本語 ไทย 👩‍👩‍👧‍👦 🇫🇷\r\n\t  x"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_chat_template_is_applied_with_one_start_of_text(smollm2: LoadedModel) -> None:
    ids = smollm2.tokenizer.apply_chat_template(CHAT)
    assert smollm2.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1
    assert ids[1] != 1


def test_it_knows_the_capital_of_france(smollm2: LoadedModel) -> None:
    ids = torch.tensor([smollm2.tokenizer.apply_chat_template(CHAT)])
    mask = torch.ones_like(ids)
    out = smollm2.model.generate(ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    answer = out[0, ids.shape[1] :].tolist()
    assert smollm2.tokenizer.decode(answer) == "The capital of France is Paris."
    assert answer[-1] in smollm2.tokenizer.eos_token_ids


def test_a_later_use_fetches_and_converts_nothing(
    smollm2: LoadedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(*arguments: Any, **options: Any) -> None:
        pytest.fail(f"ran {arguments}")

    monkeypatch.setattr(pull_module.subprocess, "run", forbidden)
    said: list[str] = []
    assert resolve("smollm2", Environment.read().home, said.append) == smollm2.path
    assert said == []


def test_loading_prints_nothing() -> None:
    script = "from octavo.model.load import load_model; load_model('smollm2')"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, check=True
    )
    assert (result.stdout, result.stderr) == ("", "")
