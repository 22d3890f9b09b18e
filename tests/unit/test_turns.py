"""Conversations keep the ids their answers were generated with."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from octavo.turns import Turns

END = "<end>"


class Pairs:
    """Tokens are two characters where they fit, else one; the end marker is a token of its own."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = []
        for i, part in enumerate(text.split(END)):
            if i:
                ids.append(-1)
            ids += [self._id(part[j : j + 2]) for j in range(0, len(part), 2)]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(END if i == -1 else self._text(i) for i in ids)

    def _id(self, piece: str) -> int:
        return sum(ord(c) << (8 * i) for i, c in enumerate(piece))

    def _text(self, token: int) -> str:
        return "".join(chr(c) for c in (token & 255, token >> 8) if c)


def singles(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_generated_ids_come_back_where_the_text_is_unchanged() -> None:
    codec = Pairs()
    turns = Turns(codec, [END])
    prompt = f"hello{END}"
    first = turns.encode(prompt)
    assert first == codec.encode(prompt)
    answer = singles("abcd")
    turns.remember(prompt, first + answer)
    following = f"hello{END}abcd{END}more{END}"
    assert turns.encode(following) == first + answer + codec.encode(f"{END}more{END}")
    assert codec.decode(turns.encode(following)) == following


def test_a_changed_answer_or_an_unsafe_cut_is_tokenised_anew() -> None:
    codec = Pairs()
    turns = Turns(codec, [END])
    prompt = f"hi{END}"
    turns.remember(prompt, codec.encode(prompt) + singles("abcd"))
    for text in (f"hi{END}abce{END}", f"hi{END}abcdef{END}"):
        assert turns.encode(text) == codec.encode(text)


def test_the_longest_beginning_wins_and_owners_are_apart() -> None:
    codec = Pairs()
    turns = Turns(codec, [END])
    one = codec.encode(f"hi{END}") + singles("ab") + [-1]
    two = one + singles("cd") + [-1]
    turns.remember(f"hi{END}", one, "x")
    turns.remember(f"hi{END}", two, "x")
    text = f"hi{END}ab{END}cd{END}"
    assert turns.encode(text, "x") == two
    assert turns.encode(text, None) == codec.encode(text)


def test_only_the_last_ones_are_kept() -> None:
    codec = Pairs()
    turns = Turns(codec, [END], capacity=2)
    for name in ("aa", "bb", "cc"):
        turns.remember(f"{name}{END}", codec.encode(f"{name}{END}") + singles("xy"))
    assert turns.encode(f"aa{END}xy{END}") == codec.encode(f"aa{END}xy{END}")
    assert turns.encode(f"cc{END}xy{END}") == codec.encode(f"cc{END}") + singles("xy") + [-1]


def test_exact_ids_follow_from_the_text_alone() -> None:
    turns = Turns(Pairs(), [END])
    text = f"hello{END}"
    turns.remember("hello", [*singles("hello"), -1], "owner")
    assert turns.encode(text, "owner") == [*singles("hello"), -1]
    assert turns.encode(text, "owner", exact=True) == Pairs().encode(text)


def test_long_conversations_push_out_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.turns.MOST_TOKENS", 100)
    turns = Turns(Pairs(), [END])
    for name in "abc":
        turns.remember(name, singles(f"{name}{'x' * 38}{END}"[:39]), "owner")
    kept = [
        name for name in "abc" if turns.encode(f"{name}{'x' * 38}", "owner") == singles(f"{name}{'x' * 38}")
    ]
    assert kept == ["b", "c"]
