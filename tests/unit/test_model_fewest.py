"""The fewest tokens of a text: never more than the text really has, and none promised where that is not certain."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_builders import byte_tokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.model.fewest import fewest
from support.sizes import sized

BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
CORPUS = [
    "the cat sat on the mat  " * 9,
    "    " * 40,
    "0123456789" * 9,
    "Grüße und Küsse aus Ελλάδα, 한국어도 " * 9,
]


def trained(*, normalizer: Any = None, pre: Any = None, added: tuple[AddedToken, ...] = ()) -> Tokenizer:
    """A byte-level BPE with merges, so that tokens are long."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = level if pre is None else pre_tokenizers.Sequence([pre, level])
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=level.alphabet(), show_progress=False, min_frequency=1
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(token) if isinstance(token, str) else token for token in added])
    return backend


def fallback(**options: Any) -> Tokenizer:
    """A SentencePiece-like BPE with a token for every byte."""
    vocabulary = {**BYTES, "▁": 256, "a": 257, "▁a": 258, "▁▁": 259, "▁▁▁▁": 260, "aa": 261, "<unk>": 262}
    merges = [("▁", "a"), ("▁", "▁"), ("▁▁", "▁▁"), ("a", "a")]
    model = models.BPE(
        **{"vocab": vocabulary, "merges": merges, "byte_fallback": True, "unk_token": "<unk>", **options}
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "bytes": lambda: byte_tokenizer().backend_tokenizer,
    "trained": trained,
    "NFC": lambda: trained(normalizer=normalizers.NFC()),
    "NFD": lambda: trained(normalizer=normalizers.NFD()),
    "NFKC": lambda: trained(normalizer=normalizers.NFKC()),
    "NFKD": lambda: trained(normalizer=normalizers.NFKD()),
    "lower": lambda: trained(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])),
    "shorter": lambda: trained(normalizer=normalizers.Replace("aaaa", "b")),
    "digits": lambda: trained(pre=pre_tokenizers.Digits(individual_digits=True)),
    "isolated": lambda: trained(pre=pre_tokenizers.Split(Regex(r"\s+"), "isolated")),
    "swallows space": lambda: trained(
        added=(AddedToken("<end>", rstrip=True), AddedToken("<a>", lstrip=True))
    ),
    "fallback": fallback,
    "without some bytes": lambda: lacking("aÃĀ"),
    "metaspace": lambda: with_split(fallback(), pre_tokenizers.Metaspace()),
}
UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "whole words": lambda: with_split(
        Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")), pre_tokenizers.ByteLevel()
    ),
    "skips what it also changes": lambda: with_normalizer(lacking("z"), normalizers.NFC()),
    "words": lambda: Tokenizer(models.WordPiece({"a": 0, "[UNK]": 1}, unk_token="[UNK]")),
    "unknown": lambda: fallback(byte_fallback=False, fuse_unk=True),
    "a byte is missing": lambda: fallback(vocab={k: v for k, v in BYTES.items() if v != 65}, merges=[]),
    "no alphabet": lambda: Tokenizer(models.BPE(vocab={"a": 0}, merges=[])),
    "drops spaces": lambda: trained(pre=pre_tokenizers.Whitespace()),
    "drops matches": lambda: trained(pre=pre_tokenizers.Split("a", "removed")),
    "drops accents": lambda: trained(normalizer=normalizers.StripAccents()),
    "drops ends": lambda: trained(normalizer=normalizers.Strip()),
    "drops in a sequence": lambda: trained(
        normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])
    ),
    "replaces by nothing": lambda: trained(normalizer=normalizers.Replace("a", "")),
    "replaces a pattern": lambda: trained(normalizer=normalizers.Replace(Regex("a+"), "a")),
}


def lacking(letters: str) -> Tokenizer:
    """A byte-level BPE that skips the bytes of `letters`, as it has none for them."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    kept = [letter for letter in sorted(level.alphabet()) if letter not in letters]
    vocabulary = {letter: i for i, letter in enumerate(kept)}
    merges = [("b", "b"), ("bb", "bb"), ("Ġ", "Ġ")]
    vocabulary |= {left + right: len(vocabulary) + i for i, (left, right) in enumerate(merges)}
    return with_split(Tokenizer(models.BPE(vocab=vocabulary, merges=merges)), level)


def with_normalizer(backend: Tokenizer, normalizer: Any) -> Tokenizer:
    backend.normalizer = normalizer
    return backend


def with_split(backend: Tokenizer, pre: Any) -> Tokenizer:
    backend.pre_tokenizer = pre
    return backend


@pytest.fixture(scope="module")
def backends() -> dict[str, Tokenizer]:
    return {name: make() for name, make in BOUNDED.items()}


PIECES = st.one_of(
    st.text(max_size=30),
    st.sampled_from(
        [
            "a",
            " ",
            "<end>",
            "<a>",
            "the cat",
            "0123",
            "\u212a",
            "\u0390",
            unicodedata.normalize("NFD", "\u1f82\ud55c\uad6d"),
            "\U0001fbf9",
            "\ufdfa",
            "\n\t\u3000",
            "\0",
            "éa",
        ]
    ).flatmap(lambda piece: st.integers(1, 40).map(lambda times: piece * times)),
)


@pytest.mark.parametrize("kind", BOUNDED)
@settings(max_examples=sized(60, 3000), deadline=None)
@given(text=st.lists(PIECES, max_size=6).map("".join))
def test_no_text_has_fewer(kind: str, backends: dict[str, Tokenizer], text: str) -> None:
    backend = backends[kind]
    assert fewest(backend).tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("kind", BOUNDED)
def test_the_bound_grows_with_the_text(kind: str, backends: dict[str, Tokenizer]) -> None:
    bound = fewest(backends[kind])
    assert bound.bytes_per_token is not None
    assert bound.tokens("x" * 1000 * bound.bytes_per_token) == 1000


@pytest.mark.parametrize("kind", UNBOUNDED)
def test_nothing_is_promised_where_text_may_vanish(kind: str) -> None:
    assert fewest(UNBOUNDED[kind]()).tokens("az" * 10_000) == 0


def test_the_shrinking_of_normal_forms_is_no_more_than_assumed() -> None:
    """Per character; that composing shrinks no more than its inverse grows is what the second line says."""
    every = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]

    def worst(form: str) -> float:
        return max(len(c.encode()) / len(unicodedata.normalize(form, c).encode()) for c in every)

    composed = max(len(unicodedata.normalize("NFD", c).encode()) / len(c.encode()) for c in every)
    assert worst("NFD") <= 3
    assert composed <= 3
    assert worst("NFKD") <= 4
    assert max(len(c.encode()) / len(c.lower().encode()) for c in every) <= 3


def test_a_lone_surrogate_is_no_error_here() -> None:
    assert fewest(byte_tokenizer().backend_tokenizer).tokens("\ud800" * 10) > 0
