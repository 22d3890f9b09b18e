"""What Anthropic's endpoints give back, as dictionaries: messages, and the events that tell of one as it grows."""

from __future__ import annotations

from typing import Any, Literal

from typing_extensions import TypedDict

from octavo.cache.receipt import Receipt
from octavo.server.openai.responses import ReceiptBody, exactly

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"]


@exactly
class CacheCreation(TypedDict):
    """Tokens newly kept because they were marked, by how long."""

    ephemeral_5m_input_tokens: int
    ephemeral_1h_input_tokens: int


@exactly
class Usage(TypedDict):
    """`input_tokens + cache_read_input_tokens + cache_creation_input_tokens` is the length of the prompt."""

    input_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int
    cache_creation: CacheCreation
    output_tokens: int
    service_tier: Literal["standard"]


def usage_of(receipt: Receipt, output_tokens: int) -> Usage:
    """Read is what was found in the cache; created, what was not and is kept because it was marked."""
    read = receipt.reused_tokens
    created = {300.0: 0, 3600.0: 0}
    for pinned in receipt.pinned:
        created[pinned.ttl_s] = max(0, pinned.tokens - read)
    return {
        "input_tokens": receipt.prompt_tokens - read - sum(created.values()),
        "cache_read_input_tokens": read,
        "cache_creation_input_tokens": sum(created.values()),
        "cache_creation": {
            "ephemeral_5m_input_tokens": created[300.0],
            "ephemeral_1h_input_tokens": created[3600.0],
        },
        "output_tokens": output_tokens,
        "service_tier": "standard",
    }


@exactly
class TextContent(TypedDict):
    """A text of the model."""

    type: Literal["text"]
    text: str


@exactly
class ToolUseContent(TypedDict):
    """A call by the model."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


@exactly
class MessageBegun(TypedDict):
    """A message; in its first event `content` is empty, and nothing is known of its end."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | ToolUseContent]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


@exactly
class MessagesResponse(MessageBegun):
    """An answer. `octavo` is the receipt."""

    octavo: ReceiptBody


@exactly
class TokenCount(TypedDict):
    """The length of a prompt."""

    input_tokens: int


@exactly
class MessageStart(TypedDict):
    """The first event."""

    type: Literal["message_start"]
    message: MessageBegun


@exactly
class Ping(TypedDict):
    """Nothing new."""

    type: Literal["ping"]


@exactly
class BlockStart(TypedDict):
    """A block, empty so far."""

    type: Literal["content_block_start"]
    index: int
    content_block: TextContent | ToolUseContent


@exactly
class TextDelta(TypedDict):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


@exactly
class InputDelta(TypedDict):
    """More of the input of a call, which is JSON once it is complete."""

    type: Literal["input_json_delta"]
    partial_json: str


@exactly
class BlockDelta(TypedDict):
    """What is new in a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | InputDelta


@exactly
class BlockStop(TypedDict):
    """A block is complete."""

    type: Literal["content_block_stop"]
    index: int


@exactly
class Ending(TypedDict):
    """Why the message has ended."""

    stop_reason: StopReason
    stop_sequence: str | None


@exactly
class MessageDelta(TypedDict):
    """The end of the message, with all counts and the receipt."""

    type: Literal["message_delta"]
    delta: Ending
    usage: Usage
    octavo: ReceiptBody


@exactly
class MessageStop(TypedDict):
    """The last event."""

    type: Literal["message_stop"]


MessageEvent = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
