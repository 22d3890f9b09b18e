"""Answers of a form: they have it, whatever else was asked for, and do not depend on cache, company or schedule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig

from octavo.engine import Engine
from octavo.errors import InvalidRequest
from octavo.params import SamplingParams, StructuredOutputs
from support.engines import Answer, Request, alone, answers, finish, make_engine, submit, together
from support.sizes import sized
from support.tiny import BASE, save_tiny
from unit.model_builders import save_model

END = 257
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "integer", "minimum": 0, "maximum": 999},
        "b": {"enum": ["x", "yy", None]},
        "c": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        "d": {"type": "string", "pattern": "^[a-f]{1,9}$"},
    },
    "required": ["a", "b", "c", "d"],
    "additionalProperties": False,
}
FORMS: dict[str, tuple[StructuredOutputs, Callable[[str], bool]]] = {
    "choice": (
        StructuredOutputs(choice=["yes", "no", "may-be (so)", "ünklar"]),
        lambda text: text in ("yes", "no", "may-be (so)", "ünklar"),
    ),
    "regex": (
        StructuredOutputs(regex=r"[0-9]{3}-[a-cä]{1,12}"),
        lambda text: re.fullmatch(r"[0-9]{3}-[a-cä]{1,12}", text) is not None,
    ),
    "schema": (
        StructuredOutputs(json_schema=SCHEMA),
        lambda text: jsonschema_rs.is_valid(SCHEMA, json.loads(text)),
    ),
    "grammar": (
        StructuredOutputs(grammar='start: "(" item{1,4} ")"\nitem: /[xy]/ | "<" /[0-9]{2}/ ">"'),
        lambda text: re.fullmatch(r"\(([xy]|<[0-9]{2}>){1,4}\)", text) is not None,
    ),
}
PROMPT = [5, 80, 200, 33, 7]


def form(name: str, max_tokens: int = 200, **options: Any) -> SamplingParams:
    return SamplingParams(
        **{
            "structured_outputs": FORMS[name][0],
            "max_tokens": max_tokens,
            "seed": 1,
            "logprobs": 2,
            **options,
        }
    )


def forms(count: int) -> list[Request]:
    """All forms in turn, and requests without one; greedy and sampled, with penalties, one and several answers."""
    names = [*FORMS, None]
    requests = []
    for i in range(count):
        name = names[i % len(names)]
        options: dict[str, Any] = {"temperature": (0.0, 1.0, 1.5)[i % 3], "seed": i, "n": (1, 1, 3)[i % 3]}
        if i % 2:
            options |= {"repetition_penalty": 1.2, "presence_penalty": 0.5}
        params = (
            SamplingParams(max_tokens=40, logprobs=2, **options) if name is None else form(name, **options)
        )
        requests.append(([(7 * i + j) % 256 for j in range(5 + 11 * i % 60)], params))
    return requests


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_an_answer_has_its_form_and_ends_with_it(
    name: str, temperature: float, single_of: Callable[..., Engine]
) -> None:
    requests = [(PROMPT, form(name, temperature=temperature, seed=s, n=2)) for s in range(sized(3, 60))]
    for answer in [a for both in together(single_of("llama"), requests) for a in both]:
        assert answer.finish_reason == "stop"
        assert FORMS[name][1](answer.text), answer.text


def test_any_object_is_an_object(single_of: Callable[..., Engine]) -> None:
    params = SamplingParams(
        structured_outputs=StructuredOutputs(json_object=True),
        max_tokens=400,
        n=8,
        seed=4,
        logit_bias={ord("}") - 33: 12},
    )
    found = together(single_of("llama"), [(PROMPT, params)])[0]
    ended = [answer for answer in found if answer.finish_reason == "stop"]
    assert ended
    assert all(isinstance(json.loads(answer.text), dict) for answer in ended)


@pytest.mark.parametrize(
    "settings_",
    [
        {"max_num_batched_tokens": 5},
        {"max_num_seqs": 3},
        {"kv_cache_memory": "96KiB"},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_the_schedule_changes_nothing(settings_: dict[str, Any], single_of: Callable[..., Engine]) -> None:
    """Alone, together, in chunks, and under so little memory that requests are preempted and resumed."""
    requests = forms(sized(10, 60))
    expected = alone(single_of("llama", dtype="float32"), requests)
    engine = single_of("llama", dtype="float32", poison=True, **settings_)
    assert together(engine, requests) == expected
    assert together(engine, requests) == expected
    assert bool(engine.totals().preemptions) == ("kv_cache_memory" in settings_)


def test_asked_to_be_preempted_at_every_step(single_of: Callable[..., Engine]) -> None:
    requests = forms(5)
    expected = alone(single_of("llama"), requests)
    engine = single_of("llama")
    lives = [submit(engine, f"r{i}", request) for i, request in enumerate(requests)]
    while engine.has_work:
        engine.step()
        for sequence in list(engine.scheduler.running)[engine.steps % 2 :: 2]:
            engine.scheduler.preempt(sequence)
    assert [answers(live.output()) for live in lives] == expected
    assert engine.totals().preemptions > 20


def test_a_step_that_fails_is_repeated(
    single_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = forms(5)
    expected = alone(single_of("llama"), requests)
    engine = single_of("llama")
    lives = [submit(engine, f"r{i}", request) for i, request in enumerate(requests)]
    sample = engine._sampler.sample
    failed = 0

    def sometimes(*args: Any) -> Any:
        nonlocal failed
        found = sample(*args)
        if engine.steps % 3 == failed % 3:
            failed += 1
            raise ZeroDivisionError("by design, after the forms were looked at")
        return found

    monkeypatch.setattr(engine._sampler, "sample", sometimes)
    while engine.has_work:
        try:
            engine.step()
        except ZeroDivisionError:
            continue
    assert failed > 5
    assert [answers(live.output()) for live in lives] == expected


@pytest.mark.parametrize("name", FORMS)
def test_the_first_of_several_is_the_only_one(name: str, single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama")
    (one,), several = together(engine, [(PROMPT, form(name)), (PROMPT, form(name, n=4))])
    assert several[0] == one
    assert name == "choice" or len({answer.text for answer in several}) > 1


def test_logprobs_are_those_of_the_raw_logits(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama")
    every = SamplingParams(max_tokens=1, logprobs=-1, temperature=0.0, ignore_eos=True)
    free = together(engine, [(PROMPT, every)])[0][0].logprobs[0]
    bound = together(engine, [(PROMPT, form("choice", logprobs=-1))])[0][0].logprobs[0]
    assert sorted(free) == sorted(bound)
    assert (
        bound[0][2] > 1
    )  # the first entry is the sampled token; the form made it one that is not the likeliest


def test_a_limit_cuts_the_form(single_of: Callable[..., Engine]) -> None:
    (answer,) = together(single_of("llama"), [(PROMPT, form("schema", max_tokens=4))])[0]
    assert (answer.finish_reason, len(answer.token_ids)) == ("length", 4)
    # Complete with the very last token: the form wins.
    (answer,) = together(
        single_of("llama"), [(PROMPT, SamplingParams(max_tokens=3, structured_outputs=ABC))]
    )[0]
    assert (answer.finish_reason, answer.text) == ("stop", "abc")


ABC = StructuredOutputs(choice=["abc"])


def test_no_end_token_is_needed(single_of: Callable[..., Engine]) -> None:
    """A complete form ends the answer by itself; where it may go on or end, the end token decides."""
    engine = single_of("llama")
    (answer,) = together(engine, [(PROMPT, SamplingParams(structured_outputs=ABC))])[0]
    assert bytes(answer.text, "ascii") == b"abc"
    assert END not in answer.token_ids
    more = SamplingParams(
        structured_outputs=StructuredOutputs(regex="abc*"), logit_bias={END: 100}, max_tokens=50, seed=0
    )
    (answer,) = together(engine, [(PROMPT, more)])[0]
    assert (answer.text, answer.token_ids[-1], answer.finish_reason) == ("ab", END, "stop")


def test_ignore_eos_goes_on_while_the_form_can(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama")
    endless, bounded = (StructuredOutputs(regex=regex) for regex in ("abc*", "abc{0,7}"))
    own = {"ignore_eos": True, "logit_bias": {END: 100}, "max_tokens": 30}
    found = together(
        engine, [(PROMPT, SamplingParams(structured_outputs=f, **own)) for f in (endless, bounded)]
    )
    assert [(a.text, a.finish_reason) for (a,) in found] == [
        ("ab" + 28 * "c", "length"),
        ("abccccccc", "stop"),
    ]


def test_min_tokens_hold(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama")
    own = SamplingParams(
        structured_outputs=StructuredOutputs(regex="a{1,9}"),
        min_tokens=6,
        max_tokens=20,
        logit_bias={END: 100},
    )
    (answer,) = together(engine, [(PROMPT, own)])[0]
    assert answer.text == "aaaaaa"
    live = submit(engine, "a", (PROMPT, SamplingParams(structured_outputs=ABC, min_tokens=4)))
    finish(engine)
    assert isinstance(live.error, InvalidRequest)
    assert live.error.param == "structured_outputs"
    assert "min_tokens" in live.error.message


def test_a_form_and_a_mask_that_share_nothing_fail_that_request_only(
    single_of: Callable[..., Engine],
) -> None:
    engine = single_of("llama")
    lives = [
        submit(engine, "bad", (PROMPT, form("choice", allowed_token_ids=[1, 2]))),
        submit(engine, "good", (PROMPT, form("choice"))),
    ]
    finish(engine)
    assert isinstance(lives[0].error, InvalidRequest)
    assert "structured_outputs, allowed_token_ids" in lives[0].error.message
    assert answers(lives[1].output()) == together(engine, [(PROMPT, form("choice"))])[0]


def test_stop_strings_and_bias_work_inside_a_form(single_of: Callable[..., Engine]) -> None:
    engine = single_of("llama")
    own = {"structured_outputs": StructuredOutputs(regex="[ab]{9}x[ab]{5}"), "max_tokens": 30, "seed": 2}
    stopped, biased = together(
        engine,
        [
            (PROMPT, SamplingParams(stop=["x"], **own)),
            (PROMPT, SamplingParams(logit_bias={ord("a") - 33: 100}, **own)),
        ],
    )
    assert re.fullmatch("[ab]{9}", stopped[0].text)
    assert stopped[0].finish_reason == "stop"
    assert biased[0].text == "aaaaaaaaaxaaaaa"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"regex": "a("}, "regex parse error"),
        ({"regex": "a(?=b)"}, "look-around"),
        ({"grammar": "start: missing"}, "missing"),
        ({"grammar": ""}, "structured_outputs cannot be compiled"),
        ({"json_schema": {"type": "nothing"}}, "nothing"),
        ({"json_schema": {"$ref": "http://example.org/schema"}}, "structured_outputs cannot be compiled"),
        ({"json_schema": {"type": "array", "uniqueItems": True}}, "uniqueItems"),
    ],
)
def test_what_cannot_be_compiled_is_refused_at_the_door(
    wanted: dict[str, Any], message: str, single_of: Callable[..., Engine]
) -> None:
    engine = single_of("llama")
    with pytest.raises(InvalidRequest, match=message) as error:
        engine.prepare("a", PROMPT, SamplingParams(structured_outputs=StructuredOutputs(**wanted)))
    assert error.value.param == "structured_outputs"
    assert not engine.has_work


def test_a_form_that_grows_too_complex_fails_that_request_only(
    single_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own limits, in the middle of an answer."""
    engine = single_of("llama")
    (expected,) = together(engine, [(PROMPT, form("schema"))])
    good = submit(engine, "good", (PROMPT, form("schema")))
    monkeypatch.setattr("octavo.guard.STEP_MAX_ITEMS", 300)
    ambiguous = StructuredOutputs(grammar='start: s\ns: s s | s s s | "a" | ""')
    own = SamplingParams(structured_outputs=ambiguous, max_tokens=300, ignore_eos=True)
    bad = submit(engine, "bad", (PROMPT, own))
    finish(engine)
    assert answers(good.output()) == expected
    assert isinstance(bad.error, InvalidRequest)
    assert "structured_outputs cannot be followed any further" in bad.error.message
    assert 2 < len(bad.output().outputs[0].token_ids) < 300


