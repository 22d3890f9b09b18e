"""MODEL, as the user wrote it, to what a plan needs to know of it: the table of public models, a directory, a
`config.json` or a hub id. No weights are read and no code of a model is run."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, ModelNotFound, OctavoError, show
from octavo.model.spec import ModelSpec
from octavo.plan.families import FAMILIES, read_config, text_part
from octavo.plan.fields import SHAPE, ModelConfig, check_fields, check_together, wrong
from octavo.plan.weights import Weights, count, count_by_transformers

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_ALIASES = {"smollm2": "smollm2-135m"}  # of `octavo run`
_PUBLISHED = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "gptq": "int4", "awq": "int4"}

_MOST_SAID = 300  # characters of what transformers says; some of its messages list every model there is


@dataclass(frozen=True)
class ModelFacts:
    """A model as a plan sees it. `published` is the format its weights come in.

    `prefill_dims` are the lengths of a query head's key and value while a prompt is computed; latent attention unfolds
    its vectors then, and works on the vectors themselves when it decodes.
    """

    name: str
    source: str
    spec: ModelSpec
    weights: Weights
    published: str
    prefill_dims: tuple[int, int]

    @property
    def context(self) -> int | None:
        """Positions the model was made for."""
        return self.spec.max_position_embeddings


@cache
def table() -> dict[str, dict[str, Any]]:
    """Public models by name: hub id, source, format of the published weights, configuration."""
    found: dict[str, dict[str, Any]] = json.loads(files("octavo.plan").joinpath("models.json").read_text())
    return found


def find_model(text: str) -> ModelFacts:
    """Facts of MODEL. Raises `ModelNotFound`, or `ConfigError` naming the field of a configuration that is at fault."""
    known = _ALIASES.get(text.lower(), text.lower())
    by_hub = {entry["hub"].lower(): name for name, entry in table().items()}
    if (name := by_hub.get(known, known)) in table():
        entry = table()[name]
        return facts_of(name, entry["config"], entry["source"], entry["weights"])
    file = _config_file(text)
    raw = _read_json(file)
    return facts_of(text, raw, str(file), _published_format(raw))


def facts_of(name: str, raw: Mapping[str, Any], source: str, published: str) -> ModelFacts:
    """Facts from a `config.json`. Raises `ConfigError` naming the field at fault, `ModelRefused` for layers that keep
    something other than keys and values."""
    text = text_part(raw)
    for part in (raw, text):
        check_fields(part, SHAPE)
    if text.get("model_type") in FAMILIES:
        config = read_config(text)
        weights = count(config)
    else:
        config, weights = _by_transformers(raw, text)
    spec = ModelSpec.from_config(config)
    dims = (spec.layers[0].head_dim,) * 2
    if config.get("kv_lora_rank"):
        dims = (config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    return ModelFacts(name, source, spec, weights, published, dims)


def _by_transformers(raw: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[ModelConfig, Weights]:
    """The fields and the weights of a model of a kind that `FAMILIES` does not hold, as transformers reads it; `text`
    is the part of `raw` that describes the language model."""
    from transformers import CONFIG_MAPPING

    kind = raw.get("model_type")
    if kind is None:
        raise wrong("has no model_type", "model_type")
    if kind not in CONFIG_MAPPING:
        raise wrong(f"model_type={show(kind)} is not known to transformers", "model_type")
    with _as_config_error(kind):
        config_class = CONFIG_MAPPING[kind]
    names = getattr(config_class, "attribute_map", {})
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"):
        if name not in text and names.get(name, name) not in text:
            raise ConfigError(f"config.json has no {names.get(name, name)!r}", param=names.get(name, name))
    check_fields(text, SHAPE, names)
    values = {k: v for k, v in raw.items() if k not in ("model_type", "quantization_config")}
    with _as_config_error(kind):
        theirs = config_class(**values)
        inner = theirs.get_text_config()
        found = {name: getattr(inner, name) for name in SHAPE if hasattr(inner, name)}
        check_fields(found, SHAPE)
        check_together(config := ModelConfig(found))
        return config, count_by_transformers(theirs)


@contextmanager
def _as_config_error(kind: str) -> Iterator[None]:
    """Whatever transformers raises becomes a `ConfigError` that says what it said: a configuration is untrusted input,
    and each class checks it in its own way."""
    try:
        yield
    except OctavoError:
        raise
    except Exception as error:
        said = " ".join(str(error).split()) or type(error).__name__
        raise wrong(
            f"transformers cannot read model_type={kind!r}: {said[:_MOST_SAID]}", "model_type"
        ) from error


def _published_format(raw: Mapping[str, Any]) -> str:
    method = raw.get("quantization_config")
    if isinstance(method, Mapping):
        return _PUBLISHED.get(str(method.get("quant_method")), "bf16")
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    return "f32" if dtype == "float32" else "bf16"


def _config_file(text: str) -> Path:
    path = Path(text).expanduser()
    try:
        if path.is_dir():
            path = path / "config.json"
            if not path.is_file():
                raise ModelNotFound(f"model={text!r} is a directory without a config.json", param="model")
        if path.is_file():
            return path
    except (OSError, ValueError):
        pass  # no name that a file could have
    if _HUB_ID.fullmatch(text):
        return _from_hub(text)
    near = difflib.get_close_matches(text.lower(), table(), n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(table())}"
    raise ModelNotFound(
        f"model={show(text)} is no known model, no directory, no config.json and no hub id (owner/name); {hint}",
        param="model",
    )


def _from_hub(text: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(text, "config.json"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelNotFound(
            f"the config.json of model={text!r} cannot be fetched from the hub ({reason}); give a directory, a "
            f"config.json or one of {', '.join(table())}",
            param="model",
        ) from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        raw = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}", param="model") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{file} is not a JSON object", param="model")
    return raw
