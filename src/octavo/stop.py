"""Stop strings in a stream of text. Knows no tokens: it sees characters, one after the other.

Each stop string has a Knuth-Morris-Pratt automaton whose state is the length of its longest beginning that
the text so far ends with. What the longest of these states covers is held back; all before it can never be
part of a match. Since automata read single characters, how the text is cut into deltas changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Automaton:
    """Recognises one string; `state` characters of it are matched."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.state = 0
        # _shorter[i]: the longest proper beginning of pattern[:i] that is also its end.
        self._shorter = [0] * (len(pattern) + 1)
        border = 0
        for i in range(1, len(pattern)):
            while border and pattern[i] != pattern[border]:
                border = self._shorter[border]
            border += pattern[i] == pattern[border]
            self._shorter[i + 1] = border

    def feed(self, character: str) -> bool:
        """True if the text now ends with the pattern."""
        if self.state == len(self.pattern):
            self.state = self._shorter[self.state]
        while self.state and character != self.pattern[self.state]:
            self.state = self._shorter[self.state]
        self.state += character == self.pattern[self.state]
        return self.state == len(self.pattern)

    @property
    def pending(self) -> int:
        """How many of the last characters could still become a match."""
        return self._shorter[self.state] if self.state == len(self.pattern) else self.state


class StopChecker:
    """Finds the first stop string in a text and holds back what might belong to one.

    The match that is completed first wins; of those completed by the same character the one that begins
    first. `matched` is the stop string found, or None.
    """

    def __init__(self, stop: Sequence[str], include_stop_str_in_output: bool = False) -> None:
        self._automata = [_Automaton(pattern) for pattern in dict.fromkeys(stop)]
        self._include = include_stop_str_in_output
        self._held = ""
        self.matched: str | None = None

    def push(self, delta: str, armed: bool = True) -> tuple[str, str | None]:
        """The text that may be released after `delta`, and the stop string completed in it, or None.

        With `armed=False` (before `min_tokens`) a string completed in this delta does not count; one that
        only begins in it does. After a match the text is at its end: nothing more is released.
        """
        if self.matched is not None:
            return "", self.matched
        if not self._automata:
            return delta, None
        text = self._held + delta
        for end in range(len(self._held) + 1, len(text) + 1):
            complete = [automaton.pattern for automaton in self._automata if automaton.feed(text[end - 1])]
            if complete and armed:
                self.matched = max(complete, key=len)
                self._held = ""
                return text[: end if self._include else end - len(self.matched)], self.matched
        released = len(text) - max(automaton.pending for automaton in self._automata)
        self._held = text[released:]
        return text[:released], None

    def flush(self) -> str:
        """What is still held back; no more text comes, so it is no stop string."""
        held, self._held = self._held, ""
        return held
