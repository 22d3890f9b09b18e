"""GGUF to a directory of safetensors, once; the directory is what every engine and reference then loads.

Weights that the file stores as quantised blocks (or bf16) are dequantised to bf16, so that bf16 and float32
engines and transformers itself all see the very same weights; bf16's rounding is far below what the blocks
have already lost. A file of float32 or float16 weights is stored as float32 and loses nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
from pathlib import Path
from typing import Any

from octavo.errors import ModelRefused
from octavo.model.digest import atomic_directory, file_sha256
from octavo.model.pull import Notice
from octavo.model.quiet import quiet_transformers

# Part of the directory's name: raise it when the conversion changes, and old directories are left alone.
CONVERSION = 1

# `tokenizer.ggml.pre` names whose vocabulary was trained on single digits; transformers 5.24 does not know
# them and would split "  12" as "Ġ" + "Ġ1" + "2" where the original splits "ĠĠ" + "1" + "2".
_SINGLE_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}
_GPT2_SPLIT = {
    "gpt-2",
    "gpt2",
    "default",
    "phi-2",
    "mpt",
    "olmo",
    "jais",
    "roberta-bpe",
    "jina-es",
    "jina-de",
}

_log = logging.getLogger(__name__)


def convert(gguf: Path, home: Path, progress: Notice | None = None) -> Path:
    """The converted directory of `gguf` under `home/converted`, named by the file's SHA-256; made if not
    there.

    Atomic: an interrupted conversion leaves nothing, and two at once both end with a complete directory.
    Raises `ModelRefused` when the file is no GGUF, or of an architecture that transformers cannot read.
    """
    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelRefused(
                f"model={str(gguf)!r} is not a GGUF file: it does not start with 'GGUF'", param="model"
            )
    target = home / "converted" / f"{file_sha256(gguf, home)[:32]}-v{CONVERSION}"
    if target.is_dir():
        return target
    if progress:
        progress(f"Converting {gguf.name} to safetensors, once ...")
    with atomic_directory(target) as draft:
        try:
            with quiet_transformers(), contextlib.redirect_stderr(io.StringIO()):
                _write(gguf.resolve(), draft)
        except ModelRefused:
            raise
        except Exception as error:  # transformers and gguf raise whatever the parser stumbled over
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelRefused(f"model={str(gguf)!r} cannot be converted: {reason}", param="model") from error
    return target


def _write(gguf: Path, draft: Path) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    reader = GGUFReader(str(gguf))
    location: dict[str, Any] = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    dtype = torch.float32 if _holds_plain_floats(reader) else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(
        **location, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    model.to(dtype).save_pretrained(draft)
    tokenizer = AutoTokenizer.from_pretrained(**location)
    tokenizer = _without_invented_tokens(tokenizer, len(_metadata(reader, "tokenizer.ggml.tokens")))
    _restore_splitting(tokenizer.backend_tokenizer, _metadata(reader, "tokenizer.ggml.pre"))
    _check_tokenizer(tokenizer, reader, gguf)
    tokenizer.save_pretrained(draft)
    (draft / "source.json").write_text(json.dumps({"gguf": gguf.name, "stored_as": str(dtype)}, indent=1))


def _holds_plain_floats(reader: Any) -> bool:
    matrices = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    return matrices <= {"F32", "F16"}


def _metadata(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def _restore_splitting(backend: Any, pre: str | None) -> None:
    """Give a byte-level tokenizer the pre-tokenizer its `tokenizer.ggml.pre` names, where transformers does
    not."""
    from tokenizers import pre_tokenizers

    if pre in _SINGLE_DIGITS:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif pre is not None and pre not in _GPT2_SPLIT and _splits_like_gpt2(backend):
        _log.warning("tokenizer.ggml.pre=%r is unknown; text is split as for GPT-2, which may differ", pre)


def _splits_like_gpt2(backend: Any) -> bool:
    split = json.loads(backend.to_str())["pre_tokenizer"]
    return split is not None and split["type"] == "ByteLevel" and bool(split["use_regex"])


def _without_invented_tokens(tokenizer: Any, count: int) -> Any:
    """`tokenizer` without the `<|endoftext|>` that transformers adds where the file's `count` tokens lack it.

    Its id lies beyond the model's embedding, and any prompt could spell it.
    """
    if len(tokenizer) <= count:
        return tokenizer
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerFast

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["id"] < count]
    backend = Backend.from_str(json.dumps(state))
    names = {name: getattr(tokenizer, name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
    kept = {name: token for name, token in names.items() if token and backend.token_to_id(token) is not None}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
        **kept,
    )


def _check_tokenizer(tokenizer: Any, reader: Any, gguf: Path) -> None:
    """Raise `ModelRefused` unless the special ids, the template and every byte survived the conversion."""
    expected = {
        "eos_token_id": _metadata(reader, "tokenizer.ggml.eos_token_id"),
        "bos_token_id": _metadata(reader, "tokenizer.ggml.bos_token_id"),
        "chat_template": _metadata(reader, "tokenizer.chat_template"),
    }
    found = {name: getattr(tokenizer, name) for name in expected}
    if (prepends := _metadata(reader, "tokenizer.ggml.add_bos_token")) is not None:
        expected["add_bos_token"] = prepends
        found["add_bos_token"] = tokenizer.backend_tokenizer.encode("a").ids[:1] == [tokenizer.bos_token_id]
    for name, value in expected.items():
        if found[name] != value:
            raise ModelRefused(
                f"model={str(gguf)!r}: the converted tokenizer has {name}={found[name]!r}, not {value!r}",
                param="model",
            )
    if (
        _metadata(reader, "tokenizer.ggml.model") == "gpt2"
    ):  # sentencepiece may normalise; byte level never does
        text = "Hello,  wörld 1234\n\t\N{SNOWMAN} \N{THAI CHARACTER KO KAI}\N{FAMILY}"
        backend = tokenizer.backend_tokenizer
        back = backend.decode(backend.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        if back != text:
            raise ModelRefused(
                f"model={str(gguf)!r}: the converted tokenizer turns {text!r} into {back!r}", param="model"
            )
