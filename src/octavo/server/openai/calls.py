"""Tool calls, read from the text of an answer as it comes. The grammar of `tools` makes the form literal."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from octavo.server.openai.tools import MARGIN, CallForm


@dataclass(frozen=True, slots=True)
class Text:
    """More of the text of an answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call, the `index`th of its answer."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the arguments (JSON) of call `index`."""

    index: int
    text: str


Event = Text | CallBegins | CallArguments


class CallReader:
    """Reads the text of one answer as it comes; how it is cut into pieces changes nothing but the pieces.

    White space between text and a call is left out. A call that ends before its name does is text.
    """

    def __init__(self, form: CallForm) -> None:
        self._form = form
        self._held = ""
        self._again = form.after + form.again
        self._state = self._text if form.marker else self._whole
        self._begun = form.opening
        self._object = _ObjectEnd()
        self.calls = 0

    def feed(self, text: str) -> list[Event]:
        """What `text` adds."""
        self._held += text
        events: list[Event] = []
        while self._state(events):
            pass
        return events

    def finish(self) -> list[Event]:
        """What is left once no more text comes."""
        held, self._held = self._held, ""
        if self._state == self._name:
            held = self._begun + held
        elif self._state in (self._arguments, self._after):
            held = ""
        return [Text(held)] if held else []

    def _text(self, events: list[Event]) -> bool:
        opening = self._form.opening
        at = self._held.find(opening)
        if at >= 0:
            self._give(events, self._held[:at].rstrip(MARGIN))
            self._held = self._held[at + len(opening) :]
            self._state = self._name
            return True
        certain = self._held[: len(self._held) - _overlap(self._held, opening)].rstrip(MARGIN)
        self._give(events, certain)
        self._held = self._held[len(certain) :]
        return False

    def _whole(self, events: list[Event]) -> bool:
        """At the beginning, where a call can only be all of the answer."""
        opening = self._form.opening
        if self._held.startswith(opening):
            self._held = self._held[len(opening) :]
            self._state = self._name
        elif opening.startswith(self._held):
            return False
        else:
            self._state = self._rest
        return True

    def _rest(self, events: list[Event]) -> bool:
        self._give(events, self._held)
        self._held = ""
        return False

    def _name(self, events: list[Event]) -> bool:
        at = self._held.find(self._form.middle)
        if at < 0:
            return False
        events.append(CallBegins(self.calls, new_call_id(self._form), self._held[:at]))
        self._held = self._held[at + len(self._form.middle) :]
        self._object = _ObjectEnd()
        self._state = self._arguments
        return True

    def _arguments(self, events: list[Event]) -> bool:
        end = self._object.find(self._held)
        if self._held:
            events.append(CallArguments(self.calls, self._held[:end]))
        if end is None:
            self._held = ""
            return False
        self._held = self._held[end:]
        self.calls += 1
        self._state = self._after
        return True

    def _after(self, events: list[Event]) -> bool:
        if self._held.startswith(self._again):
            self._held = self._held[len(self._again) :]
            self._begun = self._form.again.lstrip(MARGIN)
            self._state = self._name
            return True
        if self._again.startswith(self._held) or (self._form.after + self._form.close).startswith(self._held):
            return False
        self._held = self._held.removeprefix(self._form.after).removeprefix(self._form.close)
        self._state = self._rest
        return True

    @staticmethod
    def _give(events: list[Event], text: str) -> None:
        if text:
            events.append(Text(text))


def _overlap(text: str, pattern: str) -> int:
    """The length of the longest end of `text` that begins `pattern`."""
    return next((n for n in range(min(len(text), len(pattern) - 1), 0, -1) if text.endswith(pattern[:n])), 0)


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, piece: str) -> int | None:
        """How much of `piece` still belongs to the object; None if all of it does and more will come."""
        for at, character in enumerate(piece):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = character == "\\"
                self._in_string = character != '"'
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at + 1
        return None


_ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


def new_call_id(form: CallForm) -> str:
    """An id for a call, of the kind that `form`'s templates take."""
    if form.id_length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(_ALPHABET) for _ in range(form.id_length))
