"""A structured-output task: sentences to be written as JSON, after a few that are, greedily and without a grammar.

All records are asked for in one sequence, so that what the model wrote before is in the cache that it goes on with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

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
    """The task in tokens: each prompt goes on where the answer before it ended, after at most `limits[i]` tokens."""

    prompts: tuple[list[int], ...]
    limits: tuple[int, ...]

    @property
    def longest(self) -> int:
        """The most tokens there can be."""
        return sum(map(len, self.prompts)) + sum(self.limits)

    @classmethod
    def of(cls, tokenizer: Tokenizer, most: int) -> RecordTask | None:
        """None if there is no tokenizer, or if it would take more than `most` tokens."""
        if tokenizer.hf is None:
            return None
        shown = "\n\n".join(f"{_question(record)} {json.dumps(_object(record))}" for record in _SHOWN)
        prompts, limits = [], []
        for i, record in enumerate(_ASKED):
            before = shown if i == 0 else ""
            prompts.append(tokenizer.encode(f"{before}\n\n{_question(record)}", add_special_tokens=i == 0))
            limits.append(len(tokenizer.encode(f" {json.dumps(_object(record))}", False)) + _SPARE)
        task = cls(tuple(prompts), tuple(limits))
        return task if task.longest <= most else None


def _question(record: _Record) -> str:
    name, age, trade, town, crowns = record
    return f"Line: {name}, {age}, a {trade} from {town}, owes {crowns} crowns.\nJSON:"


def _object(record: _Record) -> dict[str, Any]:
    return dict(zip(_FIELDS, record, strict=True))


def ask_records(reading: Reading, tokenizer: Tokenizer, task: RecordTask) -> RecordScore:
    """Have the records written and judge them."""
    reading.begin()
    answers = []
    for prompt, limit in zip(task.prompts, task.limits, strict=True):
        token = int(reading.last(prompt).argmax())
        written: list[int] = []
        while token not in tokenizer.eos_token_ids:
            written.append(token)
            if len(written) == limit or "\n" in tokenizer.decode(written).lstrip():
                break
            token = int(reading.last([token]).argmax())
        answers.append(tokenizer.decode(written))
    return judge_records(answers)


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
