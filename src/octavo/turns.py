"""Conversations keep their tokens: what the model generated is sent back as the very ids it generated.

A chat template turns a whole conversation into text again at every turn. Tokenising that text anew can cut an answer
into other tokens than the model produced, and then its blocks in the cache are no prefix of the new prompt. So the
ids of a prompt and its answer are remembered under their text, and a later prompt that begins with that text, and
goes on with a special token (where tokenisation starts afresh), begins with those ids.
"""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from octavo.model.tokenizer import Tokenizer

CAPACITY = 256
MOST_TOKENS = 1 << 20
"""Of all remembered conversations together."""


class Codec(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str, add_special_tokens: bool = ...) -> list[int]:
        """Token ids of `text`."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """Text of `ids`."""


class Turns:
    """The last `capacity` answered prompts, `MOST_TOKENS` tokens at most, by (owner, text).

    An owner (any hashable value) never sees another's ids.
    `special` are the texts of the special tokens. Safe to use from several threads.
    """

    def __init__(self, codec: Codec, special: Sequence[str], capacity: int = CAPACITY) -> None:
        self._codec = codec
        self._special = tuple(s for s in special if s)
        self._capacity = capacity
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[Hashable, str], array[int]] = OrderedDict()
        self._tokens = 0

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Self:
        """A memory for the conversations that `tokenizer` encodes."""
        return cls(tokenizer, () if tokenizer.hf is None else tuple(tokenizer.hf.all_special_tokens))

    def encode(self, text: str, owner: Hashable = None, exact: bool = False) -> list[int]:
        """Token ids of a rendered conversation, those of the longest remembered beginning kept.

        With `exact` nothing is: the same text has the same ids, whatever was said before.
        """
        with self._lock:
            known, ids = ("", []) if exact else self._longest(text, owner)
        rest = text[len(known) :]
        return ids + (self._codec.encode(rest, add_special_tokens=False) if rest else [])

    def _longest(self, text: str, owner: Hashable) -> tuple[str, list[int]]:
        """The longest remembered beginning of `text`, and its ids."""
        best: tuple[Hashable, str] | None = None
        for key in self._known:
            name, known = key
            if name == owner and (best is None or len(known) > len(best[1])) and self._continues(known, text):
                best = key
        if best is None:
            return "", []
        self._known.move_to_end(best)
        return best[1], self._known[best].tolist()

    def remember(self, prompt: str, token_ids: Sequence[int], owner: Hashable = None) -> None:
        """`token_ids` are those of the rendered `prompt` and of the answer to it.

        Nothing is kept where the ids do not spell the prompt (a tokenizer that normalises text).
        """
        text = self._codec.decode(token_ids, skip_special_tokens=False)
        if not text.startswith(prompt):
            return
        with self._lock:
            self._tokens -= len(self._known.pop((owner, text), ()))
            self._known[owner, text] = array("i", token_ids)
            self._tokens += len(token_ids)
            while len(self._known) > self._capacity or self._tokens > MOST_TOKENS:
                self._tokens -= len(self._known.popitem(last=False)[1])

    def _continues(self, known: str, text: str) -> bool:
        """Whether `text` begins with `known` and its rest is tokenised on its own."""
        if not text.startswith(known):
            return False
        return (
            len(text) == len(known)
            or text.startswith(self._special, len(known))
            or known.endswith(self._special)
        )
