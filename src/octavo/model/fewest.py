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


@dataclass(frozen=True)
class Fewest:
    """`bytes_per_token` is the most bytes of text that a token covers; None where that is not known.

    With `strips` a special token may swallow the white space next to it.
    """

    bytes_per_token: int | None
    strips: bool = False

    def tokens(self, text: str) -> int:
        """At least so many tokens are in `text`; 0 where nothing is known. Linear in the text, and fast."""
        if self.bytes_per_token is None:
            return 0
        covered = "".join(text.split()) if self.strips else text
        return -(-len(covered.encode("utf-8", "surrogatepass")) // self.bytes_per_token)


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
    if not factor or not all(map(_keeps, splits)) or not _covers(backend.model, vocabulary, byte_level):
        return Fewest(None)
    added = backend.get_added_tokens_decoder().values()
    # In a byte-level vocabulary a character stands for a byte.
    longest = max(len(token) if byte_level else len(token.encode()) for token in vocabulary)
    longest = max([longest, *(len(token.content.encode()) for token in added)])
    return Fewest(longest * factor, any(token.lstrip or token.rstrip for token in added))


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


def _covers(model: Any, vocabulary: dict[str, int], byte_level: bool) -> bool:
    """Whether every byte gets a token, and none is merged into one for the unknown."""
    from tokenizers.pre_tokenizers import ByteLevel

    if getattr(model, "continuing_subword_prefix", None) or getattr(model, "end_of_word_suffix", None):
        return False
    if byte_level:
        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    fallback = getattr(model, "byte_fallback", False)
    return bool(fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
