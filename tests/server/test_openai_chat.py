"""Chat completions with the `openai` package over a socket, on a tiny random model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.serving import Served

ASK: list[Any] = [{"role": "user", "content": "Say something."}]
SEEDED: dict[str, Any] = {"model": "tiny", "messages": ASK, "max_tokens": 24, "seed": 7}


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_an_answer_and_its_receipt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**SEEDED)
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24
