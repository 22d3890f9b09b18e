"""Tool calls: the grammar lets exactly the written form through, and the reader takes it apart however it is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

from octavo.errors import InvalidRequest
from octavo.server.openai.calls import CallArguments, CallBegins, CallReader, Event, Text
from octavo.server.openai.tools import (
    HERMES,
    LLAMA,
    MISTRAL_NAMED,
    CallForm,
    Function,
    Rules,
    form_of,
    grammar,
)
from support.sizes import sized
from unit.model_builders import byte_tokenizer

MISTRAL = form_of("tools [TOOL_CALLS] [")
assert MISTRAL is not None
LOOSE = settings(deadline=None, max_examples=sized(25, 2000), derandomize=True, database=None)
FORMS = {"hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "mistral, named": MISTRAL_NAMED}
SPECIAL = {"</s>": 257}
WEATHER = Function(
    "weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    strict=True,
)
FUNCTIONS = [WEATHER, Function("now", None, strict=False)]


def written(form: CallForm, calls: list[tuple[str, str]]) -> str:
    body = "".join(
        (form.again if i else form.opening) + name + form.middle + arguments + form.after
        for i, (name, arguments) in enumerate(calls)
    )
    return body + form.close


def read(form: CallForm, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls, put together from what the reader says."""
    reader = CallReader(form)
    events: list[Event] = []
    for piece in pieces:
        events += reader.feed(piece)
    return put_together(events + reader.finish())


def put_together(events: list[Event]) -> tuple[str, list[tuple[str, str]]]:
    text, names, arguments = "", [], []
    for event in events:
        if isinstance(event, Text):
            text += event.text
        elif isinstance(event, CallBegins):
            assert event.index == len(names)
            names.append(event.name)
            arguments.append("")
        else:
            assert isinstance(event, CallArguments)
            arguments[event.index] += event.text
    return text, list(zip(names, arguments, strict=True))


def cut(data: st.DataObject, text: str) -> list[str]:
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.sampled_from('ab"\\{}[]<>é\n'), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
CALLS = st.lists(
    st.tuples(
        st.from_regex(r"[a-zA-Z0-9_-]{1,12}", fullmatch=True),
        st.dictionaries(st.text(max_size=5), VALUES, max_size=3).map(json.dumps),
    ),
    max_size=3,
)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@LOOSE
@given(data=st.data())
def test_calls_are_read_however_the_text_is_cut(form: CallForm, data: st.DataObject) -> None:
    calls = data.draw(CALLS)
    said = data.draw(st.sampled_from(["", "Well.", "a < b\n", "x <tool_", "[TOOL"])) if form.marker else ""
    text = said + (written(form, calls) if calls else "")
    wanted = said.rstrip() if calls else said
    assert read(form, cut(data, text)) == (wanted, calls)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@LOOSE
@given(data=st.data())
def test_an_answer_cut_off_anywhere_reads_the_same_however_it_is_cut(
    form: CallForm, data: st.DataObject
) -> None:
    calls = data.draw(CALLS)
    text = ("Well. " if form.marker else "") + written(form, calls or [("f", "{}")])
    text = text[: data.draw(st.integers(0, len(text)))]
    assert read(form, cut(data, text)) == read(form, [text])


@LOOSE
@given(text=st.text(st.sampled_from('<tol_ca>{"name: }\n[]'), max_size=40), data=st.data())
def test_text_without_calls_is_given_whole(text: str, data: st.DataObject) -> None:
    for form in FORMS.values():
        if form.opening not in text:
            assert read(form, cut(data, text)) == (text, [])


@LOOSE
@given(text=st.text(max_size=60), data=st.data())
def test_a_piece_is_given_as_soon_as_it_can_be_no_call(text: str, data: st.DataObject) -> None:
    reader = CallReader(HERMES)
    given_out = "".join(e.text for e in reader.feed(text) if isinstance(e, Text))
    held = text[len(given_out) :]
    assert text.startswith(given_out)
    assert HERMES.opening.startswith(held.lstrip(" \t\r\n"))


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ tools }} <tool_call>", HERMES),
        ("{{ tools }} <tool_call><function=", None),
        ("{{ tools }} [TOOL_CALLS] [ARGS]", MISTRAL_NAMED),
        ('{{ tools }} ipython "parameters"', LLAMA),
        ("{{ tools }}", None),
        ("<tool_call>", None),
        (None, None),
    ],
)
def test_the_form_follows_from_what_the_template_mentions(
    template: str | None, form: CallForm | None
) -> None:
    assert form_of(template) == form


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer(prepend_bos=False)


