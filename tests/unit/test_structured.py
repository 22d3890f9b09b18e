"""`StructuredOutputs`: exactly one form, checked as it is made."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.params import SamplingParams, StructuredOutputs


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "none of its fields is set"),
        ({"json_object": False}, "none of its fields is set"),
        ({"regex": "a", "choice": ["a"]}, "regex, choice contradict each other"),
        ({"json_object": "yes"}, "json_object='yes' must be True or False"),
        ({"regex": 5}, "regex=5 must be a string"),
        ({"regex": "\ud800"}, "must be a string of valid characters"),
        ({"grammar": b"start: "}, "grammar=b'start: ' must be a string"),
        ({"choice": []}, r"choice=\[\] must be a list of at least one string"),
        ({"choice": "ab"}, "choice='ab' must be a list"),
        ({"choice": ["a", ""]}, "'' is none"),
        ({"choice": ["a", 1]}, "1 is none"),
        ({"choice": ["a"] * 10_001}, "at most 10000 strings, and has 10001"),
        ({"json_schema": "{"}, "json_schema='{' must be a JSON object"),
        ({"json_schema": "[]"}, "it is a list"),
        ({"json_schema": 7}, "it is a int"),
        ({"json_schema": {"enum": [float("nan")]}}, "must be a JSON object"),
        ({"json_schema": {"enum": [b"a"]}}, "must be a JSON object"),
        ({"json_schema": {"enum": ["\ud800"]}}, "lone surrogate"),
        ({"json_schema": "[" * 100_000 + "]" * 100_000}, "nested too deeply"),
    ],
)
def test_what_is_no_form_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        StructuredOutputs(**given)
    assert error.value.param == "structured_outputs"


def test_a_schema_may_be_an_object_or_its_text() -> None:
    schema = {"type": "object", "properties": {"ä": {"const": 1}}}
    text = '{"type": "object", "properties": {"ä": {"const": 1}}}'
    assert StructuredOutputs(json_schema=schema) == StructuredOutputs(json_schema=text)


def test_sampling_params_take_nothing_else() -> None:
    form = StructuredOutputs(choice=["a", "b"])
    assert SamplingParams(structured_outputs=form).structured_outputs is form
    assert form.choice == ("a", "b")
    with pytest.raises(
        InvalidRequest, match=r"structured_outputs=\{'regex': 'a'\} must be a StructuredOutputs"
    ):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
