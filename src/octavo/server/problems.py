"""Errors as responses, in OpenAI's form, and in Anthropic's under `/v1/messages`.

Whatever goes wrong in a request ends here: our own errors, what pydantic and the router refuse, and bugs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from octavo.errors import BodyTimeout, InvalidRequest, OctavoError, Overloaded, Unauthorized, error_body, show

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    499: "api_error",
    503: "overloaded_error",
}
_CODES = {404: "not_found", 405: "method_not_allowed"}
_FIELD = re.compile(r"[a-z_][a-z0-9_]*")
_TYPES = frozenset({"str", "int", "float", "bool", "none", "list", "dict"})
_SHOWN = 400


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


class AnthropicErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class AnthropicErrorBody(BaseModel):
    """The body of every response of `/v1/messages` that is not a success."""

    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str | None


def errors_documented(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` of a route that may answer with these errors, in OpenAI's form."""
    return {status: {"model": ErrorBody} for status in statuses}


def is_anthropic(path: str) -> bool:
    """Whether `path` speaks Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def anthropic_body(error: OctavoError, request_id: str | None) -> dict[str, Any]:
    """`error` as Anthropic's API writes it."""
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}, "request_id": request_id}


def response_to(
    scope: Mapping[str, Any], error: OctavoError, headers: Mapping[str, str] | None = None
) -> Response:
    """The response to the request of `scope` that ended in `error`."""
    headers = dict(headers or {})
    if isinstance(error, Overloaded):
        headers["retry-after"] = str(max(1, round(error.retry_after_s)))
    if isinstance(error, BodyTimeout):
        headers["connection"] = "close"
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    if is_anthropic(scope["path"]):
        body = anthropic_body(error, scope.get("state", {}).get("request_id"))
    else:
        body = error_body(error)
    # 499 is what a client that has left is told; it is no status that could be sent to one who is there.
    return JSONResponse(body, 503 if error.status == 499 else error.status, headers)


def internal() -> OctavoError:
    """What a client is told of a bug."""
    return OctavoError("internal error; the server's log has it")


def handle_errors(app: FastAPI) -> None:
    """Let `app` answer errors with these responses."""

    @app.exception_handler(OctavoError)
    async def ours(request: Request, error: OctavoError) -> Response:
        return response_to(request.scope, error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return response_to(request.scope, explain(error.errors()))

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> Response:
        found = OctavoError(_sentence(request, error))
        found.status, found.code = error.status_code, _CODES.get(error.status_code, InvalidRequest.code)
        return response_to(request.scope, found, error.headers)


def explain(errors: Sequence[Any]) -> InvalidRequest:
    """What pydantic found, as one error that names the first field at fault."""
    first = errors[0]
    param = _path(first["loc"])
    if first["type"] == "missing" and not param:
        return InvalidRequest("the body is empty; send a JSON object")
    if first["type"] == "extra_forbidden":
        message = f"{param} is not a known field; leave it out"
    elif first["type"] == "missing":
        message = f"{param} is missing"
    else:
        reason = first["msg"].removeprefix("Value error, ")
        message = f"{param or 'the body'}={show(first['input'])}: {reason}"
    if len(errors) > 1:
        message += f" (the first of {len(errors)} errors)"
    return InvalidRequest(message[:_SHOWN], param=param or None)


def _path(location: Sequence[str | int]) -> str:
    """`messages[0].role`; the names of a union's members are no part of it."""
    path = ""
    for part in location[1:] if location[:1] in (("body",), ("query",), ("path",)) else location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif _FIELD.fullmatch(part) and part not in _TYPES:
            path += f".{part}" if path else part
        elif not path:
            path = part
    return path


def _sentence(request: Request, error: HTTPException) -> str:
    if error.status_code == 404:
        return f"there is no {show(request.url.path)} here; /openapi.json lists what there is"
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "another method")
        return f"{request.method} is not allowed for {show(request.url.path)}; use {allowed}"
    return str(error.detail)
