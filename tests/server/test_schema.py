"""`/openapi.json` is true: whatever schemathesis makes of it, no answer is a 5xx and each is as described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from support.serving import Served
from support.sizes import sized

EXAMPLES = sized(12, 200)
CHECKS: list[Any] = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
]

SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)


@pytest.fixture
def schema(served: Served) -> Any:
    return schemathesis.openapi.from_url(f"{served.url}/openapi.json")


def call_all(schema: Any, change: Callable[[schemathesis.Case], None]) -> set[tuple[str, str, int]]:
    """Call every operation with random requests; method, path and status of all responses, which were as described."""
    seen: set[tuple[str, str, int]] = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @SETTINGS
        @hypothesis.given(case=operation.as_strategy())
        def check(case: schemathesis.Case) -> None:
            change(case)
            response = case.call_and_validate(checks=CHECKS, timeout=60)
            seen.add((case.method, case.path, response.status_code))

        check()
    return seen


def test_every_answer_is_as_described(schema: Any) -> None:
    seen = call_all(schema, lambda case: None)
    answered = {path for _, path, status in seen if status == 200}
    assert {"/health", "/version", "/v1/models", "/metrics", "/cache"} <= answered


def test_answers_to_requests_that_can_be_answered(schema: Any) -> None:
    """With what a random request rarely has: a model that is there, and no more than a few tokens."""

    def change(case: schemathesis.Case) -> None:
        if isinstance(case.body, dict):
            body: dict[str, Any] = {**case.body, "model": "tiny"}
            for name, most in (("max_tokens", 4), ("max_completion_tokens", 4), ("n", 2)):
                if isinstance(body.get(name), int):
                    body[name] = min(body[name], most)
            case.body = body

    seen = call_all(schema.include(method="POST"), change)
    answered = {path for _, path, status in seen if status == 200}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/tokenize", "/detokenize"} <= answered
