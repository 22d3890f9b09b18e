"""`StructuredOutputs`: the form that an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from octavo.errors import InvalidRequest, show

_PARAM = "structured_outputs"
MAX_CHOICES = 10_000


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """Exactly one of these; raises `InvalidRequest` otherwise. Names are vLLM's.

    | field | the answer is |
    |---|---|
    | json_schema | JSON that a JSON schema (an object, or its text) describes |
    | json_object | any JSON object |
    | regex | text that matches from beginning to end; no look-around, no back-references |
    | choice | one of these strings |
    | grammar | text of this context-free grammar, in llguidance's variant of Lark, `start` first |
    """

    json_schema: str | Mapping[str, Any] | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [field.name for field in fields(self) if getattr(self, field.name) not in (None, False)]
        names = ", ".join(field.name for field in fields(self))
        if len(given) != 1:
            what = "none of its fields is set" if not given else f"{', '.join(given)} contradict each other"
            raise InvalidRequest(f"{_PARAM}: {what}; give exactly one of {names}", param=_PARAM)
        if self.json_object not in (False, True):
            raise _wrong("json_object", self.json_object, "True or False")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not _is_text(value):
                raise _wrong(name, value, "a string of valid characters")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))


def _wrong(name: str, value: object, rule: str) -> InvalidRequest:
    return InvalidRequest(f"{_PARAM}.{name}={show(value)} must be {rule}", param=_PARAM)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def _schema_text(schema: object) -> str:
    """The schema as JSON text. Its meaning is checked where it is compiled."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping):
            raise TypeError(f"it is a {type(parsed).__name__}")
        text = json.dumps(dict(parsed), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise _wrong("json_schema", schema, f"a JSON object, and {reason}") from error
    if not _is_text(text):
        raise _wrong("json_schema", schema, "of valid characters; it holds a lone surrogate")
    return text


def _choices(choices: object) -> tuple[str, ...]:
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not choices:
        raise _wrong("choice", choices, "a list of at least one string")
    if len(choices) > MAX_CHOICES:
        raise _wrong("choice", choices, f"a list of at most {MAX_CHOICES} strings, and has {len(choices)}")
    for text in choices:
        if not _is_text(text) or not text:
            raise _wrong("choice", choices, f"a list of non-empty strings, and {show(text)} is none")
    return tuple(choices)
