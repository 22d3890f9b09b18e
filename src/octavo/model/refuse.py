"""Why a model cannot be served: found at load, said plainly, before a request could get a wrong answer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ModelRefused
from octavo.kernels import native
from octavo.model.spec import LayerSpec, ModelSpec

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_ROPE_BY_LENGTH = {"dynamic", "longrope"}
_OBSERVER = "octavo_observer"
# What an attention function may be handed without it changing the scores.
_HARMLESS_TENSORS = {"position_ids", "cache_position", "cache_positions"}


def refused(where: object, reason: str) -> ModelRefused:
    """The error for the model at `where`."""
    return ModelRefused(f"model={str(where)!r} cannot be served: {reason}", param="model")


def first_line(error: Exception) -> str:
    """What an error of another library says, short enough for one of ours."""
    first, *rest = [" ".join(x.split()) for x in (str(error).strip() or type(error).__name__).splitlines()]
    return f"{first} {rest[0]}" if first.endswith(":") and rest else first


def check_directory(path: Path) -> None:
    """Raise `ModelRefused` unless `path` has a configuration, safetensors weights and needs no code of its
    own."""
    file = path / "config.json"
    if not file.is_file():
        raise refused(path, "it has no config.json")
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise refused(path, f"its config.json is not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise refused(path, "its config.json is not a JSON object")
    _check_model_type(path, raw)
    if not any(path.glob("*.safetensors")):
        pickles = sorted(found.name for pattern in _PICKLES for found in path.glob(pattern))
        if pickles:
            raise refused(
                path,
                f"its weights are pickle files ({pickles[0]}), which can run code when read; convert them to "
                "safetensors",
            )
        raise refused(path, "it has no .safetensors weights (pickle weights are never read)")
    if quantization := raw.get("quantization_config"):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise refused(
            path, f"its weights are quantised with {method}; use the unquantised checkpoint or a .gguf file"
        )


def _check_model_type(path: Path, raw: dict[str, Any]) -> None:
    import transformers
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if kind in CONFIG_MAPPING:
        return
    if "auto_map" in raw:
        raise refused(
            path, f"model type {kind!r} needs code from its repository (auto_map); remote code is never run"
        )
    raise refused(path, f"transformers {transformers.__version__} does not define model type {kind!r}")


def check_config(path: Path, config: Any) -> None:
    """Raise `ModelRefused` for an architecture that cannot run on a paged cache, judged before weights are
    read."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    text = config.get_text_config()
    kind = text.model_type
    if config.is_encoder_decoder:
        raise refused(path, f"{kind} is an encoder-decoder model; only decoder-only models are served")
    model_class = causal_class(path, config)
    if getattr(model_class, "_is_stateful", False):
        raise refused(
            path, f"{kind} keeps a recurrent state next to its attention, which the cache does not hold"
        )
    if not model_class._supports_attention_backend:
        raise refused(path, f"{model_class.__name__} does not call transformers' attention interface")
    if getattr(text, "kv_lora_rank", None):
        raise refused(path, f"{kind} caches latent attention (MLA), which is not supported")
    if getattr(text, "num_kv_shared_layers", None):
        raise refused(
            path, f"layers of {kind} share the keys and values of earlier layers, which is not supported"
        )
    for rope in _rope_types(text):
        if rope != "default" and rope not in ROPE_INIT_FUNCTIONS:
            known = ", ".join(sorted({"default", *ROPE_INIT_FUNCTIONS} - _ROPE_BY_LENGTH))
            raise refused(path, f"its RoPE type {rope!r} is not known; known: {known}")
        if rope in _ROPE_BY_LENGTH:
            raise refused(
                path,
                f"its RoPE type {rope!r} depends on the length of the sequence, so that cached keys would "
                "change; set rope_type to 'default', 'linear', 'yarn' or 'llama3' if the model allows it",
            )


