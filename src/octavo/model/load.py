"""Load a model: resolve its name, refuse what cannot work, read safetensors, and say what it is."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from octavo.config import DTYPES, Environment
from octavo.errors import ConfigError
from octavo.model.digest import weights_digest
from octavo.model.pull import Notice
from octavo.model.quiet import quiet_transformers
from octavo.model.refuse import (
    causal_class,
    check_attention,
    check_config,
    check_directory,
    first_line,
    refused,
)
from octavo.model.source import resolve
from octavo.model.spec import ModelSpec, id_tuple
from octavo.model.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger("octavo")

# How the kernel names the instructions that multiply bf16: x86, x86 tiles, ARM.
_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run. `model` is the transformers module: eval mode, no gradients, on the CPU, in
    `torch_dtype`. `digest` is the SHA-256 over weights and configuration, as they are on disk."""

    path: Path
    config: Any
    spec: ModelSpec
    model: Any
    tokenizer: Tokenizer
    torch_dtype: torch.dtype
    digest: str


def cpu_multiplies_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has instructions that multiply bf16; False where that cannot be read."""
    try:
        text = cpuinfo.read_text()
    except OSError:
        return False
    names = ("flags", "Features")
    lines = (line for line in text.splitlines() if line.startswith(names))
    return any(_BF16_FLAGS & set(line.partition(":")[2].split()) for line in lines)


def choose_dtype(dtype: str) -> torch.dtype:
    """`auto` is bf16 where the CPU multiplies it natively, else float32. Raises `ConfigError`."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}", param="dtype")
    if dtype == "auto":
        return torch.bfloat16 if cpu_multiplies_bf16() else torch.float32
    return torch.bfloat16 if dtype == "bfloat16" else torch.float32


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    attn_implementation: str | None = None,
    chat_template: str | None = None,
    progress: Notice | None = None,
) -> LoadedModel:
    """Load MODEL (alias, directory, `.gguf` file or hub id).

    `attn_implementation` is a name registered with transformers' attention interface. `chat_template` is a
    template or the path of one. `progress` receives a line per slow phase (fetch, conversion). Raises
    `ModelNotFound`, `ModelRefused` with the reason, and `ConfigError`.
    """
    torch_dtype = choose_dtype(dtype)
    home = Environment.read().home
    path = resolve(name, home, progress)
    check_directory(path)
    with quiet_transformers():
        config = _read_config(path)
        check_config(path, config)
        spec = _read_spec(path, config)
        model = _read_weights(path, config, torch_dtype, attn_implementation)
        generation = model.generation_config
        spec = replace(
            spec,
            layers=check_attention(path, model, spec),
            eos_token_ids=id_tuple(getattr(generation, "eos_token_id", None)) or spec.eos_token_ids,
        )
        tokenizer = load_tokenizer(path, eos_token_ids=spec.eos_token_ids, chat_template=chat_template)
    return LoadedModel(
        path=path,
        config=model.config,
        spec=spec,
        model=model,
        tokenizer=tokenizer,
        torch_dtype=torch_dtype,
        digest=weights_digest(path, home),
    )


def _read_config(path: Path) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # a configuration is untrusted input: transformers raises many kinds of errors
        raise refused(path, f"its config.json is not usable: {first_line(error)}") from error


def _read_spec(path: Path, config: Any) -> ModelSpec:
    try:
        return ModelSpec.from_config(config)
    except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:
        raise refused(
            path, f"its config.json does not describe attention layers: {first_line(error)}"
        ) from error


def _read_weights(path: Path, config: Any, dtype: torch.dtype, attn_implementation: str | None) -> Any:
    options: dict[str, Any] = (
        {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    )
    try:
        model, info = causal_class(path, config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are in the info too, by name, and refused below
            **options,
        )
    except Exception as error:  # as above: truncated files, wrong shapes, unreadable headers
        raise refused(path, f"its weights cannot be read: {first_line(error)}") from error
    missing = sorted(info["missing_keys"]) or sorted(str(name) for name, *_ in info["mismatched_keys"])
    if missing:
        raise refused(
            path, f"{len(missing)} weights are missing or of the wrong shape, the first is {missing[0]}"
        )
    if unused := sorted(info["unexpected_keys"]):
        logger.warning(
            "%s: %d weights have no place in the model that config.json describes, the first is %s",
            path,
            len(unused),
            unused[0],
        )
    return model.eval().requires_grad_(False)
