"""What both of OpenAI's endpoints share: heads of responses, documented responses, streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

import orjson
from fastapi import Request
from starlette.responses import Response

from octavo import __version__
from octavo.errors import InvalidRequest, OctavoError, error_body
from octavo.server import sse
from octavo.server.openai.responses import Head
from octavo.server.problems import ErrorBody
from octavo.server.state import ServerState

MAX_LOGPROBS = 2_000_000
DONE = sse.event(b"[DONE]")
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 408, 413, 415, 500, 503)
}


def head(state: ServerState, model: str, prefix: str, request_id: str, tier: str | None = None) -> Head:
    """The fields that a response to `request_id` begins with."""
    fields: Head = {
        "id": f"{prefix}-{request_id}",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"fp_{state.facts.digest[:12]}_{__version__}",
    }
    if tier is not None:
        fields["service_tier"] = "default"
    return fields


def chunk(body: Mapping[str, Any]) -> bytes:
    """`body` as an event of a stream."""
    return sse.event(orjson.dumps(body))


async def answer(build: Callable[[], Mapping[str, Any]]) -> Response:
    """What `build` makes as a response. Log-probs of a long answer take a while, in which the event loop goes on."""
    return Response(await asyncio.to_thread(lambda: orjson.dumps(build())), media_type="application/json")


def check_logprobs(choices: int, per_token: int | None, tokens: int) -> None:
    """Raises `InvalidRequest` if several `choices` of up to `tokens` ask for more log-probs than may be held."""
    entries = choices * (1 + (per_token or 0)) * tokens
    if per_token is not None and choices > 1 and entries > MAX_LOGPROBS:
        raise InvalidRequest(
            f"logprobs={per_token} for {choices} choices of up to {tokens} tokens are {entries} log-probs, and "
            f"{MAX_LOGPROBS} work; ask for fewer choices, fewer log-probs or fewer tokens",
            param="logprobs",
        )


async def stream(request: Request, state: ServerState, events: AsyncGenerator[bytes, None]) -> Response:
    """`events` as a response; an error in their midst is their last one."""
    return await sse.stream(request, events, failed=_failed, send_timeout=state.config.send_timeout)


def _failed(error: OctavoError) -> bytes:
    return chunk(error_body(error))
