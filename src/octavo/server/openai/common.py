"""What both of OpenAI's endpoints share: heads of responses, documented responses, streams."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson
from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from octavo import __version__
from octavo.errors import OctavoError, error_body
from octavo.server import sse
from octavo.server.problems import ErrorBody
from octavo.server.state import ServerState

DONE = sse.event(b"[DONE]")
ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}},
    **{status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 415, 500, 503)},
}


def head(state: ServerState, model: str, prefix: str, request_id: str, tier: str | None) -> dict[str, Any]:
    """The fields that a response to `request_id` begins with."""
    fields = {
        "id": f"{prefix}-{request_id}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"fp_{state.facts.digest[:12]}_{__version__}",
    }
    return fields if tier is None else {**fields, "service_tier": "default"}


def encode(body: BaseModel) -> bytes:
    """`body` as it is sent: fields that were not set are left out."""
    return body.model_dump_json(exclude_unset=True).encode()


def answer(body: BaseModel) -> Response:
    """`body` as a response."""
    return Response(encode(body), media_type="application/json")


async def stream(request: Request, state: ServerState, events: AsyncGenerator[bytes, None]) -> Response:
    """`events` as a response; an error in their midst is their last one."""
    return await sse.stream(request, events, failed=_failed, send_timeout=state.config.send_timeout)


def _failed(error: OctavoError) -> bytes:
    return sse.event(orjson.dumps(error_body(error)))
