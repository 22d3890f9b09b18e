"""Routes about the server itself: models, tokens, health, version, metrics, and forgetting what is cached."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse

from octavo import __version__
from octavo.errors import InvalidRequest, OctavoError, show
from octavo.kernels import native
from octavo.server.auth import require_operator
from octavo.server.generation import count
from octavo.server.metrics import Reading
from octavo.server.openai.messages import Message
from octavo.server.openai.schemas import ChatRequest, Tool
from octavo.server.openai.translate import Conversation
from octavo.server.problems import errors_documented
from octavo.server.state import ServerState, state_of
from octavo.server.strict import Strict

router = APIRouter(tags=["server"])
State = Annotated[ServerState, Depends(state_of)]
PATIENCE_S = 5.0
"""How long metrics wait for the engine, which answers between two steps."""


class Model(BaseModel):
    """A model as OpenAI's and Anthropic's clients read it."""

    id: str
    object: Literal["model"] = "model"
    type: Literal["model"] = "model"
    created: int
    created_at: str
    owned_by: Literal["octavo"] = "octavo"
    display_name: str
    root: str
    max_model_len: int


class ModelList(BaseModel):
    """All names under which the model is served."""

    object: Literal["list"] = "list"
    data: list[Model]
    has_more: Literal[False] = False
    first_id: str
    last_id: str


class TokenizeRequest(Strict):
    """A text, or a conversation with the fields of a chat request that its template reads."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class TokenizeResponse(BaseModel):
    """Token ids; `token_strs` are their names in the vocabulary, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(Strict):
    """Token ids."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class DetokenizeResponse(BaseModel):
    """Their text, special tokens spelled out."""

    prompt: str


class HealthResponse(BaseModel):
    """`stalled`: work is queued and no step has ended for `--stall-timeout`. Whatever is not `ok` is a 503."""

    status: Literal["ok", "stalled", "draining", "failed"]
    detail: str | None
    steps: int
    seconds_since_progress: float


class VersionResponse(BaseModel):
    """What runs here. `isa` is the path of the kernels; `exact` says whether answers never depend on company."""

    version: str
    model: str
    digest: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    isa: str
    exact: bool


class ResetResponse(BaseModel):
    """How many cached blocks were forgotten. Running requests keep theirs."""

    forgotten_blocks: int


@router.get("/v1/models")
async def models(state: State) -> ModelList:
    """The names that requests may use."""
    data = [_model(state, name) for name in state.model_names]
    return ModelList(data=data, first_id=data[0].id, last_id=data[-1].id)


@router.get("/v1/models/{model_id:path}", responses=errors_documented(404))
async def model(model_id: str, state: State) -> Model:
    """One of them."""
    return _model(state, state.check_model(model_id))


def _model(state: ServerState, name: str) -> Model:
    return Model(
        id=name,
        created=int(state.started_at),
        created_at=datetime.fromtimestamp(int(state.started_at), UTC).isoformat().replace("+00:00", "Z"),
        display_name=name,
        root=state.engine.config.model,
        max_model_len=state.facts.max_model_len,
    )


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request, state: State) -> Response:
    """Token ids of a text, or of a conversation as the model gets to see it."""
    state.check_model(body.model)
    tenant: str = request.state.tenant
    # Long texts have long answers: nothing of this is done in the event loop.
    return Response(await count(lambda: _tokenized(body, tenant, state)), media_type="application/json")


def _tokenized(body: TokenizeRequest, tenant: str, state: ServerState) -> bytes:
    tokens, names = _tokens(body, tenant, state), None
    if body.return_token_strs and state.tokenizer.hf is not None:
        names = [str(name) for name in state.tokenizer.hf.convert_ids_to_tokens(tokens)]
    answer = TokenizeResponse.model_construct(
        count=len(tokens), max_model_len=state.facts.max_model_len, tokens=tokens, token_strs=names
    )
    return orjson.dumps(vars(answer))


def _tokens(body: TokenizeRequest, tenant: str, state: ServerState) -> list[int]:
    text, tokenizer = body.prompt, state.tokenizer
    if (text is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    unread = ("tools", "chat_template_kwargs") if text is not None else ("add_special_tokens",)
    for field in unread:
        if getattr(body, field) is not None:
            given = (
                "a prompt, which has no template"
                if text is not None
                else "messages, whose template writes them"
            )
            raise InvalidRequest(f"{field} does nothing with {given}; leave it out", param=field)
    if text is not None:
        return tokenizer.encode(text, body.add_special_tokens is not False)
    request = ChatRequest.model_construct(
        messages=body.messages,
        tools=body.tools,
        chat_template_kwargs=body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
    )
    conversation = Conversation(request, tokenizer)
    rendered = tokenizer.render_chat(conversation.messages(), **conversation.options())
    return state.turns.encode(rendered, (tenant, None))


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, state: State) -> DetokenizeResponse:
    """The text of token ids."""
    state.check_model(body.model)
    return DetokenizeResponse(prompt=await count(lambda: _text(body.tokens, state)))


def _text(tokens: list[int], state: ServerState) -> str:
    known = state.facts.vocab_size
    for at, token in enumerate(tokens):
        if not 0 <= token < known:
            raise InvalidRequest(
                f"tokens[{at}]={show(token)} is not a token id from 0 to {known - 1}", param="tokens"
            )
    return state.tokenizer.decode(tokens, skip_special_tokens=False)


@router.get("/health", responses={503: {"model": HealthResponse}}, response_model=HealthResponse)
async def health(state: State) -> Response:
    """Whether requests are answered."""
    found = _health(state)
    return JSONResponse(found.model_dump(), 200 if found.status == "ok" else 503)


def _health(state: ServerState) -> HealthResponse:
    engine, limit = state.engine.health(), state.config.stall_timeout
    status: Literal["ok", "stalled", "draining", "failed"] = "ok"
    detail = None
    if engine.failed is not None:
        status, detail = "failed", engine.failed
    elif state.draining:
        status, detail = "draining", "the server ends once its requests are answered"
    elif engine.has_work and engine.seconds_since_progress > limit:
        status, detail = "stalled", f"work is queued and no step has ended for more than {limit:g} s"
    return HealthResponse(
        status=status,
        detail=detail,
        steps=engine.steps,
        seconds_since_progress=round(engine.seconds_since_progress, 3),
    )


@router.get("/version")
async def version(state: State) -> VersionResponse:
    """What runs here."""
    facts = state.facts
    return VersionResponse(
        version=__version__,
        model=state.model_names[0],
        digest=facts.digest,
        dtype=facts.dtype,
        kv_cache_dtype=facts.kv_cache_dtype,
        block_size=facts.block_size,
        max_model_len=facts.max_model_len,
        isa=native.path(),
        exact=facts.exact,
    )


_METRICS: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


@router.get(
    "/metrics",
    response_class=Response,
    responses=_METRICS | errors_documented(403),
    dependencies=[Depends(require_operator)],
)
async def metrics(state: State) -> Response:
    """All metrics, as Prometheus reads them. An engine that does not answer shows as `octavo:engine_up` 0."""
    reading = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            reading = await state.engine.call(Reading.of)
    except (TimeoutError, OctavoError):
        pass
    return Response(state.metrics.render(reading), headers={"content-type": CONTENT_TYPE_LATEST})


@router.post(
    "/reset_prefix_cache",
    responses=errors_documented(403, 503),
    dependencies=[Depends(require_operator)],
)
async def reset_prefix_cache(state: State) -> ResetResponse:
    """Forget what is cached and not in use, of all tenants."""
    return ResetResponse(forgotten_blocks=await state.engine.reset_prefix_cache())
