"""The content of an answer: its blocks, and the events that tell of them as they grow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

from pydantic_core import from_json

from octavo.server.anthropic.responses import (
    InputDelta,
    MessageEvent,
    TextContent,
    TextDelta,
    ToolUseContent,
)
from octavo.server.openai.calls import CallArguments, CallBegins, Event, Text


class Reader(Protocol):
    """Finds calls in text that comes in pieces."""

    def feed(self, text: str) -> list[Event]:
        """What `text` adds."""

    def finish(self) -> list[Event]:
        """What is left once no more text comes."""


class PlainReader:
    """Where there are no tools, everything is text."""

    def feed(self, text: str) -> list[Event]:
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class Content:
    """Text goes in, events come out; `blocks` is what a client makes of them."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._blocks: list[TextContent | ToolUseContent] = []
        self._arguments: dict[int, str] = {}
        self._open = False

    @property
    def calls(self) -> bool:
        """Whether the answer calls a tool."""
        return bool(self._arguments)

    @property
    def blocks(self) -> list[TextContent | ToolUseContent]:
        """The blocks so far. Arguments that were cut short hold what is complete of them."""
        for index, arguments in self._arguments.items():
            block = self._blocks[index]
            assert block["type"] == "tool_use"
            block["input"] = from_json(arguments or "{}", allow_partial=True)
        return self._blocks

    def feed(self, text: str) -> Iterator[MessageEvent]:
        """What `text` adds."""
        yield from self._tell(self._reader.feed(text))

    def finish(self) -> Iterator[MessageEvent]:
        """The end of the last block."""
        yield from self._tell(self._reader.finish())
        yield from self._close()

    def _tell(self, events: Iterable[Event]) -> Iterator[MessageEvent]:
        for event in events:
            if isinstance(event, CallBegins):
                name, call = event.name, tool_use_id(event.id)
                yield from self._begin({"type": "tool_use", "id": call, "name": name, "input": {}})
                self._arguments[len(self._blocks) - 1] = ""
            elif isinstance(event, CallArguments):
                self._arguments[len(self._blocks) - 1] += event.text
                yield self._delta({"type": "input_json_delta", "partial_json": event.text})
            else:
                if not self._open or self._blocks[-1]["type"] != "text":
                    yield from self._begin({"type": "text", "text": ""})
                block = self._blocks[-1]
                assert block["type"] == "text"
                block["text"] += event.text
                yield self._delta({"type": "text_delta", "text": event.text})

    def _begin(self, block: TextContent | ToolUseContent) -> Iterator[MessageEvent]:
        yield from self._close()
        self._blocks.append(block)
        self._open = True
        empty = block.copy()
        yield {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": empty}

    def _delta(self, delta: TextDelta | InputDelta) -> MessageEvent:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[MessageEvent]:
        if self._open:
            self._open = False
            yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def tool_use_id(call_id: str) -> str:
    """`call_id` as Anthropic's clients know it, unless the chat template wants ids of its own kind."""
    return f"toolu_{call_id.removeprefix('call_')}" if call_id.startswith("call_") else call_id
