"""Octavo: an LLM inference engine built around its KV cache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

import octavo.config as _config  # noqa: F401  (sets up the thread pool before anything loads it)

if TYPE_CHECKING:
    from octavo.aio import AsyncEngine
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, Logprob, RequestOutput
    from octavo.params import SamplingParams, StructuredOutputs

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "__version__",
]
__version__ = "0.1.0"

_HOMES = {
    "LLM": "octavo.llm",
    "AsyncEngine": "octavo.aio",
    "CompletionOutput": "octavo.outputs",
    "Logprob": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "SamplingParams": "octavo.params",
    "StructuredOutputs": "octavo.params",
}


def __getattr__(name: str) -> object:
    # Loaded when first asked for: `octavo --help` should not import torch.
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
