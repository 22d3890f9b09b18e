"""Token ids to text, one token at a time. Knows no tokenizer's inside, only its `decode`.

Decoding one token alone is wrong (half a character, a leading space stripped), decoding everything again each
time is quadratic. So a short window of the last tokens is decoded, and what it shows beyond the text already
given is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

_REPLACEMENT = "\ufffd"
_LONG = 12  # tokens in a window before it is cut
_KEPT = 4  # tokens that stay: at least one more than the three bytes an unfinished character can have


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = ...) -> str:
        """The text of `ids`; bytes that are no character become U+FFFD, spaces are not cleaned up."""


def find_fallback_byte(backend: Any) -> int | None:
    """The id of a byte token that is no character alone, if `backend`, a `tokenizers.Tokenizer`, has byte
    fallback."""
    token: int | None = backend.token_to_id("<0xC3>")
    if token is None or backend.decode([token, token]) != 2 * _REPLACEMENT:
        return None
    return token


def _common(a: str, b: str) -> int:
    """How many characters `a` and `b` have in common at their beginning."""
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))


class IncrementalDetokenizer:
    """Turns token ids into deltas whose concatenation, with `flush()`, is `decode` of all ids.

    A delta never holds a part of a character, nor text that a later token could still change. `fallback_byte`
    is what `find_fallback_byte` says: with byte fallback (SentencePiece) one bad byte turns a whole run of
    byte tokens into U+FFFD, so such a run is given only once it has ended. Amortised O(1) per token.
    """

    def __init__(
        self, decoder: Decoder, skip_special_tokens: bool = True, fallback_byte: int | None = None
    ) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._byte = fallback_byte
        self._window: list[int] = []
        self._given = ""  # the part of the window's text that has been given out

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often empty."""
        alone = self._decode([token_id])
        if not alone and self._hidden(token_id):
            return ""
        self._window.append(token_id)
        if self._byte is not None and alone == _REPLACEMENT:
            return ""
        final, pending = self._split(self._window)
        delta = final[_common(self._given, final) :]
        self._given = final
        if len(self._window) > _LONG:
            self._cut(pending)
        return delta

    def flush(self) -> str:
        """What was held back, as it is; the next token begins a new text."""
        text = self._decode(self._window)
        rest = text[_common(self._given, text) :]
        self._window, self._given = [], ""
        return rest

    def _decode(self, ids: list[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip)

    def _split(self, ids: list[int]) -> tuple[str, str]:
        """The text of `ids`: the part that no later token can change, and the rest."""
        text = self._decode(ids)
        if self._byte is not None:
            final = text[: _common(text, self._decode([*ids, self._byte]))]
        else:
            # Bytes that end inside a character show as one U+FFFD; those before it were wrong for good.
            final = text.removesuffix(_REPLACEMENT)
        return final, text[len(final) :]

    def _hidden(self, token_id: int) -> bool:
        """Whether a token without text is a special one left out, and not a space stripped where it stands."""
        return self._skip and bool(self._decoder.decode([token_id], skip_special_tokens=False))

    def _cut(self, pending: str) -> None:
        """Keep the last tokens if alone they show the same pending text, and something before it."""
        tail = self._window[-_KEPT:]
        final, still_pending = self._split(tail)
        if final and still_pending == pending:
            self._window, self._given = tail, final
