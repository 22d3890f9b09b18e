"""`/openapi.json`: what FastAPI finds out about the routes, the errors of what stands around them, and the events of
streams."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from octavo.server.anthropic.responses import MessageEvent
from octavo.server.auth import is_open
from octavo.server.openai.responses import ChatChunk, Completion
from octavo.server.problems import AnthropicErrorBody, ErrorBody, is_anthropic

_WITH_BODY = {
    "400": "The request is not valid; `param` names the field.",
    "404": "There is no such model.",
    "408": "The body did not arrive in time.",
    "413": "The body is too long.",
    "415": "The body is not declared to be JSON.",
    "503": "Too many requests wait, or the server is about to end; try again later.",
}
_STREAMS: dict[str, tuple[str, Any]] = {
    "/v1/chat/completions": ("ChatEvent", ChatChunk | ErrorBody),
    "/v1/completions": ("CompletionEvent", Completion | ErrorBody),
    "/v1/messages": ("MessageEvent", MessageEvent | AnthropicErrorBody),
}
_SCHEMES = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}


def describe(app: FastAPI, *, keyed: bool) -> None:
    """Let `app` describe itself, with keys if it needs them."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _describe(app, keyed)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe(app: FastAPI, keyed: bool) -> dict[str, Any]:
    schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
    components = schema.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for model in (ErrorBody, AnthropicErrorBody):
        own = model.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas |= own.pop("$defs", {})
        schemas[model.__name__] = own
    # Such errors are 400s here.
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    if keyed:
        components["securitySchemes"] = _SCHEMES
    for path, (name, kind) in _STREAMS.items():
        schemas[name] = TypeAdapter(kind).json_schema(
            ref_template=f"#/components/schemas/{name}/$defs/{{model}}"
        )
        answered = schema["paths"][path]["post"]["responses"]["200"]
        answered["content"]["text/event-stream"] = {"itemSchema": _event(path, name)}
    for path, operations in schema["paths"].items():
        model = AnthropicErrorBody if is_anthropic(path) else ErrorBody
        reference = {"$ref": f"#/components/schemas/{model.__name__}"}
        for operation in operations.values():
            responses = operation["responses"]
            responses.pop("422", None)
            errors = {"500": "A bug; the log has it."}
            if "requestBody" in operation:
                errors |= _WITH_BODY
            if keyed and not is_open(path):
                errors["401"] = "The key is missing or unknown."
                operation["security"] = [{name: []} for name in _SCHEMES]
            for status, text in errors.items():
                content = {"application/json": {"schema": reference}}
                responses.setdefault(status, {"description": text, "content": content})
    return schema


def _event(path: str, name: str) -> dict[str, Any]:
    """An event whose data is JSON of the schema `name`; OpenAI's streams end with one that is not."""
    data: dict[str, Any] = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": f"#/components/schemas/{name}"},
    }
    if not is_anthropic(path):
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    properties = {"event": {"type": "string"}, "data": data}
    return {"type": "object", "required": ["data"], "properties": properties}
