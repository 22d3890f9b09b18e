"""SmolLM2 held to a form."""

from __future__ import annotations

import json

import jsonschema_rs
import pytest

from octavo import LLM, SamplingParams
from octavo.params import StructuredOutputs

pytestmark = pytest.mark.model

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "languages": {"type": "array", "items": {"enum": ["English", "Greek", "Latin"]}, "maxItems": 3},
    },
    "required": ["name", "age", "languages"],
    "additionalProperties": False,
}
QUESTION = [{"role": "user", "content": "Describe Ada Lovelace as JSON with name, age and languages."}]


def test_answers_are_valid_and_the_same_in_company(smollm2_bf16: LLM) -> None:
    wanted = [
        StructuredOutputs(json_schema=PERSON),
        StructuredOutputs(choice=["yes", "no"]),
        StructuredOutputs(regex=r"\d{4}-\d{2}-\d{2}"),
        None,
    ]
    each = [
        SamplingParams(structured_outputs=form, max_tokens=120, temperature=t, seed=3, logprobs=1)
        for form in wanted
        for t in (0.0, 1.0)
    ]
    alone = [smollm2_bf16.chat(QUESTION, params)[0].outputs for params in each]
    together = [output.outputs for output in smollm2_bf16.chat([QUESTION] * len(each), each)]
    assert together == alone
    for (answer,) in alone[:2]:
        assert answer.finish_reason == "stop"
        jsonschema_rs.validate(PERSON, json.loads(answer.text))
    assert {answer.text for (answer,) in alone[2:4]} <= {"yes", "no"}
    for (answer,) in alone[4:6]:
        year, month, day = answer.text.split("-")
        assert (len(year), len(month), len(day)) == (4, 2, 2)
