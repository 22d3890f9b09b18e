"""GGUF files, made here, to directories of safetensors."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from model_builders import byte_tokenizer

from octavo.errors import ModelRefused
from octavo.model import convert as convert_module
from octavo.model.convert import convert
from octavo.model.load import load_model
from octavo.model.tokenizer import load_tokenizer

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, CONTEXT = 64, 96, 4, 2, 128
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def write_gguf(path: Path, *, pre: str = "smollm", quantised: bool = False, add_bos: bool = False) -> Path:
    """A random Llama of one layer, head_dim 16; byte-level vocabulary in which two spaces are one token."""
    hf = byte_tokenizer(prepend_bos=False)
    tokens = [*hf.convert_ids_to_tokens(range(258)), "ĠĠ"]
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in ("<s>", "</s>") else 1 for token in tokens])
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    writer.add_add_bos_token(add_bos)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)
    kv = HIDDEN * KV_HEADS // HEADS
    matrices = {
        "token_embd": (len(tokens), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv, HIDDEN),
        "blk.0.attn_v": (kv, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_up": (INTERMEDIATE, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INTERMEDIATE),
    }
    for name, shape in matrices.items():
        weight = random.standard_normal(shape, dtype=np.float32)
        if quantised:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(f"{name}.weight", gguf.quantize(weight, kind), raw_dtype=kind)
        else:
            writer.add_tensor(f"{name}.weight", weight)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def embedding_of(path: Path) -> torch.Tensor:
    tensor = next(t for t in gguf.GGUFReader(str(path)).tensors if t.name == "token_embd.weight")
    return torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).reshape(-1, HIDDEN).copy())


def test_configuration_weights_and_tokenizer_survive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "tiny.gguf")
    loaded = load_model(str(path), dtype="float32")
    config = loaded.config
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.rms_norm_eps == pytest.approx(1e-5)
    assert config.tie_word_embeddings
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (HEADS, KV_HEADS, 16)
    assert (config.max_position_embeddings, config.vocab_size) == (CONTEXT, 259)
    assert torch.equal(loaded.model.get_input_embeddings().weight, embedding_of(path))
    assert loaded.tokenizer.chat_template == TEMPLATE
    assert loaded.tokenizer.eos_token_ids == loaded.spec.eos_token_ids == (257,)
    assert loaded.tokenizer.bos_token_id == 256
    assert loaded.tokenizer.encode("<s>a</s>")[0] == 256
    assert loaded.path.parent == tmp_path / "home" / "converted"


def test_blocks_are_stored_as_bf16_and_float32_engines_see_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    path = write_gguf(tmp_path / "tiny.gguf", quantised=True)
    single, half = (load_model(str(path), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert single.path == half.path
    assert single.digest == half.digest
    for one, other in zip(single.model.parameters(), half.model.parameters(), strict=True):
        assert torch.equal(one, other.float())
    assert torch.equal(half.model.get_input_embeddings().weight, embedding_of(path).bfloat16())


def test_digits_are_split_one_by_one_where_the_file_says_so(tmp_path: Path) -> None:
    single = load_tokenizer(convert(write_gguf(tmp_path / "a.gguf", pre="smollm"), tmp_path))
    plain = load_tokenizer(convert(write_gguf(tmp_path / "b.gguf", pre="gpt-2"), tmp_path))
    two_spaces = 258
    assert two_spaces in single.encode("a  12")  # digits apart, so the spaces before them stay together
    assert two_spaces not in plain.encode("a  12")  # GPT-2 leaves one space to the number
    assert single.decode(single.encode("a  12")) == "a  12"


@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_prepended_exactly_where_the_file_says_so(tmp_path: Path, add_bos: bool) -> None:
    tokenizer = load_tokenizer(convert(write_gguf(tmp_path / "a.gguf", add_bos=add_bos), tmp_path))
    assert tokenizer.encode("a").count(256) == int(add_bos)


def test_no_text_encodes_to_an_id_beyond_the_embedding(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(convert(write_gguf(tmp_path / "a.gguf"), tmp_path))
    assert tokenizer.vocab_size == 259
    assert max(tokenizer.encode("<|endoftext|><s></s>")) == 257


def test_an_unknown_way_of_splitting_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    convert(write_gguf(tmp_path / "a.gguf", pre="homemade"), tmp_path)
    assert "'homemade' is unknown" in caplog.text


def test_a_file_is_converted_once_whatever_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    said: list[str] = []
    first = convert(path, tmp_path / "home", said.append)
    monkeypatch.setattr(convert_module, "_write", lambda *_: pytest.fail("converted again"))
    path.rename(tmp_path / "renamed.gguf")
    assert convert(tmp_path / "renamed.gguf", tmp_path / "home", said.append) == first
    assert len(said) == 1


def test_conversions_at_once_and_interrupted_ones_leave_one_whole_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, home = write_gguf(tmp_path / "tiny.gguf"), tmp_path / "home"

    def interrupted(source: Path, draft: Path) -> None:
        (draft / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(path, home)
    assert list((home / "converted").iterdir()) == []

    def quick(source: Path, draft: Path) -> None:
        (draft / "config.json").write_text("whole")

    with monkeypatch.context() as patch:
        patch.setattr(convert_module, "_write", quick)
        with ThreadPoolExecutor(4) as pool:
            made = set(pool.map(lambda _: convert(path, home), range(8)))
    assert list((home / "converted").iterdir()) == list(made)
    assert (made.pop() / "config.json").read_text() == "whole"


def test_a_truncated_or_unknown_gguf_is_refused_with_the_reason(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "tiny.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelRefused, match="cannot be converted"):
        convert(tmp_path / "cut.gguf", tmp_path / "home")
    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "nonesuch")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelRefused, match="nonesuch"):
        convert(tmp_path / "other.gguf", tmp_path / "home")
    assert not any((tmp_path / "home" / "converted").iterdir())


def test_a_converted_tokenizer_that_lost_its_end_token_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    hf: Any = transformers.AutoTokenizer.from_pretrained(convert(path, tmp_path / "home"))
    reader = gguf.GGUFReader(str(path))
    convert_module._check_tokenizer(hf, reader, path)
    hf.eos_token = "<s>"
    with pytest.raises(ModelRefused, match="eos_token_id=256"):
        convert_module._check_tokenizer(hf, reader, path)
