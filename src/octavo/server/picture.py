"""`/cache`: the picture of the cache, and `/cache/feed`, the same as it changes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Depends, Request, Response
from pydantic import Field

from octavo.errors import error_body
from octavo.server.auth import require_operator
from octavo.server.feed import feed_of
from octavo.server.problems import errors_documented
from octavo.server.sse import event, stream
from octavo.server.strict import Strict

router = APIRouter(dependencies=[Depends(require_operator)])


class LayerGroup(Strict):
    """Layers that share blocks. A `window` of null is full attention."""

    layers: list[int]
    num_kv_heads: int
    head_dim: int
    window: int | None
    block_bytes: Annotated[int, Field(description="Size of a block while it is filled.")]
    sealed_bytes: Annotated[int, Field(description="Size of a block once it is full.")]


class Slabs(Strict):
    """Runs of `count` blocks of one size, by address. Bytes between them are free for any size."""

    start: list[int]
    block_bytes: list[int]
    count: list[int]


class Owner(Strict):
    """For whom a block was computed first."""

    tenant: str
    label: Annotated[
        str | None, Field(description="What the client named the conversation (`prompt_cache_key`).")
    ]
    request_id: str | None


class Blocks(Strict):
    """One list per column; entry i of each is about the same block."""

    offset: Annotated[list[int], Field(description="Byte address in the arena; the name of the block.")]
    nbytes: Annotated[list[int], Field(description="Its size in bytes.")]
    group: Annotated[list[int], Field(description="Index into `groups`.")]
    state: Annotated[
        list[Literal["open", "running", "cached", "pinned"]],
        Field(
            description="open: being filled. running: full, read by a running request. cached: full, read by "
            "nobody, kept while there is room. pinned: the same, but kept until `pinned_until`."
        ),
    ]
    format: Annotated[list[str], Field(description="How the block is stored.")]
    depth: Annotated[list[int], Field(description="Blocks before it in its sequence.")]
    filled: Annotated[list[int], Field(description="Positions that have been computed, up to `block_size`.")]
    refs: Annotated[list[int], Field(description="Running sequences that read it.")]
    uses: Annotated[list[int], Field(description="Sequences that have ever read it.")]
    priority: Annotated[
        list[int], Field(description="Of its most important reader; a smaller number is more.")
    ]
    exact: Annotated[list[bool], Field(description="Whether all it was computed from was exact.")]
    parent: Annotated[
        list[int], Field(description="Offset of the block before it in the prefix tree; -1: none.")
    ]
    owner: Annotated[list[int], Field(description="Index into `owners`; -1: unknown.")]
    readers: Annotated[list[int], Field(description="Index into `readers`, who read it now; -1: nobody.")]
    used_at: Annotated[
        list[float | None], Field(description="Unix time of the last use; null: it is being read.")
    ]
    pinned_until: Annotated[
        list[float | None], Field(description="Unix time at which its pin ends; null: no pin.")
    ]


class Choice(Strict):
    """One answer of a request. `computed` of its `tokens` are in the cache."""

    name: str
    status: Literal["waiting", "running", "preempted", "finished"]
    tokens: int
    computed: int


class LiveRequest(Strict):
    """A request that runs or waits, and its receipt so far."""

    id: str
    tenant: str
    label: str | None
    priority: int
    arrived_at: float
    max_tokens: int | None
    choices: list[Choice]
    receipt: dict[str, Any]


class EndedRequest(LiveRequest):
    """A request that is over, and its receipt."""

    reason: Annotated[str, Field(description="`stop`, `length`, `error` or `abort`.")]
    ended_at: float


class Sample(Strict):
    """Gauges, and counters since the start."""

    time: float
    running: int
    waiting: int
    bytes_free: int
    bytes_running: int
    bytes_cached: int
    bytes_pinned: int
    steps: int
    reused_tokens: int
    computed_tokens: int
    recomputed_tokens: int
    generated_tokens: int
    preemptions: int
    reclaimed_blocks: int
    first_tokens: Annotated[int, Field(description="Requests that have had their first token.")]
    first_token_seconds: Annotated[float, Field(description="How long they waited for it, together.")]
    token_gaps: Annotated[int, Field(description="Tokens after the first ones.")]
    token_gap_seconds: Annotated[
        float, Field(description="How long each came after the one before, together.")
    ]


class CacheEvent(Strict):
    """Something that happened. `blocks` is above 1 where the same happened to several at a time."""

    time: float
    kind: Literal["stored", "folded", "reclaimed", "preempted", "resumed", "pinned", "pin_refused"]
    reason: str
    request_id: str | None
    owner: Owner | None
    blocks: int
    tokens: int


class CachePicture(Strict):
    """The arena now: every block, who reads it, what it follows; what runs and waits; what happened of late.

    Times are Unix times. What is free is what no block covers.
    """

    block_size: Annotated[int, Field(description="Positions per block.")]
    groups: list[LayerGroup]
    bytes_total: int
    now: Sample
    reclaimed: Annotated[dict[str, int], Field(description="Blocks thrown away since the start, by reason.")]
    slabs: Slabs
    blocks: Blocks
    owners: list[Owner]
    readers: Annotated[list[list[str]], Field(description="Sets of running sequences, by `choices.name`.")]
    requests: list[LiveRequest]
    ended: Annotated[list[EndedRequest], Field(description="The last that came to an end.")]
    events: list[CacheEvent]


@router.get(
    "/cache", response_model=CachePicture, responses=errors_documented(403), summary="A picture of the cache"
)
async def cache_picture(request: Request) -> Response:
    """Every block of the arena: its state, whose it is, who reads it, and what it follows. No text and no tokens."""
    return Response(await feed_of(request.app).picture(), media_type="application/json")


@router.get("/cache/feed", include_in_schema=False)
async def cache_feed(request: Request) -> Response:
    """Server-sent events for the dashboard; what they hold may change with it."""
    return await stream(
        request,
        feed_of(request.app).watch(),
        failed=lambda error: event(orjson.dumps(error_body(error)), "failed"),
        send_timeout=request.app.state.octavo.config.send_timeout,
        dropped=lambda reason: None,
    )
