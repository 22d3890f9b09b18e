"""Stop strings: nothing leaks, nothing is lost, and the cuts between deltas do not matter."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.stop import StopChecker


def naive(text: str, stop: list[str], include: bool) -> tuple[str, str | None]:
    """Look at every end from the left, and there at every beginning from the left."""
    for end in range(1, len(text) + 1):
        for begin in range(end):
            if text[begin:end] in stop:
                return text[: end if include else begin], text[begin:end]
    return text, None


def stream(deltas: list[str], stop: list[str], include: bool = False) -> tuple[list[str], str | None]:
    checker = StopChecker(stop, include)
    released = []
    for delta in deltas:
        text, matched = checker.push(delta)
        released.append(text)
        if matched is not None:
            return [*released, checker.flush()], matched
    return [*released, checker.flush()], None


def cut(text: str, places: list[int]) -> list[str]:
    edges = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in pairwise(edges)]


few_letters = st.text(alphabet="ABCé", max_size=24)


@given(
    few_letters,
    st.lists(st.text(alphabet="ABCé", min_size=1, max_size=5), max_size=4),
    st.booleans(),
    st.lists(st.integers(0, 100), max_size=6),
)
def test_any_cut_gives_what_looking_at_the_whole_text_gives(
    text: str, stop: list[str], include: bool, places: list[int]
) -> None:
    released, matched = stream(cut(text, places), stop, include)
    assert ("".join(released), matched) == naive(text, stop, include)


@given(few_letters, st.lists(st.text(alphabet="ABCé", min_size=1, max_size=5), min_size=1, max_size=3))
def test_only_what_could_begin_a_stop_string_is_held_back(text: str, stop: list[str]) -> None:
    checker = StopChecker(stop)
    released = ""
    for i, character in enumerate(text):
        more, matched = checker.push(character)
        released += more
        if matched is not None:
            return
        seen = text[: i + 1]
        held = max((k for s in stop for k in range(1, len(s)) if seen.endswith(s[:k])), default=0)
        assert released == seen[: len(seen) - held]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 12])
def test_a_stop_string_over_many_deltas_never_leaks(size: int) -> None:
    text = "ABCDEFGHIJKL"
    deltas = [text[i : i + size] for i in range(0, len(text), size)]
    released, matched = stream(deltas, ["DEFGHIJ"])
    assert ("".join(released), matched) == ("ABC", "DEFGHIJ")
    assert "".join(stream(deltas, ["DEFGHIJ"], include=True)[0]) == "ABCDEFGHIJ"


def test_of_two_stop_strings_that_begin_alike_the_one_completed_first_wins() -> None:
    assert stream(["xABC"], ["ABC", "AB"]) == (["x", ""], "AB")
    assert stream(["xAB", "D"], ["ABC", "B"]) == (["xA", ""], "B")


def test_of_two_completed_by_one_character_the_earlier_beginning_wins() -> None:
    assert stream(["xABC"], ["C", "ABC", "BC"]) == (["x", ""], "ABC")


def test_a_false_alarm_is_released_as_soon_as_it_is_one() -> None:
    checker = StopChecker(["ABABAC"])
    assert checker.push("ABABA") == ("", None)
    assert checker.push("B") == ("AB", None)
    assert checker.push("AC") == ("", "ABABAC")


def test_held_back_text_comes_out_at_the_end() -> None:
    checker = StopChecker(["END"])
    assert checker.push("the EN") == ("the ", None)
    assert checker.flush() == "EN"
    assert checker.flush() == ""


def test_without_stop_strings_everything_passes() -> None:
    checker = StopChecker([])
    assert checker.push("text") == ("text", None)


def test_nothing_is_released_after_a_match() -> None:
    checker = StopChecker(["b"])
    assert checker.push("abc") == ("a", "b")
    assert checker.push("more") == ("", "b")
    assert checker.flush() == ""


def test_a_string_completed_before_min_tokens_does_not_count_but_one_begun_there_does() -> None:
    checker = StopChecker(["ABA"])
    assert checker.push("ABA", armed=False) == ("AB", None)
    assert checker.push("BA") == ("", "ABA")
    assert checker.push("x") == ("", "ABA")
