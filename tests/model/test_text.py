"""Forced answers become text: streamed pieces equal the whole, stop strings neither leak nor eat anything.

The tokens are forced through the sampler, so that every step of the real engine runs: schedule, model, cache,
detokenizer, stop strings, snapshots.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from octavo import LLM, SamplingParams
from octavo.engine import Engine
from octavo.errors import OctavoError
from octavo.live import LiveRequest
from octavo.outputs import CompletionOutput
from octavo.sample import Choice, Logits, Sampled, Sampler
from support.engines import greedy
from support.sizes import sized

TEXT = "ABCDEFGHIJKL"
UNICODE = {
    "emoji with joiners": "a👩‍👩‍👧‍👦b👨🏽‍🚒🏳️‍🌈",
    "Thai": "ภาษาไทยที่น่ารัก ก็ดี",
    "flags": "🇫🇷🇯🇵🇧🇷x🇺🇳",
    "combining": "e\u0301a\u0308\u0323 n\u0303",
    "many scripts": "naïve Ελλάδα 日本語 한국어 العربية हिन्दी 𝕏𝄞",
    "white space": "  a \n\n\t b  \r\n c   ",
    "replacement characters": "x\ufffdy\ufffd\ufffd",
}


class Forced(Sampler):
    """Draws the given tokens of choice i, whatever the logits say."""

    def __init__(self, scripts: Sequence[Sequence[int]]) -> None:
        super().__init__(())
        self._scripts = scripts

    def sample(self, logits: Logits, choices: Sequence[Choice]) -> list[Sampled | OctavoError]:
        forced = np.full_like(logits, -1e4)
        for row, choice in zip(forced, choices, strict=True):
            row[self._scripts[choice.index][choice.new_tokens]] = 0
        return super().sample(forced, choices)


@contextmanager
def forcing(engine: Engine, *scripts: Sequence[int]) -> Iterator[None]:
    honest = engine._sampler
    engine._sampler = Forced(scripts)
    try:
        yield
    finally:
        engine._sampler = honest


def stream(engine: Engine, params: SamplingParams, *scripts: Sequence[int]) -> list[list[CompletionOutput]]:
    """Snapshots by choice, one per step, of a request whose choices emit `scripts`."""
    with forcing(engine, *scripts):
        live: LiveRequest = engine.prepare("forced", [65], params)
        engine.submit(live)
        snapshots: list[list[CompletionOutput]] = [[] for _ in scripts]
        while engine.has_work:
            for touched in engine.step():
                for choice, output in enumerate(touched.output().outputs):
                    snapshots[choice].append(output)
    assert live.finished
    engine.check()
    return snapshots


def expected_text(text: str, stops: Sequence[str], include: bool = False) -> tuple[str, str | None]:
    """The slow way: the stop string completed first wins, and of those completed together the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def check_stream(
    snapshots: list[CompletionOutput], text: str, stops: Sequence[str], include: bool = False
) -> None:
    """Snapshots only grow, end at the expected text, and show nothing beyond it on the way."""
    expected, stop = expected_text(text, stops, include)
    shown = ""
    for snapshot in snapshots:
        assert snapshot.text.startswith(shown)
        shown = snapshot.text
        assert expected.startswith(shown)
    last = snapshots[-1]
    assert last.text == expected
    assert (last.stop_reason, last.finish_reason) == (stop, "length" if stop is None else "stop")