@pytest.fixture(scope="module")
def guide(tokenizer: Any) -> Any:
    return from_tokenizer(tokenizer, eos_token=257)


def accepts(guide: Any, tokenizer: Any, lark: str, text: str) -> str:
    """`all`, `part` where more must follow, or `no`."""
    matcher = LLMatcher(guide, LLMatcher.grammar_from_lark(lark))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False)
    if matcher.try_consume_tokens(ids) < len(ids):
        return "no"
    return "all" if matcher.is_accepting() else "part"


AUTO, REQUIRED, NONE = Rules("auto", True), Rules("required", True), Rules("none", True)
ONE = Rules("auto", False)
JSON_TEXT = Rules(
    "auto", True, {"type": "object", "properties": {"z": {"type": "integer"}}, "required": ["z"]}
)
ONE_CALL = [("weather", '{"city": "Rome", "days": 3}')]
TWO_CALLS = [*ONE_CALL, ("now", "{}")]


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_the_grammar_lets_calls_and_text_through(guide: Any, tokenizer: Any, form: CallForm) -> None:
    def found(rules: Rules, text: str) -> str:
        return accepts(guide, tokenizer, grammar(form, FUNCTIONS, rules, SPECIAL), text)

    for rules in (AUTO, REQUIRED):
        assert found(rules, written(form, ONE_CALL)) == "all"
        assert found(rules, written(form, TWO_CALLS)) == "all"
        for wrong in (
            [("sun", "{}")],
            [("weather", "{}")],
            [("weather", '{"city": 5}')],
            [("now", '{"a": 1}')],
        ):
            assert found(rules, written(form, wrong)) == "no"
    assert found(AUTO, "Nothing to call.") == "all"
    assert found(REQUIRED, "Nothing to call.") == "no"
    assert found(ONE, written(form, ONE_CALL)) == "all"
    assert found(ONE, written(form, TWO_CALLS)) == "no"
    if form.marker:
        assert found(AUTO, "Let me see. " + written(form, ONE_CALL)) == "all"
        assert found(NONE, "Let me see. " + written(form, ONE_CALL)) == "no"
        assert found(NONE, f"Let me see {form.marker[:-1]} and so on") == "all"
    assert found(JSON_TEXT, '{"z": 5}') == "all"
    assert found(JSON_TEXT, "five") == "no"
    assert found(JSON_TEXT, written(form, ONE_CALL)) == "all"


def test_a_marker_that_is_a_special_token_is_that_token(guide: Any, tokenizer: Any) -> None:
    form = replace(
        MISTRAL_NAMED, marker="</s>", opening="</s>", again="</s>"
    )  # the only special token here that is not BOS
    lark = grammar(form, FUNCTIONS, AUTO, SPECIAL)
    ids = [*tokenizer.encode("See: ", add_special_tokens=False), 257]
    ids += tokenizer.encode("now[ARGS]{}", add_special_tokens=False)
    matcher = LLMatcher(from_tokenizer(tokenizer, eos_token=256), LLMatcher.grammar_from_lark(lark))
    assert matcher.try_consume_tokens(ids) == len(ids)


def test_arguments_must_be_an_object() -> None:
    with pytest.raises(InvalidRequest, match=r"tools\[0\].function.parameters has type 'string'"):
        grammar(HERMES, [Function("f", {"type": "string"}, strict=False)], AUTO, {})


def test_what_the_grammar_makes_is_what_the_reader_takes(guide: Any, tokenizer: Any) -> None:
    """A model of random preferences, held to the grammar: only valid calls come out."""
    import random

    for seed in range(sized(3, 100)):
        chance = random.Random(seed)
        matcher = LLMatcher(guide, LLMatcher.grammar_from_lark(grammar(HERMES, FUNCTIONS, REQUIRED, SPECIAL)))
        ids: list[int] = []
        while not matcher.is_stopped() and len(ids) < 2000:
            mask = matcher.compute_bitmask()
            allowed = [t for t in range(258) if mask[t // 8] >> (t % 8) & 1]
            # Closing early keeps it short.
            best = [t for t in allowed if tokenizer.decode([t]) in '"}'] or allowed
            token = chance.choice(best if chance.random() < 0.7 else allowed)
            if token == 257:
                break
            ids.append(token)
            assert matcher.consume_token(token)
        text, calls = read(HERMES, [tokenizer.decode(ids)])
        assert text == ""
        assert calls
        for name, arguments in calls[: -1 if len(ids) == 2000 else None]:
            assert name in ("weather", "now")
            value = json.loads(arguments)
            assert isinstance(value.get("city"), str) if name == "weather" else value == {}
