"""Chat completions: `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from octavo.server import generation, sse
from octavo.server.generation import Job
from octavo.server.logs import note_user
from octavo.server.openai.common import ANSWERS, DONE, answer, check_logprobs, chunk, head, stream
from octavo.server.openai.logprobs import TokenBytes
from octavo.server.openai.reply import Reply, Shape
from octavo.server.openai.responses import ChatCompletion, usage_so_far
from octavo.server.openai.schemas import ChatRequest
from octavo.server.openai.translate import Conversation, blamed_on
from octavo.server.state import ServerState, state_of

router = APIRouter(tags=["openai"])


@router.post("/v1/chat/completions", response_model=ChatCompletion, responses=ANSWERS)
async def create(
    body: ChatRequest, request: Request, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Answer a conversation, at once or as server-sent events."""
    model = state.check_model(body.model)
    note_user(body.user if body.user is not None else body.safety_identifier)
    conversation = Conversation(body, state.tokenizer)
    job = await _job(body, conversation, request, state)
    reply = Reply(
        Shape(
            head=head(state, model, "chatcmpl", job.request_id, body.service_tier),
            form=conversation.form if conversation.reads_calls else None,
            top=job.params.logprobs,
            tokens=TokenBytes(state.tokenizer),
        )
    )
    with blamed_on(body):
        if body.stream:
            return await stream(request, state, _events(state, job, reply, body))
        output = await sse.unless_gone(request.receive, generation.whole(state, job))
    return await answer(lambda: reply.whole(output))


async def _job(body: ChatRequest, conversation: Conversation, request: Request, state: ServerState) -> Job:
    tenant: str = request.state.tenant
    params = conversation.params()
    context = state.facts.max_model_len
    check_logprobs(params.n, params.logprobs, min(params.max_tokens or context, context))
    text, token_ids = await generation.encode_chat(
        state,
        conversation.messages(),
        (tenant, params.cache_salt),
        exact=params.exact,
        **conversation.options(),
    )
    return Job(
        prompt=token_ids,
        params=params,
        request_id=request.state.request_id,
        tenant=tenant,
        label=body.prompt_cache_key,
        chat_text=text,
    )


async def _events(
    state: ServerState, job: Job, reply: Reply, body: ChatRequest
) -> AsyncGenerator[bytes, None]:
    async with aclosing(generation.deltas(state, job)) as changes:
        async for new, output in changes:
            later = usage_so_far(output) if body.counts_on else None
            chunks = reply.chunks(new, {"usage": later} if body.include_usage else {})
            if output.finished and body.include_usage:
                chunks.append(reply.usage(output))
            yield b"".join(map(chunk, chunks)) + (DONE if output.finished else b"")
