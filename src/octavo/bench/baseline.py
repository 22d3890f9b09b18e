"""What Octavo is measured against: transformers with its own cache, on the same model directory."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octavo.model.quiet import quiet_transformers


class Baseline:
    """Greedy generation of a static batch by transformers with its `DynamicCache`.

    A plain loop around the model: less work per token than `generate` has. The head sees only the last row of a prompt.
    """

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM

        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        self._model: Any = model.eval().requires_grad_(False)
        # transformers renamed the argument in the middle of a major version.
        named = inspect.signature(model.forward).parameters
        self._cache_name = "cache" if "cache" in named else "past_key_values"
        self._cache: Any = None
        self._tokens: Tensor | None = None

    def start(self, prompts: list[list[int]]) -> list[int]:
        """Read `prompts`, all of one length, into a new cache; returns the first token of each."""
        from transformers import DynamicCache

        self._cache = DynamicCache(config=self._model.config)
        return self._forward(torch.tensor(prompts))

    def step(self) -> list[int]:
        """The next token of each."""
        assert self._tokens is not None
        return self._forward(self._tokens)

    def _forward(self, token_ids: Tensor) -> list[int]:
        with torch.inference_mode():
            cache = {self._cache_name: self._cache}
            out = self._model(input_ids=token_ids, use_cache=True, logits_to_keep=1, **cache)
            self._tokens = out.logits[:, -1].argmax(-1, keepdim=True)
        return [int(token) for token in self._tokens[:, 0]]
