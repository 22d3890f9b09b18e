"""A structured-output task: sentences to be written as JSON, after a few that are, greedily and without a grammar.

All records are asked for in one sequence, so that what the model wrote before is in the cache that it goes on with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch

from octavo.evaluate.reading import Reading
from octavo.model.tokenizer import Tokenizer

_Record = tuple[str, int, str, str, int]
_FIELDS = ("name", "age", "trade", "town", "crowns")
_SHOWN: tuple[_Record, ...] = (
    ("Mara Quist", 34, "carpenter", "Lund", 120),
    ("Piet Olsen", 51, "baker", "Halven", 75),
    ("Ines Ferro", 29, "teacher", "Porto", 260),
    ("Tom Ashby", 43, "sailor", "Whitby", 18),
)
_ASKED: tuple[_Record, ...] = (
    ("Jonas Falk", 62, "postman", "Bergen", 340),
    ("Clara Weiss", 38, "weaver", "Ulm", 95),
    ("Ravi Menon", 47, "doctor", "Kochi", 510),
    ("Elsa Holm", 25, "painter", "Visby", 66),
)
_SPARE = 16  # tokens that an answer may be longer than the right one


@dataclass(frozen=True)
class RecordScore:
    """Shares of the answers that are JSON objects, and of the fields that are right."""

    parsed: float
    fields: float


@dataclass(frozen=True)
class RecordTask:
    """The task in tokens: each prompt goes on where the answer before it ended. `right` are the answers as they should
    be, up to the end of the line."""

    prompts: tuple[list[int], ...]
    right: tuple[list[int], ...]

    @property
    def longest(self) -> int:
        """The most tokens there can be."""
        return sum(map(len, (*self.prompts, *self.right))) + _SPARE * len(self.right)

    @classmethod
    def of(cls, tokenizer: Tokenizer, most: int) -> RecordTask | None:
        """None if there is no tokenizer, or if it would take more than `most` tokens."""
        if tokenizer.hf is None:
            return None
        shown = "\n\n".join(f"{_question(record)} {json.dumps(_object(record))}" for record in _SHOWN)
        prompts, right = [], []
        for i, record in enumerate(_ASKED):
            before = f"{shown}\n\n" if i == 0 else ""
            prompts.append(tokenizer.encode(before + _question(record), add_special_tokens=i == 0))
            right.append(tokenizer.encode(f" {json.dumps(_object(record))}\n\n", add_special_tokens=False))
        task = cls(tuple(prompts), tuple(right))
        return task if task.longest <= most else None


def _question(record: _Record) -> str:
    name, age, trade, town, crowns = record
    return f"Line: {name}, {age}, a {trade} from {town}, owes {crowns} crowns.\nJSON:"


def _object(record: _Record) -> dict[str, Any]:
    return dict(zip(_FIELDS, record, strict=True))


def ask_records(reading: Reading, tokenizer: Tokenizer, task: RecordTask) -> RecordScore:
    """Have the records written and judge them."""
    reading.begin()
    answers = [
        tokenizer.decode(_write(reading, tokenizer, prompt, right))
        for prompt, right in zip(task.prompts, task.right, strict=True)
    ]
    return judge_records(answers)


def _write(reading: Reading, tokenizer: Tokenizer, prompt: list[int], right: list[int]) -> list[int]:
    """The line, or the `_SPARE` tokens more than the `right` one, that greedy decoding gives after `prompt`.

    The right answer is a draft: read at once, and taken as far as each token is the likeliest.
    """
    start = len(reading.token_ids) + len(prompt)
    rows = [rows.argmax(-1) for rows in reading.read([*prompt, *right], len(prompt) - 1)]
    likeliest = torch.cat(rows).tolist()
    taken = next((i for i, token in enumerate(right) if likeliest[i] != token), len(right))
    if taken == len(right):
        return right
    reading.rewind(start + taken)
    written, token = right[:taken], likeliest[taken]
    while token not in tokenizer.eos_token_ids:
        written.append(token)
        if len(written) == len(right) + _SPARE or "\n" in tokenizer.decode(written).lstrip():
            break
        token = int(reading.last([token]).argmax())
    return written


def judge_records(answers: list[str]) -> RecordScore:
    """The first line of each answer against what was asked for."""
    parsed = right = 0
    for answer, record in zip(answers, _ASKED, strict=True):
        try:
            found = json.loads(answer.strip().partition("\n")[0])
        except ValueError:
            continue
        if isinstance(found, dict):
            parsed += 1
            right += sum(type(found.get(k)) is type(v) and found[k] == v for k, v in _object(record).items())
    return RecordScore(parsed / len(_ASKED), right / (len(_ASKED) * len(_FIELDS)))
