"""The text that is shipped to measure on, and texts as token ids."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

import torch

from octavo.model.load import LoadedModel

_FILE = Path(__file__).with_name("text.txt")


@cache
def own_text() -> str:
    """Prose, code, JSON and numbers, some 2,000 tokens; written for this."""
    return _FILE.read_text(encoding="utf-8")


@cache
def own_text_digest() -> str:
    """The SHA-256 of it."""
    return hashlib.sha256(own_text().encode()).hexdigest()


def own_tokens(loaded: LoadedModel, count: int) -> list[int]:
    """`count` token ids of the shipped text, from its beginning again where it ends.

    A model without a tokenizer gets ids drawn at random, the same ones each time.
    """
    if loaded.tokenizer.hf is None:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(loaded.spec.vocab_size, (count,), generator=generator).tolist()
    ids = loaded.tokenizer.encode(own_text())
    return (ids * -(-count // len(ids)))[:count]