def causal_class(path: Path, config: Any) -> Any:
    """The transformers class that runs `config` as a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise refused(path, f"{config.model_type} has no causal language model in transformers")
    found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    return found[0] if isinstance(found, list | tuple) else found


def _rope_types(text: Any) -> set[str]:
    """All RoPE types of a configuration, whose parameters are one dict or one per layer type."""
    parameters = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {
        str(entry.get("rope_type") or entry.get("type") or "default") for entry in (nested or [parameters])
    }


def check_attention(path: Path, model: Any, spec: ModelSpec) -> tuple[LayerSpec, ...]:
    """Run one token through `model` and return what each layer hands to the attention interface.

    The configuration is a claim, this is the proof. Raises `ModelRefused` when a layer does not arrive there,
    is not causal, uses inputs that the cache's attention does not know, or differs from `spec` in the shape
    of its cache.
    """
    seen: dict[int, LayerSpec] = {}
    try:
        with _observed(model, path, seen), torch.inference_mode():
            model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False)
    except ModelRefused:
        raise
    except Exception as error:  # any model of transformers runs here, so anything may come
        raise refused(path, f"it fails on a single token: {first_line(error)}") from error
    for index, expected in enumerate(spec.layers):
        if index not in seen:
            raise refused(
                path, f"layer {index} of {spec.num_layers} does not call transformers' attention interface"
            )
        if seen[index].kv_shape != expected.kv_shape:
            raise refused(
                path,
                f"layer {index} has (KV heads, head_dim, window) = {seen[index].kv_shape}, but its "
                f"configuration says {expected.kv_shape}",
            )
    return tuple(seen[index] for index in range(spec.num_layers))


@contextmanager
def _observed(model: Any, path: Path, seen: dict[int, LayerSpec]) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface

    def mask(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor:
        return torch.full((1, 1, 1, 1), local_size or 0)  # the mask carries the window to the attention below

    def attention(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        index = getattr(module, "layer_idx", None)
        if index is None or index in seen:
            raise refused(
                path, "two attentions of one layer (or one without a layer number) would share a cache"
            )
        _check_heads(path, f"layer {index}", query, key)
        seen[index] = _observe_call(path, module, key, value, mask, kwargs)
        return query.transpose(1, 2).contiguous(), None

    AttentionInterface.register(_OBSERVER, attention)
    AttentionMaskInterface.register(_OBSERVER, mask)
    before = model.config._attn_implementation
    model.set_attn_implementation(_OBSERVER)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _check_heads(path: Path, where: str, query: torch.Tensor, key: torch.Tensor) -> None:
    """Raise `ModelRefused` for heads that the kernels would read wrongly, or past their buffers."""
    heads, kv_heads, head_dim = query.shape[1], key.shape[1], key.shape[3]
    if heads % kv_heads:
        raise refused(path, f"the {heads} query heads of {where} cannot share {kv_heads} KV heads evenly")
    if head_dim > native.MAX_HEAD_DIM:
        raise refused(
            path, f"heads of {where} have {head_dim} dimensions; at most {native.MAX_HEAD_DIM} work"
        )
    if head_dim % 2 and key.dtype == torch.bfloat16:
        raise refused(
            path,
            f"heads of {where} have {head_dim} dimensions, an odd number, which bf16 cannot hold in pairs; "
            "dtype='float32' works",
        )


def _observe_call(
    path: Path, module: Any, key: torch.Tensor, value: torch.Tensor, mask: Any, options: dict[str, Any]
) -> LayerSpec:
    where = f"layer {module.layer_idx}"
    if getattr(module, "is_causal", True) is False:
        raise refused(path, f"the attention of {where} is not causal")
    if key.shape != value.shape:
        raise refused(
            path, f"keys and values of {where} differ in shape: {list(key.shape)}, {list(value.shape)}"
        )
    for name, option in options.items():
        if isinstance(option, torch.Tensor) and name not in _HARMLESS_TENSORS:
            raise refused(
                path, f"the attention of {where} uses {name!r}, which the cache's attention does not know"
            )
    window = options.get("sliding_window") or (
        int(mask.flatten()[0]) if isinstance(mask, torch.Tensor) else None
    )
    scaling = options.get("scaling")
    return LayerSpec(
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        window=window or None,
        scaling=1 / math.sqrt(key.shape[3]) if scaling is None else float(scaling),
        softcap=options.get("softcap"),
    )
