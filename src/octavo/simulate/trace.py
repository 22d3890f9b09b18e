"""Requests from a trace: Mooncake JSONL, Octavo's own request log, Azure CSV.

What is shared is known by ids of blocks: equal ids mean equal beginnings. A Mooncake trace has an id per 512 tokens of
the prompt, its partial end included; a request log one per full block, over prompt and answer; an Azure trace has none.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, show

MOONCAKE_BLOCK = 512
MOST_ANSWERS = 128
"""Of one request: as many as `octavo serve` gives."""
MOST_TOKENS = 1 << 24
"""Of one request: longer than any model's context, and its token ids still take little memory."""
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_UNIQUE = 1 << 30  # token ids from here up belong to one request each


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, in seconds from the first, and its tokens.

    `ids` name the blocks of `block_size` tokens of the prompt and `output_ids` go on from its last full block. They are
    dense, from 0. `index` numbers the requests of a trace. There are `n` answers of `output` tokens each; `output_ids`
    are of the first, the others share nothing with anybody.
    """

    index: int
    at: float
    prompt: int
    output: int
    block_size: int = 0
    ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    priority: int = 0
    n: int = 1

    @property
    def full(self) -> int:
        """Full blocks of the prompt."""
        return self.prompt // self.block_size if self.block_size else 0

    def prompt_tokens(self) -> list[int]:
        """Token ids that are equal where the blocks are, and nowhere else."""
        tokens: list[int] = []
        for name in self.ids[: self.full]:
            tokens += [name] * self.block_size
        rest = self.prompt - len(tokens)
        tail = self.ids[self.full : self.full + 1] or self.output_ids[:1] or (self._own,)
        return tokens + [tail[0]] * rest

    def output_token(self, position: int, choice: int = 0) -> int:
        """The generated token at `position` of the sequence that answer number `choice` is in."""
        if choice:
            return -(self.index * MOST_ANSWERS + choice)
        if not self.output_ids:
            return self._own
        block = position // self.block_size - self.full
        return self.output_ids[block] if block < len(self.output_ids) else self._own

    @property
    def _own(self) -> int:
        return _UNIQUE + self.index


def read_trace(path: Path) -> list[Arrival]:
    """All requests of a trace, in the order of their arrival. Raises `ConfigError` naming line and field."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            start = next((line.lstrip()[0] for line in lines if line.strip()), None)
            lines.seek(0)
            if start == "[":
                raise ConfigError(
                    f"trace={str(path)!r} is a JSON array, and one object per line is wanted, as jq -c '.[]' writes it",
                    param="trace",
                )
            read = _read_json if start == "{" else _read_csv
            found = list(read(path, lines)) if start else []
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace={str(path)!r} cannot be read: {error}", param="trace") from error
    if not found:
        raise ConfigError(f"trace={str(path)!r} holds no request", param="trace")
    found.sort(key=lambda arrival: arrival.at)
    return _from_zero(found)


def _from_zero(found: list[Arrival]) -> list[Arrival]:
    """Time from the first arrival, and block ids as dense numbers."""
    start, dense = found[0].at, dict[int, int]()
    return [
        Arrival(
            index,
            a.at - start,
            a.prompt,
            a.output,
            a.block_size,
            tuple(dense.setdefault(name, len(dense)) for name in a.ids),
            tuple(dense.setdefault(name, len(dense)) for name in a.output_ids),
            a.priority,
            a.n,
        )
        for index, a in enumerate(found)
    ]


class _Line:
    """One line of a trace; what is wrong with it is said with its number and the field."""

    def __init__(self, path: Path, number: int, values: dict[str, Any]) -> None:
        self.path, self.number, self.values = path, number, values

    def fail(self, field: str, why: str) -> ConfigError:
        return ConfigError(f"{self.path}, line {self.number}: {field} {why}", param=field)

    def count(self, field: str, least: int, default: int | None = None, most: int = MOST_TOKENS) -> int:
        """A whole number from `least` to `most`."""
        value = self.values.get(field, default)
        if value is None:
            raise self.fail(field, "is missing")
        if isinstance(value, str) and value.strip().isdecimal():
            with suppress(ValueError):  # more digits than Python reads
                value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.fail(field, f"is {show(value)}, not a whole number from {least} to {most}")
        return value

    def ids(self, field: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self.values.get(field, [])
        if not isinstance(value, list) or not all(type(name) is int for name in value):
            raise self.fail(field, f"is {show(value)}, not a list of whole numbers")
        return tuple(value)


def _read_json(path: Path, lines: Iterator[str]) -> Iterator[Arrival]:
    for number, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error}", param="trace") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path}, line {number}: not a JSON object", param="trace")
        yield _json_arrival(_Line(path, number, values))


def _json_arrival(line: _Line) -> Arrival:
    at = line.values.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not abs(at) < 1e18:
        raise line.fail("timestamp", "is missing" if at is None else f"is {show(at)}, not milliseconds")
    size = line.count("block_size", 1, MOONCAKE_BLOCK)
    prompt, output = line.count("input_length", 1), line.count("output_length", 0)
    n = line.count("n", 1, 1, MOST_ANSWERS)
    ids = line.ids("hash_ids")
    if len(ids) not in (prompt // size, -(-prompt // size)):
        raise line.fail("hash_ids", f"has {len(ids)} ids for {prompt} tokens in blocks of {size}")
    output_ids = line.ids("output_hash_ids")
    priority = line.values.get("priority", 0)
    if type(priority) is not int:
        raise line.fail("priority", f"is {show(priority)}, not a whole number")
    each = max(1, -(-output // n))  # the log has the sum of all answers
    return Arrival(0, at / 1000, prompt, each, size, ids, output_ids, priority, n)


def _read_csv(path: Path, lines: Iterator[str]) -> Iterator[Arrival]:
    reader = csv.reader(lines)
    rows = (row for row in reader if ",".join(row).strip())
    try:
        fields = next(rows, [])
        missing = [field for field in _AZURE if field not in fields]
        if missing:
            raise ConfigError(
                f"{path}, line {reader.line_num}: {missing[0]} is missing; a trace is JSONL (Mooncake, or Octavo's "
                f"request log) or CSV with the columns {', '.join(_AZURE)}",
                param=missing[0],
            )
        for row in rows:
            line = _Line(path, reader.line_num, dict(zip(fields, row, strict=False)))
            prompt, output = line.count("ContextTokens", 1), line.count("GeneratedTokens", 0)
            yield Arrival(0, _azure_time(line), prompt, max(1, output))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: not CSV: {error}", param="trace") from error


def _azure_time(line: _Line) -> float:
    """Seconds. Without a zone it is UTC."""
    text = line.values.get("TIMESTAMP", "")
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise line.fail("TIMESTAMP", f"is {show(text)}, not a date and time") from error
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
