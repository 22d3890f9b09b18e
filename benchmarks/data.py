"""Real text for prompts, from the directory that `OCTAVO_DATA` names; a built-in passage where there is none."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

from octavo.bench.text import prompt_ids
from octavo.model.tokenizer import Tokenizer

DATA = Path(os.environ.get("OCTAVO_DATA") or Path(__file__).parents[2] / "shared" / "data")
AZURE_TRACE = DATA / "traces" / "azure" / "AzureLLMInferenceTrace_conv.csv"
MOONCAKE_TRACE = DATA / "traces" / "mooncake" / "conversation_trace.jsonl"
_TEXT = DATA / "text" / "wikitext2" / "wiki.test.raw"
_BYTES_PER_TOKEN = 12  # more than English text has, so that a cut is never too short
_STRIDE = 4099


class Prompts:
    """Prompts of any length, no two of which share their first tokens."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._drawn = 0

    def next(self, length: int) -> list[int]:
        """`length` token ids, another text each time."""
        self._drawn += 1
        text = _text()
        if text is None or self._tokenizer.hf is None:
            return prompt_ids(self._tokenizer, length, self._drawn, vocab_size=self._vocab_size)
        size = length * _BYTES_PER_TOKEN
        start = self._drawn * _STRIDE % max(1, len(text) - size)
        return self._tokenizer.encode(f"{self._drawn}. {text[start : start + size]}")[:length]


@cache
def _text() -> str | None:
    return _TEXT.read_text() if _TEXT.exists() else None
