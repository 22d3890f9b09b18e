"""What the scheduler knows of a request: its tokens, its importance, and what it holds."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from octavo.cache.blocks import BlockTable, Lease
from octavo.cache.dropping import DropRule
from octavo.cache.hashing import Namespace
from octavo.cache.receipt import Receipt

if TYPE_CHECKING:
    from octavo.params import SamplingParams


_REASONS = ("stop", "length", "error", "abort")


def _gravity(reason: str) -> int:
    return _REASONS.index(reason) if reason in _REASONS else -1


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False, slots=True)
class Request:
    """One prompt and how to treat it. A smaller `priority` is more important; `arrival` orders equals.

    `cache_ttl` pins what it leaves behind, or its first `cache_ttl_tokens` prompt tokens as soon as they are computed.
    `reuse=False` computes every prompt token (e.g. to return prompt log-probs). `drops` is the rule by which its
    sequences drop context; they then have no limit of length. `label` is a name of the client's for those who
    look on. Label and `params` are carried for others; the scheduler reads nothing of them. `place` sequences waited
    when it came.
    """

    request_id: str
    arrival: int
    prompt_token_ids: Tokens[int]
    n: int = 1
    priority: int = 0
    namespace: Namespace = field(default_factory=Namespace)
    cache_ttl: float | None = None
    cache_ttl_tokens: int | None = None
    exact: bool = False
    reuse: bool = True
    drops: DropRule | None = None
    seed: int | None = None
    params: SamplingParams | None = None
    label: str | None = None
    receipt: Receipt = field(init=False)
    sequences: list[Sequence] = field(init=False, default_factory=list)
    arrived_at: float = field(init=False, default=0.0)
    place: int = field(init=False, default=0)
    admitted_at: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.receipt = Receipt(prompt_tokens=len(self.prompt_token_ids), seed=self.seed)

    @property
    def finished(self) -> bool:
        return bool(self.sequences) and all(s.status is Status.FINISHED for s in self.sequences)

    @property
    def finish_reason(self) -> str | None:
        """Why it ended: of the reasons of its choices the gravest; None while one of them goes on."""
        return max((s.finish_reason or "" for s in self.sequences), key=_gravity) if self.finished else None


class Sequence:
    """One choice of a request. `token_ids` is the prompt and all generated tokens; the last sampled one is
    not computed until the next step, so `num_computed <= len(token_ids) - 1` between steps once the prompt is
    done.

    `order` sorts by importance, most important first. `ever_computed` is the most positions that were ever
    computed, before preemptions too.
    """

    __slots__ = (
        "blocked_on",
        "ever_computed",
        "filling",
        "finish_reason",
        "index",
        "lease",
        "order",
        "preempted",
        "request",
        "status",
        "token_ids",
    )

    def __init__(self, request: Request, index: int, token_ids: Tokens[int], lease: Lease) -> None:
        self.request = request
        self.index = index
        self.token_ids = list(token_ids)
        self.lease = lease
        self.order = (request.priority, request.arrival, request.request_id, index)
        self.status = Status.WAITING
        self.finish_reason: str | None = None
        self.ever_computed = 0
        self.preempted = False
        self.filling = 0
        self.blocked_on: bytes | None = None

    @property
    def num_computed(self) -> int:
        """Positions whose K and V are in the cache."""
        return self.lease.computed

    @property
    def tables(self) -> tuple[BlockTable, ...]:
        """Block table by layer group. Offsets may change between steps, never during one."""
        return self.lease.tables

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens (a copy)."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    def __repr__(self) -> str:
        name = f"{self.request.request_id}#{self.index}"
        return f"<Sequence {name} {self.status.value} {self.num_computed}/{len(self.token_ids)}>"
