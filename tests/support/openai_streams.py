"""Streams of the `openai` package, put together again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter


@dataclass
class Choice:
    """One choice of a stream."""

    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: Any = None


@dataclass
class Collected:
    """All that a stream said."""

    choices: list[Choice]
    usage: Any
    octavo: Any


def checked(kind: Any, data: str) -> Any:
    """`data`, which is JSON of exactly this kind."""
    return TypeAdapter(kind).validate_json(data, strict=True)


def events(text: str) -> list[str]:
    """The data of each event."""
    assert text.endswith("\n\n")
    blocks = text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def collect(stream: Iterable[Any]) -> Collected:
    """Put the chunks of a chat stream together."""
    choices: dict[int, Choice] = {}
    usage = octavo = None
    for chunk in stream:
        body = chunk.model_dump()
        if body.get("usage") is not None:
            usage, octavo = body["usage"], body["octavo"]
            assert body["choices"] == []
        for given in body["choices"]:
            choice = choices.setdefault(given["index"], Choice())
            assert choice.finish_reason is None
            delta = given["delta"]
            choice.text += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                _add_call(choice.calls, call)
            if given["logprobs"] is not None:
                choice.logprobs = (choice.logprobs or []) + given["logprobs"]["content"]
            choice.finish_reason = given["finish_reason"]
            choice.stop_reason = given.get("stop_reason")
    return Collected([choices[index] for index in sorted(choices)], usage, octavo)


def _add_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    if call["index"] == len(calls):
        calls.append(
            {"id": call["id"], "type": call["type"], "name": call["function"]["name"], "arguments": ""}
        )
    else:
        assert call.get("id") is None
        assert call["function"].get("name") is None
    calls[call["index"]]["arguments"] += call["function"]["arguments"]
