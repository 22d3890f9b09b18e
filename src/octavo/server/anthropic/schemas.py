"""What `/v1/messages` accepts: the part of Anthropic's API that a text model can honour.

Whatever is not here (images, documents, thinking, server tools ...) is refused, and the error names it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, Tag

from octavo.server.strict import Strict, by_key, one_of

MAX_TOOLS = 128
MAX_STRINGS = 64
"""Stop sequences: each is looked for at every step."""


class CacheControl(Strict):
    """Keep the prompt up to here in the cache for `ttl`, unless others need it more."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"

    @property
    def seconds(self) -> float:
        return {"5m": 300.0, "1h": 3600.0}[self.ttl]


class Block(Strict):
    """A part of a prompt that can be marked."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """A text. Citations are for documents, which are not supported."""

    type: Literal["text"]
    text: str
    citations: None = None


class DirectCaller(Strict):
    """The model called the tool itself."""

    type: Literal["direct"]


class ToolUseBlock(Block):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: DirectCaller | None = None


def _as_blocks(value: object) -> object:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


Texts = Annotated[
    list[TextBlock],
    Field(fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(Block):
    """What came of a call."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Texts = Field([])
    is_error: bool = False


UserBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
    one_of(by_key("type"), "what a user says is text or tool_result; images and documents are not supported"),
]
AssistantBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ToolUseBlock, Tag("<tool_use>")],
    one_of(
        by_key("type"),
        "what the assistant says is text or tool_use; thinking and server tools are not supported",
    ),
]
UserBlocks = Annotated[
    list[UserBlock],
    Field(fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[UserBlock]),
]
AssistantBlocks = Annotated[
    list[AssistantBlock],
    Field(fail_fast=True),
    BeforeValidator(_as_blocks, json_schema_input_type=str | list[AssistantBlock]),
]


class UserMessage(Strict):
    """What the user said, and what the tools returned."""

    role: Literal["user"]
    content: UserBlocks


class AssistantMessage(Strict):
    """What the model said; as the last message, the beginning of what it will say."""

    role: Literal["assistant"]
    content: AssistantBlocks


class SystemMessage(Strict):
    """Instructions in the midst of a conversation."""

    role: Literal["system"]
    content: Texts


Message = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    one_of(by_key("role"), "the role of a message is user, assistant or system"),
]


class Tool(Block):
    """A function that the model may call; `input_schema` is a JSON schema."""

    type: Literal["custom"] | None = None
    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,128}$")
    description: str = ""
    input_schema: dict[str, Any]
    strict: bool | None = None


class _Choice(Strict):
    disable_parallel_tool_use: bool = False


class AutoChoice(_Choice):
    """The model decides."""

    type: Literal["auto"]


class AnyChoice(_Choice):
    """The model calls at least one tool."""

    type: Literal["any"]


class ToolChoice(_Choice):
    """The model calls the tool `name`."""

    type: Literal["tool"]
    name: str


class NoChoice(Strict):
    """The model calls no tool."""

    type: Literal["none"]


AnyToolChoice = Annotated[
    Annotated[AutoChoice, Tag("<auto>")]
    | Annotated[AnyChoice, Tag("<any>")]
    | Annotated[ToolChoice, Tag("<tool>")]
    | Annotated[NoChoice, Tag("<none>")],
    one_of(by_key("type"), "the type is auto, any, tool or none"),
]


class JSONFormat(Strict):
    """The answer is JSON of this schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    """What the answer looks like."""

    format: JSONFormat | None = None


class NoThinking(Strict):
    """Thinking is not supported; that it is off may be said."""

    type: Literal["disabled"]


class Prompt(Strict):
    """A conversation and what the model may do in it: what `/v1/messages/count_tokens` counts."""

    model: str
    messages: list[Message] = Field(min_length=1, fail_fast=True)
    system: Texts = Field([])
    tools: list[Tool] = Field([], fail_fast=True, max_length=MAX_TOOLS)
    tool_choice: AnyToolChoice | None = None
    cache_control: CacheControl | None = None
    output_config: OutputConfig | None = None
    thinking: NoThinking | None = None


class Metadata(Strict):
    """`user_id` labels the request in the log and on the dashboard."""

    user_id: str | None = Field(None, max_length=512)


class MessagesRequest(Prompt):
    """A request for an answer. `max_tokens=0` only fills the cache; `seed`, `priority` and `cache_salt` are ours."""

    max_tokens: int = Field(ge=0)
    temperature: float = Field(1.0, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0)
    stop_sequences: list[Annotated[str, Field(min_length=1)]] = Field(
        [], fail_fast=True, max_length=MAX_STRINGS
    )
    stream: bool = False
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] = "auto"
    seed: int | None = Field(None, ge=0, lt=2**64)
    priority: int = Field(0, ge=-(2**63), lt=2**63)
    cache_salt: str | None = None
