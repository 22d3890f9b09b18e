"""Grammars that would end, stop or fill the process end another one."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from octavo.errors import InvalidRequest, OctavoError
from octavo.grammar import Grammars, _source
from octavo.guard import Guard
from octavo.model.tokenizer import Tokenizer
from octavo.params import StructuredOutputs
from support.sizes import sized
from unit.model_builders import VOCAB_SIZE, byte_tokenizer


def chain(count: int) -> str:
    """A schema of definitions that lead to each other, deeper than a stack."""
    definitions = {
        f"d{i}": {"properties": {f"a{j}": {"$ref": f"#/$defs/d{(7 * i + j) % count}"} for j in range(10)}}
        for i in range(count)
    }
    return json.dumps({"$defs": definitions, "$ref": "#/$defs/d0"})


HARMLESS = {
    "object": {"json_object": True},
    "wrong": {"regex": "a("},
    "special": {"grammar": 'start: "a" </s>'},
    "many": {"choice": [f"value {i}" for i in range(10_000)]},
    "deep": {"json_schema": '{"type": "array", "items":' * 50 + "{}" + "}" * 50},
    "long": {"json_schema": {"properties": {f"p{i}": {"type": "string"} for i in range(300)}}},
}
HARMFUL = {
    "recursion": {"json_schema": chain(3000)},
    "time": {"json_schema": {"type": "integer", "multipleOf": 9_999_999}},
    "properties": {"json_schema": {"properties": {f"p{i}": {} for i in range(sized(12_000, 40_000))}}},
}


@pytest.fixture(scope="module")
def guard() -> Guard:
    return Guard(["<s>", "</s>"])


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_grammars_survive_right_or_wrong(name: str, guard: Guard) -> None:
    before = guard._process
    assert guard.survives(_source(StructuredOutputs(**HARMLESS[name])))
    assert before is None or guard._process is before


@pytest.mark.parametrize("name", HARMFUL)
def test_harmful_ones_do_not_and_the_next_one_does(name: str, guard: Guard) -> None:
    assert not guard.survives(_source(StructuredOutputs(**HARMFUL[name])))
    assert guard.survives(_source(StructuredOutputs(regex="a")))


def test_the_process_ends_with_its_owner() -> None:
    guard = Guard([])
    assert guard.survives(_source(StructuredOutputs(regex="a")))
    process = guard._process
    assert process is not None
    del guard
    assert process.returncode is not None


def test_a_process_that_was_killed_is_started_again() -> None:
    guard = Guard([])
    source = _source(StructuredOutputs(regex="a"))
    assert guard.survives(source)
    assert guard._process is not None
    os.kill(guard._process.pid, 9)
    guard._process.wait()
    assert guard.survives(source)


def test_no_process_is_an_error_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(OctavoError, match="no more processes") as error:
        Guard([]).survives("")
    assert error.value.status == 500


def test_compiling_names_what_is_wrong_and_keeps_what_was_right() -> None:
    grammars = Grammars(Tokenizer(byte_tokenizer()), VOCAB_SIZE, [257])
    for wanted in HARMFUL.values():
        with pytest.raises(InvalidRequest, match="takes too much time or memory") as error:
            grammars.compile(StructuredOutputs(**wanted))
        assert error.value.param == "structured_outputs"
    with pytest.raises(InvalidRequest, match="cannot be compiled"):
        grammars.compile(StructuredOutputs(regex="a("))
    once = grammars.compile(StructuredOutputs(choice=["a", "b"]))
    assert grammars.compile(StructuredOutputs(choice=["a", "b"])) is once
    for i in range(64):
        grammars.compile(StructuredOutputs(regex=f"a{{{i}}}b"))
    assert grammars.compile(StructuredOutputs(choice=["a", "b"])) is not once


def test_an_answer_leaves_the_compiled_form_as_it_was() -> None:
    grammar = Grammars(Tokenizer(byte_tokenizer()), VOCAB_SIZE, [257]).compile(
        StructuredOutputs(regex="ab+c")
    )
    a, b, c = (byte_tokenizer().convert_tokens_to_ids(letter) for letter in "abc")
    first = grammar.begin()
    seen = [first.allowed(answer).nonzero()[0].tolist() for answer in ([], [a], [a, b], [a, b, b])]
    assert seen == [[a], [b], [b, c], [b, c]]
    assert first.complete([a, b, b, c])
    assert first.allowed([a, b, b, c]).nonzero()[0].tolist() == [257]
    second = grammar.begin()
    assert second.allowed([]).nonzero()[0].tolist() == [a]
    assert not second.complete([])
