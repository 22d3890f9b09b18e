"""Deltas joined are the text of all tokens, byte for byte, and none holds half a character."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from octavo.detokenize import IncrementalDetokenizer, find_fallback_byte

TEXTS = [
    "The quick brown fox.\n\n  Two  spaces\tand a tab ",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag, 🇫🇷🇹🇭 and 👍🏽!",
    "ภาษาไทยไม่มีช่องว่างระหว่างคำ",
    "naïve café — 日本語 ﷽ \u200b zero width",
    "   ",
    "\n\n\n",
    "🙂",
]


def byte_alphabet() -> list[str]:
    """The printable character by which byte-level BPE writes each byte (the mapping of GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    extra = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(extra)) for byte in range(256)]


def byte_level() -> Tokenizer:
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
    vocab |= {"Ġthe": 256, "Ġquick": 257, "ðŁĺ": 258, "Ģab": 259}  # two of them cut an emoji in pieces
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer


def byte_fallback() -> Tokenizer:
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ["▁", "▁the", "▁quick", "a", "é", "👍", "▁▁", "\ufffd", "x▁", "▁x"]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = {piece: i for i, piece in enumerate(["▁", "▁the", "quick", "▁▁", "a", ".", "▁a"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


TOKENIZERS = {"byte level": byte_level(), "byte fallback": byte_fallback(), "metaspace": metaspace()}


class Counting:
    """Counts how many ids are decoded in all."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        self.decoded += len(ids)
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))


def deltas_of(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(Counting(tokenizer), skip, find_fallback_byte(tokenizer))
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_joined_deltas_of_any_tokens_are_the_whole(name: str, data: st.DataObject, skip: bool) -> None:
    tokenizer = TOKENIZERS[name]
    size = tokenizer.get_vocab_size()
    token = st.integers(0, size - 1) | st.integers(max(0, size - 12), size - 1)
    ids = data.draw(st.lists(token, max_size=40))
    assert "".join(deltas_of(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("text", TEXTS)
def test_a_delta_never_holds_part_of_a_character_at_the_byte_level(text: str) -> None:
    ids = list(text.encode())
    deltas = deltas_of(TOKENIZERS["byte level"], ids)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert [delta for delta in deltas if delta] == list(text)  # each character as soon as it is complete


@pytest.mark.parametrize("text", TEXTS)
def test_a_delta_never_holds_part_of_a_character_with_byte_fallback(text: str) -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [tokenizer.token_to_id("▁the"), *(byte + 1 for byte in text.encode()), tokenizer.token_to_id("a")]
    deltas = deltas_of(tokenizer, ids)
    assert "".join(deltas) == f"the{text}a"
    assert not any("\ufffd" in delta for delta in deltas)


def test_a_run_of_byte_tokens_that_turns_bad_takes_nothing_back() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [
        tokenizer.token_to_id("a"),
        *(byte + 1 for byte in "👍\n".encode() + b"\xc3"),
        tokenizer.token_to_id("a"),
    ]
    deltas = deltas_of(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids) == "a" + 6 * "\ufffd" + "a"


def test_a_special_token_left_out_inside_a_character_changes_nothing() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    ids = [0xC2 + 1, tokenizer.token_to_id("</s>"), 0xA9 + 1, tokenizer.token_to_id("a")]
    assert deltas_of(tokenizer, ids) == ["", "", "", "©a", ""]


def test_bad_bytes_are_shown_and_what_follows_is_not_lost() -> None:
    deltas = deltas_of(TOKENIZERS["byte level"], [0xE2, 0x82, 0x41, 0xFF, 0xFF, 0x42])
    assert "".join(deltas) == "\ufffdA\ufffd\ufffdB"
    assert deltas[:2] == ["", ""]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_spaces_at_the_beginning_are_those_of_the_whole(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    the = tokenizer.token_to_id("▁the") or tokenizer.token_to_id("Ġthe")
    assert "".join(deltas_of(tokenizer, [the] * 30)) == tokenizer.decode([the] * 30)


def test_special_tokens_are_left_out_or_kept() -> None:
    tokenizer = TOKENIZERS["byte fallback"]
    the, end = tokenizer.token_to_id("▁the"), tokenizer.token_to_id("</s>")
    ids = [the, *[end] * 20, the, end]
    assert "".join(deltas_of(tokenizer, ids)) == "the the"
    assert "".join(deltas_of(tokenizer, ids, skip=False)) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("byte level", ["Ġthe", "a", "."]),
        ("byte level", ["<|end|>"]),
        ("byte level", ["ÿ"]),
        ("byte fallback", ["▁the", "a"]),
        ("byte fallback", ["</s>"]),
        ("byte fallback", ["<0xFF>"]),
        ("metaspace", ["▁the", "</s>", "▁"]),
    ],
)
def test_the_work_per_token_does_not_grow_with_the_text(name: str, pieces: list[str]) -> None:
    tokenizer = TOKENIZERS[name]
    counting = Counting(tokenizer)
    detokenizer = IncrementalDetokenizer(counting, True, find_fallback_byte(tokenizer))
    ids = [tokenizer.token_to_id(piece) for piece in pieces] * 1000
    for token in ids:
        detokenizer.push(token)
    assert counting.decoded <= 40 * len(ids)


def test_only_a_vocabulary_with_byte_fallback_has_a_fallback_byte() -> None:
    assert find_fallback_byte(TOKENIZERS["byte fallback"]) == 0xC3 + 1
    assert find_fallback_byte(TOKENIZERS["byte level"]) is None
    assert find_fallback_byte(TOKENIZERS["metaspace"]) is None
