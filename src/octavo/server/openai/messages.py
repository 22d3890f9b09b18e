"""The messages of a conversation, as OpenAI writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, Tag

from octavo.server.strict import Strict, by_key, by_type, one_of


class TextPart(Strict):
    """Text."""

    type: Literal["text"]
    text: str


class RefusalPart(Strict):
    """What an earlier answer refused."""

    type: Literal["refusal"]
    refusal: str


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")],
    one_of(by_key("type"), "the type of a part must be text; images, audio and files are not supported"),
]
Content = Annotated[
    Annotated[str, Tag("<str>")] | Annotated[list[Part], Field(fail_fast=True), Tag("<list>")],
    one_of(by_type, "must be a string or a list of text parts"),
]


class CalledFunction(Strict):
    """`arguments` is JSON."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in an earlier answer."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class SystemMessage(Strict):
    """How to answer."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(Strict):
    """What is asked."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class AssistantMessage(Strict):
    """An earlier answer, as it was given; fields that answers have and that say nothing may come back too."""

    role: Literal["assistant"]
    content: Content | None = None
    refusal: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class ToolMessage(Strict):
    """What a call returned."""

    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: str | None = None


def _role(value: Any) -> str:
    tag = by_key("role")(value)
    return "<system>" if tag == "<developer>" else tag


Message = Annotated[
    Annotated[SystemMessage, Tag("<system>")]
    | Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    one_of(_role, "the role of a message must be developer, system, user, assistant or tool"),
]
