"""Anthropic's messages: `/v1/messages` and `/v1/messages/count_tokens`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated

import orjson
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from octavo.errors import OctavoError
from octavo.server import generation, sse
from octavo.server.anthropic import translate
from octavo.server.anthropic.answer import Answer
from octavo.server.anthropic.content import PlainReader
from octavo.server.anthropic.responses import MessageEvent, MessagesResponse, TokenCount
from octavo.server.anthropic.schemas import MessagesRequest, Prompt
from octavo.server.generation import Job
from octavo.server.openai.calls import CallReader
from octavo.server.openai.translate import Conversation
from octavo.server.problems import anthropic_body
from octavo.server.state import ServerState, state_of

router = APIRouter(tags=["anthropic"])
State = Annotated[ServerState, Depends(state_of)]


@router.post("/v1/messages", response_model=MessagesResponse)
async def create(body: MessagesRequest, request: Request, state: State) -> Response:
    """Answer a conversation, at once or as server-sent events."""
    model = state.check_model(body.model)
    with translate.blamed_on(body):
        conversation = Conversation(translate.chat_request(body), state.tokenizer)
        job = await _job(body, conversation, request, state)
        form = conversation.form if conversation.reads_calls else None
        answer = Answer(model, body, PlainReader() if form is None else CallReader(form))
        if body.stream:
            return await sse.stream(
                request,
                _events(state, job, answer),
                failed=lambda error: _failed(error, job.request_id),
                send_timeout=state.config.send_timeout,
            )
        output = await sse.unless_gone(request.receive, generation.whole(state, job))
    return Response(orjson.dumps(answer.whole(output)), media_type="application/json")


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: Prompt, request: Request, state: State) -> TokenCount:
    """The length of the prompt that a conversation makes."""
    state.check_model(body.model)
    conversation = Conversation(translate.chat_request(body), state.tokenizer)
    token_ids = await generation.count_chat(
        state, conversation.messages(), (request.state.tenant, None), **conversation.options()
    )
    return {"input_tokens": len(token_ids)}


async def _job(
    body: MessagesRequest, conversation: Conversation, request: Request, state: ServerState
) -> Job:
    tenant: str = request.state.tenant
    params = conversation.params()
    text, token_ids = await generation.encode_chat(
        state, conversation.messages(), (tenant, body.cache_salt), **conversation.options()
    )
    ttl = translate.keep_for(body)
    if ttl is not None and (kept := await _marked_tokens(state, body, text, token_ids)):
        params = replace(params, cache_ttl=ttl, cache_ttl_tokens=kept)
    return Job(
        prompt=token_ids,
        params=params,
        request_id=request.state.request_id,
        tenant=tenant,
        label=None if body.metadata is None else body.metadata.user_id,
        chat_text=text,
    )


async def _marked_tokens(state: ServerState, body: Prompt, text: str, token_ids: list[int]) -> int:
    """How many tokens of the prompt come before the end of the last marked block."""
    if body.cache_control is not None:  # marks the last block there is
        return len(token_ids)
    tokenizer = state.tokenizer

    def count() -> int:
        marked = Conversation(translate.chat_request(body, translate.MARK), tokenizer)
        length = translate.marked_length(text, tokenizer.render_chat(marked.messages(), **marked.options()))
        return translate.tokens_within(length, token_ids, lambda ids: tokenizer.decode(ids, False))

    return await state.engine.aside(count)


async def _events(state: ServerState, job: Job, answer: Answer) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.deltas(state, job)) as changes:
        async for new, output in changes:
            yield b"".join(map(_event, answer.changes(new, output)))


def _event(data: MessageEvent) -> bytes:
    return sse.event(orjson.dumps(data), data["type"])


def _failed(error: OctavoError, request_id: str) -> bytes:
    return sse.event(orjson.dumps(anthropic_body(error, request_id)), "error")
