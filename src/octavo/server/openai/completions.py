"""Completions: `/v1/completions`, of one prompt or of several."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from octavo.errors import InvalidRequest, RequestCancelled
from octavo.outputs import FinishReason, RequestOutput
from octavo.params import SamplingParams
from octavo.server import generation, sse
from octavo.server.generation import Delta, Job
from octavo.server.logs import note_user
from octavo.server.openai.common import ANSWERS, DONE, answer, check_logprobs, chunk, head, stream
from octavo.server.openai.logprobs import CompletionTokens, TokenBytes, special_tokens
from octavo.server.openai.responses import (
    Completion,
    CompletionChoice,
    CompletionFinish,
    CompletionLogprobs,
    Counted,
    Head,
    receipt_body,
    scored,
    usage_of,
    usage_so_far,
)
from octavo.server.openai.schemas import MAX_PROMPTS, CompletionRequest
from octavo.server.openai.translate import blamed_on, sampling_params, structured
from octavo.server.state import ServerState, state_of

router = APIRouter(tags=["openai"])
MAX_TOKENS = 16


@router.post("/v1/completions", response_model=Completion, responses=ANSWERS)
async def create(
    body: CompletionRequest, request: Request, state: Annotated[ServerState, Depends(state_of)]
) -> Response:
    """Complete one prompt or several, at once or as server-sent events. Choices are numbered prompt by prompt."""
    model = state.check_model(body.model)
    note_user(body.user)
    jobs = _jobs(body, request, state)
    reply = _Reply(head(state, model, "cmpl", request.state.request_id), body, state)
    with blamed_on(body):
        if body.stream:
            return await stream(request, state, _events(state, jobs, reply, body.include_usage))
        work = generation.together([generation.whole(state, job) for job in jobs])
        outputs = await sse.unless_gone(request.receive, work)
    return await answer(lambda: reply.whole(outputs))


def _jobs(body: CompletionRequest, request: Request, state: ServerState) -> list[Job]:
    prompts = _prompts(body)
    params = _params(body)
    if len(prompts) * params.n > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt and n ask for {len(prompts) * params.n} choices; at most {MAX_PROMPTS} work in one request",
            param="prompt",
        )
    context = state.facts.max_model_len
    tokens = context if body.echo else min(params.max_tokens or context, context)
    check_logprobs(len(prompts) * params.n, params.logprobs, tokens)
    name: str = request.state.request_id
    return [
        Job(
            prompt=prompt,
            params=params,
            request_id=name if len(prompts) == 1 else f"{name}/{index}",
            tenant=request.state.tenant,
            label=body.prompt_cache_key,
        )
        for index, prompt in enumerate(prompts)
    ]


def _prompts(body: CompletionRequest) -> list[str | list[int]]:
    given: Any = body.prompt
    several = isinstance(given, list) and not isinstance(given[0], int)
    return list(given) if several else [given]


def _params(body: CompletionRequest) -> SamplingParams:
    own: dict[str, Any] = {
        "max_tokens": MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1,
        "logprobs": body.logprobs,
        "structured_outputs": structured(body),
    }
    if body.echo and body.logprobs is not None:
        if body.prompt_logprobs not in (None, body.logprobs):
            raise InvalidRequest(
                "prompt_logprobs other than logprobs does not work with echo=true; leave it out",
                param="prompt_logprobs",
            )
        own["prompt_logprobs"] = body.logprobs
    return sampling_params(body, **own)


async def _events(
    state: ServerState, jobs: Sequence[Job], reply: _Reply, include_usage: bool
) -> AsyncGenerator[bytes, None]:
    finished: list[RequestOutput | None] = [None] * len(jobs)
    sources = [generation.deltas(state, job) for job in jobs]
    async with aclosing(generation.merged(sources)) as changes:
        async for prompt, (new, output) in changes:
            build = partial(_chunks, reply, prompt, new, output)
            # Log-probs of echoed prompts take a while.
            events = await asyncio.to_thread(build) if reply.echoes_logprobs else build()
            if output.finished:
                finished[prompt] = output
            if all(finished):
                last = [output for output in finished if output is not None]
                usage = chunk(reply.usage(last)) if include_usage else b""
                events += usage + DONE
            if events:
                yield events


def _chunks(reply: _Reply, prompt: int, new: Sequence[Delta], output: RequestOutput) -> bytes:
    return b"".join(map(chunk, reply.chunks(prompt, new, output)))


class _Reply:
    """The completions of all prompts."""

    def __init__(self, head: Head, body: CompletionRequest, state: ServerState) -> None:
        self._head = head
        self._body = body
        self._state = state
        self._tokens = TokenBytes(state.tokenizer)
        hide = body.logprobs is not None and body.skip_special_tokens is not False
        self._hidden = frozenset(special_tokens(state.tokenizer).values() if hide else ())
        self._texts: dict[int, CompletionTokens] = {}

    @property
    def echoes_logprobs(self) -> bool:
        """Whether prompts come back with their log-probs."""
        return self._body.echo is True and self._body.logprobs is not None

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        """The response, once all is finished."""
        choices = [
            self._choice(prompt, delta, output)
            for prompt, output in enumerate(outputs)
            for delta in generation.deltas_of(output)
        ]
        return self._with_account(choices, outputs)

    def chunks(self, prompt: int, new: Sequence[Delta], output: RequestOutput) -> list[Completion]:
        """The events for what is new in the answers to a prompt."""
        later: Counted = {"usage": None} if self._body.include_usage else {}
        if self._body.counts_on:
            later["usage"] = usage_so_far(output)
        choices = [self._choice(prompt, delta, output) for delta in new]
        return [
            {**self._head, "object": "text_completion", "choices": [choice], **later}
            for choice in choices
            if choice["text"] or choice["logprobs"] is not None or choice["finish_reason"] is not None
        ]

    def usage(self, outputs: Sequence[RequestOutput]) -> Completion:
        """The last event: usage and receipts."""
        return self._with_account([], outputs)

    def _with_account(self, choices: list[CompletionChoice], outputs: Sequence[RequestOutput]) -> Completion:
        receipts = [output.receipt for output in outputs if output.receipt is not None]
        bodies = [receipt_body(receipt) for receipt in receipts]
        return {
            **self._head,
            "object": "text_completion",
            "choices": choices,
            "usage": usage_of(receipts, 0 if self._body.max_tokens == 0 else None),
            "octavo": bodies[0] if len(bodies) == 1 else bodies,
        }

    def _choice(self, prompt: int, delta: Delta, output: RequestOutput) -> CompletionChoice:
        """What is new in a choice; the prompt is a part of it where it is echoed."""
        body = self._body
        index = prompt * (body.n or 1) + delta.index
        only_echo = body.max_tokens == 0
        first = index not in self._texts
        text = self._prompt_text(output) if first and body.echo else ""
        choice: CompletionChoice = {
            "index": index,
            "text": text if only_echo else text + delta.text,
            "logprobs": self._logprobs(index, delta, output),
            "finish_reason": "length" if only_echo else _reason(delta.finish_reason),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = None if only_echo else delta.stop_reason
            if body.prompt_logprobs is not None:
                choice["prompt_logprobs"] = scored(output)["prompt_logprobs"]
        return choice

    def _logprobs(self, index: int, delta: Delta, output: RequestOutput) -> CompletionLogprobs | None:
        first = index not in self._texts
        text = self._texts.setdefault(index, CompletionTokens(self._tokens, self._hidden))
        if delta.logprobs is None:
            return None
        found: CompletionLogprobs = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        if first and self._body.echo and output.prompt_logprobs is not None:
            text.take(output.prompt_logprobs, output.prompt_token_ids, found)
        if self._body.max_tokens != 0:
            text.take(delta.logprobs, delta.token_ids, found)
        return found

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None or self._state.tokenizer.hf is None:
            return output.prompt or ""
        return self._state.tokenizer.decode(
            output.prompt_token_ids, self._body.skip_special_tokens is not False
        )


def _reason(reason: FinishReason | None) -> CompletionFinish | None:
    if reason == "abort":
        raise RequestCancelled("the completion was ended by the server")
    return reason
