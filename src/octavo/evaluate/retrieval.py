"""Needles in a haystack: facts hidden at several depths of a long text, asked for at its end.

An answer counts if greedy decoding would give all of its tokens. That is read off the logits of the questions with
their right answers, in one pass: as long as each likeliest token is the right one, greedy decoding reads the same text.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from octavo.evaluate.reading import Reading
from octavo.model.tokenizer import Tokenizer

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where the facts stand, as shares of the text."""

_PLACES = ("Arden", "Brill", "Corvo", "Delph", "Ester")
_ASKED = (2, 0, 4, 1, 3)  # in another order than they are told


@dataclass(frozen=True)
class Haystack:
    """`answers[i]` are the positions in `token_ids` of the answer to the fact at `DEPTHS[i]`; the questions begin at
    position `questions`."""

    token_ids: list[int]
    questions: int
    answers: tuple[range, ...]


def make_haystack(tokenizer: Tokenizer, hay: Sequence[int], length: int) -> Haystack | None:
    """`length` tokens: facts within the tokens `hay`, from its beginning again where it ends, and questions.

    None if there is no tokenizer, or if facts and questions alone would be more than half of it.
    """
    if tokenizer.hf is None:
        return None
    chooser = random.Random(0)
    facts, asked = [], []
    for place in _PLACES:
        code = tokenizer.encode(f" {chooser.randrange(1_000, 10_000)}", add_special_tokens=False)
        said = tokenizer.encode(f"\n\nThe secret number of {place} is", add_special_tokens=False)
        end = tokenizer.encode(".\n\n", add_special_tokens=False)
        facts.append([*said, *code, *end])
        asked.append((said, code, end))
    rest = length - 2 * sum(map(len, facts))
    if rest < length / 2:
        return None
    hay = (list(hay) * -(-rest // len(hay)))[:rest]
    token_ids: list[int] = []
    begin = 0
    for depth, fact in zip(DEPTHS, facts, strict=True):
        end_of_hay = round(depth * rest)
        token_ids += [*hay[begin:end_of_hay], *fact]
        begin = end_of_hay
    questions = len(token_ids)
    answers: dict[int, range] = {}
    for i in _ASKED:
        said, code, end = asked[i]
        token_ids += said
        answers[i] = range(len(token_ids), len(token_ids) + len(code))
        token_ids += [*code, *end]
    return Haystack(token_ids, questions, tuple(answers[i] for i in range(len(DEPTHS))))


def retrieved(reading: Reading, haystack: Haystack) -> tuple[bool, ...]:
    """Whether each fact was given back, by depth."""
    reading.begin()
    rows = [logits.argmax(-1) for logits in reading.read(haystack.token_ids, haystack.questions)]
    likeliest = torch.cat(rows).tolist()
    right = haystack.token_ids[haystack.questions + 1 :]
    return tuple(
        all(
            likeliest[p] == right[p]
            for p in range(a.start - 1 - haystack.questions, a.stop - 1 - haystack.questions)
        )
        for a in haystack.answers
    )
