"""Usage in every chunk, as vLLM's `continuous_usage_stats` has it and load generators ask for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.serving import Served


def chunks(served: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with served.client() as client:
        response = client.post(
            path, json={"model": "tiny", "max_tokens": 300, "ignore_eos": True, "stream": True, **body}
        )
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Count."}], "n": 2}),
        ("/v1/completions", {"prompt": "Count."}),
    ],
)
def test_every_chunk_has_the_usage_so_far(served: Served, path: str, asked: dict[str, Any]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = chunks(served, path, {**asked, "stream_options": options})
    counted = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counted == sorted(counted)
    assert 0 < counted[0] < counted[-1] == 300 * asked.get("n", 1)
    assert {chunk["usage"]["prompt_tokens"] for chunk in found} == {found[-1]["octavo"]["prompt_tokens"]}
    with served.client() as client:
        alone = {**asked, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        refused = client.post(path, json={"model": "tiny", **alone})
    assert refused.status_code == 400
    assert "include_usage" in refused.json()["error"]["message"]
