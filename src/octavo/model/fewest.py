"""The fewest tokens that a text can have, known before it is tokenised.

A token covers at most as many bytes as the longest token has, so bytes / longest is a lower bound, if no byte is
covered by nothing and normalisation shrinks text by no more than a known factor. A tokenizer for which that is not
certain gets no bound: none is better than one that refuses a text that fits.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

# How many times fewer bytes there can be afterwards. Canonical forms map a character to at least a third of its bytes
# (U+212A, the Kelvin sign, to K) and compose to at least a third again; compatibility forms to at least a quarter.
_SHRINK = {"Prepend": 1, "ByteLevel": 1, "NFD": 3, "NFC": 9, "NFKD": 4, "NFKC": 12, "Lowercase": 3}
_SPLITS = ("ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts")  # that lose nothing
_UTF8 = frozenset(range(0xC0)) | frozenset(range(0xC2, 0xF5))  # the bytes that text is made of


@dataclass(frozen=True)
class Fewest:
    """`bytes_per_token` is the most bytes of text that a token covers; None where that is not known.

    With `strips` a special token may swallow the white space next to it; `dropped` are bytes that get no token.
    """

    bytes_per_token: int | None
    strips: bool = False
    dropped: bytes = b""

    def tokens(self, text: str) -> int:
        """At least so many tokens are in `text`; 0 where nothing is known. Linear in the text, and fast."""
        if self.bytes_per_token is None:
            return 0
        covered = "".join(text.split()) if self.strips else text
        counted = covered.encode("utf-8", "surrogatepass").translate(None, self.dropped)
        return -(-len(counted) // self.bytes_per_token)


def fewest(backend: Any) -> Fewest:
    """The bound for `backend`, a `tokenizers.Tokenizer`."""
    normalizers = _parts(backend.normalizer, "normalizers")
    splits = _parts(backend.pre_tokenizer, "pretokenizers")
    shrinks = [_shrink(part) for part in normalizers]
    factor = 1
    for shrink in shrinks:
        factor *= shrink or 0
    vocabulary = backend.get_vocab(with_added_tokens=False)
    byte_level = any(part["type"] == "ByteLevel" for part in (*normalizers, *splits))
    dropped = _dropped(backend.model, vocabulary, byte_level)
    if not factor or not all(map(_keeps, splits)) or dropped is None or (dropped and normalizers):
        return Fewest(None)
    added = backend.get_added_tokens_decoder().values()
    # In a byte-level vocabulary a character stands for a byte.
    longest = max(len(token) if byte_level else len(token.encode()) for token in vocabulary)
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return Fewest(longest * factor, any(token.lstrip or token.rstrip for token in added), dropped)


def _parts(component: Any, name: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if component is None:
        return []

    def flat(state: dict[str, Any]) -> list[dict[str, Any]]:
        return (
            [leaf for part in state[name] for leaf in flat(part)] if state["type"] == "Sequence" else [state]
        )

    return flat(json.loads(component.__getstate__()))


def _shrink(part: dict[str, Any]) -> int | None:
    if part["type"] == "Replace":
        pattern, content = part["pattern"].get("String"), part["content"]
        if not pattern or not content:
            return None
        return int(-(-len(pattern.encode()) // len(content.encode())))
    return _SHRINK.get(part["type"])


def _keeps(part: dict[str, Any]) -> bool:
    return part["type"] in _SPLITS and part.get("behavior") != "Removed"


def _dropped(model: Any, vocabulary: dict[str, int], byte_level: bool) -> bytes | None:
    """The bytes of text that get no token; None where bytes may be merged into one token for the unknown."""
    if type(model).__name__ not in ("BPE", "Unigram"):
        return None
    if getattr(model, "continuing_subword_prefix", None) or getattr(model, "end_of_word_suffix", None):
        return None
    if byte_level:
        missing = bytes(byte for byte, letter in _letters() if letter not in vocabulary)
        skipped = getattr(model, "unk_token", "") is None
        return None if missing and not skipped else missing
    fallback = getattr(model, "byte_fallback", False)
    return b"" if fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in _UTF8) else None


def _letters() -> list[tuple[int, str]]:
    """The bytes of UTF-8, and the character that stands for each in a byte-level vocabulary."""
    from tokenizers.pre_tokenizers import ByteLevel

    # The printable ones stand for themselves, the others follow each other from U+0100 on.
    alphabet = ByteLevel.alphabet()
    others = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    return [
        (byte, letter)
        for byte in range(256)
        if (letter := chr(byte) if chr(byte) in alphabet else next(others)) and byte in _UTF8
    ]