def test_a_model_without_tokenizer_says_so(tmp_path: Path, single_of: Callable[..., Engine]) -> None:
    directory = save_tiny("llama", tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (directory / name).unlink()
    engine = make_engine(directory, num_threads=1)
    with pytest.raises(InvalidRequest, match="structured_outputs needs a tokenizer"):
        engine.prepare("a", PROMPT, form("choice"))
    (answer,) = together(engine, [(PROMPT, SamplingParams(max_tokens=3))])[0]
    assert len(answer.token_ids) == 3


def test_a_model_without_end_token_says_so(tmp_path: Path) -> None:
    directory = save_model(LlamaConfig(**BASE), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(directory)
    engine = make_engine(directory, num_threads=1)
    assert not engine.tokenizer.eos_token_ids
    with pytest.raises(InvalidRequest, match="structured_outputs needs an end token"):
        engine.prepare("a", PROMPT, form("choice"))


LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 7}, {"enum": ["ä", "b", 1, None]}]),
    st.integers(-50, 50).map(lambda low: {"type": "integer", "minimum": low, "maximum": low + 40}),
    st.integers(0, 4).map(lambda low: {"type": "string", "minLength": low, "maxLength": low + 3}),
    st.sampled_from(["^[a-c]{1,4}$", "^x?y{2}$"]).map(lambda pattern: {"type": "string", "pattern": pattern}),
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(
            lambda items, low: {"type": "array", "items": items, "minItems": low, "maxItems": low + 2},
            inner,
            st.integers(0, 2),
        ),
        st.builds(
            lambda properties, required: {
                "type": "object",
                "properties": properties,
                "required": sorted(set(properties) & required),
                "additionalProperties": False,
            },
            st.dictionaries(st.sampled_from(["a", "b", "ünd", "d e"]), inner, max_size=3),
            st.sets(st.sampled_from(["a", "b", "ünd", "d e"])),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return make_engine(save_tiny("llama", tmp_path_factory.mktemp("tiny")), num_threads=1)


@settings(max_examples=sized(40, 2000), deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_answers_are_valid_for_the_schema_by_another_validator(
    schema: dict[str, Any], seed: int, engine: Engine
) -> None:
    wanted = StructuredOutputs(json_schema=schema)
    params = SamplingParams(structured_outputs=wanted, max_tokens=600, seed=seed, n=2, temperature=1.2)
    found: list[Answer] = together(engine, [(PROMPT, params)])[0]
    for answer in found:
        if answer.finish_reason == "stop":
            assert jsonschema_rs.is_valid(schema, json.loads(answer.text)), (schema, answer.text)
        else:
            assert len(answer.token_ids) == 600