@pytest.fixture(scope="module", params=["bytes", pytest.param("smollm2", marks=pytest.mark.model)])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny model with a token per byte, and SmolLM2 with its own tokens."""
    if request.param == "smollm2":
        llm: LLM = request.getfixturevalue("smollm2_bf16")
        yield llm.engine
        return
    tiny: Callable[[str], Any] = request.getfixturevalue("tiny")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_HOME", str(tmp_path_factory.mktemp("home")))
        with LLM(str(tiny("llama")), kv_cache_memory="8MiB") as llm:
            yield llm.engine


def scripts_of(engine: Engine, text: str) -> list[list[int]]:
    """Ways to say `text` in tokens: as the tokenizer would, and character by character."""
    encode = engine.tokenizer.encode
    letters = [token for letter in text for token in encode(letter, False)]
    ways = [encode(text, False), letters]
    faithful = [ids for ids in ways if engine.tokenizer.decode(ids) == text]
    assert faithful
    return faithful


STOPS = {
    "the issue's": ["DEFGHIJ"],
    "none": [],
    "first of two": ["FGH", "BCDX"],
    "prefixes of each other": ["DE", "DEF", "DEFG"],
    "longest alone": ["DEFGHIJKLM", "DEFGHIJK"],
    "same end": ["GHI", "EFGHI", "I"],
    "false alarm": ["DEFGHIX", "KLM"],
    "false alarm, then a match inside it": ["CDEFX", "DEFG"],
    "at the very start": ["ABC"],
    "all of it": [TEXT],
    "the last character": ["L"],
    "longer than the answer": [TEXT + "M"],
}


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS.keys())
@pytest.mark.parametrize("include", [False, True], ids=["cut off", "included"])
def test_stop_strings(stops: list[str], include: bool, engine: Engine) -> None:
    for script in scripts_of(engine, TEXT):
        params = greedy(len(script), stop=stops, include_stop_str_in_output=include)
        [snapshots] = stream(engine, params, script)
        check_stream(snapshots, TEXT, stops, include)


@pytest.mark.parametrize("cut", range(1, len(TEXT) + 1))
def test_max_tokens_while_text_is_held_back(cut: int, engine: Engine) -> None:
    letters = [token for letter in TEXT for token in engine.tokenizer.encode(letter, False)]
    assert len(letters) == len(TEXT)
    [snapshots] = stream(engine, greedy(cut, stop=["DEFGHIJ"]), letters)
    check_stream(snapshots, TEXT[:cut], ["DEFGHIJ"])


def test_generation_ends_with_the_token_that_completes_the_stop_string(engine: Engine) -> None:
    letters = [token for letter in TEXT for token in engine.tokenizer.encode(letter, False)]
    [snapshots] = stream(engine, greedy(len(letters), stop=["DEFGHIJ"]), letters)
    assert snapshots[-1].token_ids == letters[: TEXT.index("J") + 1]
    assert [snapshot.text for snapshot in snapshots] == ["A", "AB", *["ABC"] * 8]


def test_a_stop_string_before_min_tokens_does_not_count(engine: Engine) -> None:
    letters = [token for letter in TEXT for token in engine.tokenizer.encode(letter, False)]
    [snapshots] = stream(engine, greedy(len(letters), stop=["BC", "HI"], min_tokens=5), letters)
    assert snapshots[-1].text == "ABCDEFG"


@pytest.mark.parametrize("text", UNICODE.values(), ids=UNICODE.keys())
def test_no_character_is_split_or_lost(text: str, engine: Engine) -> None:
    for script in scripts_of(engine, text):
        [snapshots] = stream(engine, greedy(len(script)), script)
        check_stream(snapshots, text, [])
        if "\ufffd" not in text:
            assert not any("\ufffd" in snapshot.text for snapshot in snapshots)
        chunks = [b.text[len(a.text) :] for a, b in pairwise(snapshots)]
        joined = snapshots[0].text.encode() + b"".join(chunk.encode() for chunk in chunks)
        assert joined == engine.tokenizer.decode(script).encode()


@pytest.mark.parametrize("text", UNICODE.values(), ids=UNICODE.keys())
def test_stop_strings_of_many_bytes(text: str, engine: Engine) -> None:
    middle = len(text) // 2
    for stops in ([text[middle]], [text[middle : middle + 3]], [text[middle:] + "!"], [text[-1]]):
        for script in scripts_of(engine, text):
            [snapshots] = stream(engine, greedy(len(script), stop=stops), script)
            check_stream(snapshots, text, stops)


@pytest.mark.parametrize("text", [UNICODE["emoji with joiners"], UNICODE["Thai"]], ids=["emoji", "Thai"])
def test_an_answer_cut_inside_a_character_shows_what_the_tokenizer_shows(text: str, engine: Engine) -> None:
    script = [token for letter in text for token in engine.tokenizer.encode(letter, False)]
    for cut in range(1, min(len(script), 24), sized(3, 1)):
        [snapshots] = stream(engine, greedy(cut), script)
        assert snapshots[-1].text == engine.tokenizer.decode(script[:cut])
        assert all(snapshots[-1].text.startswith(snapshot.text) for snapshot in snapshots[:-1])
        assert not any(snapshot.text.endswith("\ufffd") for snapshot in snapshots[:-1])


def test_choices_stream_on_their_own(engine: Engine) -> None:
    other = "XYZDEFGHIJ!!"
    scripts = [
        [token for letter in text for token in engine.tokenizer.encode(letter, False)]
        for text in (TEXT, other)
    ]
    streams = stream(engine, greedy(len(TEXT), n=2, stop=["EFG!", "KL"]), *scripts)
    for snapshots, text in zip(streams, (TEXT, other), strict=True):
        check_stream(snapshots, text, ["EFG!", "KL"])


def test_an_end_token_gives_up_what_was_held_back(engine: Engine) -> None:
    end = engine.tokenizer.eos_token_ids[0]
    script = [*(token for letter in "ABCDEF" for token in engine.tokenizer.encode(letter, False)), end]
    [snapshots] = stream(engine, greedy(20, stop=["DEFGHIJ"], ignore_eos=False), script)
    last = snapshots[-1]
    assert (last.text, last.finish_reason, last.stop_reason) == ("ABCDEF", "stop", None)
    assert last.token_ids == script
