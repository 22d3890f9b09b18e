"""Anthropic's messages: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from octavo.errors import OctavoError
from octavo.params import SamplingParams
from octavo.server import generation, sse
from octavo.server.anthropic import translate
from octavo.server.anthropic.answer import Answer
from octavo.server.anthropic.content import AnswerEvent, PlainReader
from octavo.server.anthropic.schemas import MessagesRequest, MessagesResponse, Prompt, TokenCount
from octavo.server.generation import Job
from octavo.server.logs import note_aborted
from octavo.server.problems import AnthropicErrorBody, anthropic_body
from octavo.server.state import ServerState, state_of

router = APIRouter(tags=["anthropic"])
State = Annotated[ServerState, Depends(state_of)]
_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}
}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": AnthropicErrorBody} for status in (400, 401, 404, 408, 413, 415, 503)
}


@router.post("/v1/messages", response_model=MessagesResponse, responses=_ANSWERS | _ERRORS)
async def create(body: MessagesRequest, request: Request, state: State) -> Response:
    """Answer a conversation, at once or as server-sent events."""
    model = state.check_model(body.model)
    job = await _job(body, request, state)
    answer = Answer(model, body, PlainReader())
    if body.stream:
        return await sse.stream(
            request,
            _events(state, job, answer),
            failed=lambda error: _failed(error, job.request_id),
            send_timeout=state.config.send_timeout,
            dropped=note_aborted,
        )
    output = await sse.unless_gone(request.receive, generation.whole(state, job))
    return Response(answer.whole(output).model_dump_json(), media_type="application/json")


@router.post("/v1/messages/count_tokens", responses=_ERRORS)
async def count_tokens(body: Prompt, request: Request, state: State) -> TokenCount:
    """The length of the prompt that a conversation makes."""
    state.check_model(body.model)
    _, token_ids = await _encode(state, body, (request.state.tenant, None))
    return TokenCount(input_tokens=len(token_ids))


async def _job(body: MessagesRequest, request: Request, state: ServerState) -> Job:
    tenant: str = request.state.tenant
    text, token_ids = await _encode(state, body, (tenant, body.cache_salt))
    ttl = translate.keep_for(body)
    kept = 0 if ttl is None else await _marked_tokens(state, body, text, token_ids)
    params = SamplingParams(
        max_tokens=max(1, body.max_tokens),
        temperature=body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=body.top_k or 0,
        stop=body.stop_sequences,
        seed=body.seed,
        priority=body.priority,
        cache_salt=body.cache_salt,
        cache_ttl=ttl if kept else None,
        cache_ttl_tokens=kept or None,
    )
    return Job(
        prompt=token_ids,
        params=params,
        request_id=request.state.request_id,
        tenant=tenant,
        label=None if body.metadata is None else body.metadata.user_id,
        chat_text=text,
    )


async def _encode(state: ServerState, prompt: Prompt, owner: tuple[str, str | None]) -> tuple[str, list[int]]:
    return await generation.encode_chat(
        state, translate.chat_messages(prompt), owner, **translate.template_options(prompt)
    )


async def _marked_tokens(state: ServerState, body: Prompt, text: str, token_ids: list[int]) -> int:
    """How many tokens of the prompt come before the end of the last marked block."""
    if body.cache_control is not None:  # marks the last block there is
        return len(token_ids)
    tokenizer = state.tokenizer

    def count() -> int:
        mark = translate.MARK
        marked = tokenizer.render_chat(
            translate.chat_messages(body, mark), **translate.template_options(body, mark)
        )
        return translate.tokens_within(
            translate.marked_length(text, marked), token_ids, lambda ids: tokenizer.decode(ids, False)
        )

    return await state.engine.aside(count)


async def _events(state: ServerState, job: Job, answer: Answer) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.deltas(state, job)) as changes:
        async for new, output in changes:
            yield b"".join(map(_event, answer.changes(new, output)))


def _event(data: AnswerEvent) -> bytes:
    return sse.event(orjson.dumps(data), data["type"])


def _failed(error: OctavoError, request_id: str) -> bytes:
    return _event(anthropic_body(error, request_id))
