"""One moment of engine and cache, as JSON: whole, or as what has changed since an earlier one.

Blocks travel as columns. Owners and sets of readers are lists of their own that the columns point into (-1: nobody),
and belong to one message only. Moments in time are Unix times. There is no prompt, no answer and no token id in it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from octavo.cache.blocks import Owner
from octavo.cache.events import Event
from octavo.cache.layout import CacheLayout
from octavo.cache.picture import Picture, Row, take
from octavo.engine import Engine
from octavo.schedule.request import Request, Sequence

if TYPE_CHECKING:
    from octavo.server.witness import Witness

Json = dict[str, Any]
T = TypeVar("T", bound=Hashable)

SHOWN = 64
"""How many waiting sequences are shown; those that run are shown all."""
EPOCH = time.time() - time.monotonic()
_PLAIN = (
    "offset",
    "nbytes",
    "group",
    "state",
    "format",
    "depth",
    "filled",
    "refs",
    "uses",
    "priority",
    "exact",
)


@dataclass(frozen=True)
class Moment:
    """`requests` are the running and the first waiting ones by id, `sample` are gauges and counters since the start,
    `events` and `ended` what happened, and which requests came to an end, since the moment before."""

    picture: Picture
    layout: CacheLayout
    requests: dict[str, Json]
    sample: Json
    events: list[Event]
    ended: list[Json]


def look(engine: Engine, witness: Witness) -> Moment:
    """The moment now. Call it in the engine's thread. Takes the engine's events, so only one may look."""
    scheduler = engine.scheduler
    running = scheduler.running
    shown = {s.request.request_id: s.request for s in [*running, *scheduler.waiting[:SHOWN]]}
    return Moment(
        picture=take(engine.cache, ((_name(sequence), sequence.lease) for sequence in running)),
        layout=engine.layout,
        requests={name: request_now(request) for name, request in shown.items()},
        sample=sample(engine, witness),
        events=engine.events(),
        ended=witness.take_ended(),
    )


def sample(engine: Engine, witness: Witness) -> Json:
    """Gauges and counters alone. Call it in the engine's thread."""
    stats, totals = engine.stats(), engine.totals()
    return {
        "time": unix(engine.cache.clock()),
        "running": totals.running,
        "waiting": totals.waiting,
        "bytes_free": stats.bytes_free,
        "bytes_running": stats.bytes_running,
        "bytes_cached": stats.bytes_cached,
        "bytes_pinned": stats.bytes_pinned,
        "steps": engine.steps,
        "reused_tokens": totals.reused_tokens,
        "computed_tokens": totals.computed_tokens,
        "recomputed_tokens": totals.recomputed_tokens,
        "generated_tokens": totals.generated_tokens,
        "preemptions": totals.preemptions,
        "reclaimed_blocks": sum(totals.reclaimed_blocks.values()),
        "first_tokens": witness.first_tokens,
        "first_token_seconds": witness.first_token_seconds,
        "token_gaps": witness.gaps,
        "token_gap_seconds": witness.gap_seconds,
    }


def whole(moment: Moment) -> Json:
    """All of `moment` but its events."""
    layout = moment.layout
    return {
        "block_size": layout.block_size,
        "groups": [
            {
                "layers": list(group.layers),
                "num_kv_heads": group.num_kv_heads,
                "head_dim": group.head_dim,
                "window": group.window,
                "block_bytes": layout.block_bytes(g),
                "sealed_bytes": layout.sealed_sizes_bytes[g],
            }
            for g, group in enumerate(layout.groups)
        ],
        "bytes_total": moment.picture.stats.bytes_total,
        **_now(moment),
        **_columns(sorted(moment.picture.rows.values())),
        "requests": list(moment.requests.values()),
    }


def change(before: Moment, after: Moment) -> Json:
    """What turns `before` into `after`: blocks that are new or differ, offsets of those that are `gone`, and the same
    of requests."""
    old, new = before.picture.rows, after.picture.rows
    return {
        **_now(after),
        **_columns([row for offset, row in new.items() if old.get(offset) != row]),
        "gone": [offset for offset in old if offset not in new],
        "requests": [r for name, r in after.requests.items() if before.requests.get(name) != r],
        "left": [name for name in before.requests if name not in after.requests],
    }


def unix(clock: float) -> float:
    """A moment on the engine's clock as Unix time, to the millisecond."""
    return round(EPOCH + clock, 3)


def _now(moment: Moment) -> Json:
    slabs = moment.picture.slabs
    return {
        "now": moment.sample,
        "reclaimed": moment.picture.reclaimed,
        "slabs": {
            "start": [start for start, _, _ in slabs],
            "block_bytes": [nbytes for _, nbytes, _ in slabs],
            "count": [count for _, _, count in slabs],
        },
    }


class _Table(Generic[T]):
    """Values by number, each once; empty ones are -1."""

    def __init__(self) -> None:
        self.numbers: dict[T, int] = {}

    def __call__(self, value: T) -> int:
        return self.numbers.setdefault(value, len(self.numbers)) if value else -1


def _columns(rows: Iterable[Row]) -> Json:
    owners: _Table[Owner] = _Table()
    readers: _Table[tuple[str, ...]] = _Table()
    rows = list(rows)
    columns: dict[str, list[Any]] = {name: [getattr(row, name) for row in rows] for name in _PLAIN}
    columns["parent"] = [-1 if row.parent is None else row.parent for row in rows]
    columns["owner"] = [owners(row.owner) for row in rows]
    columns["readers"] = [readers(row.holders) for row in rows]
    for name in ("used_at", "pinned_until"):
        moments = (getattr(row, name) for row in rows)
        columns[name] = [None if moment is None else unix(moment) for moment in moments]
    return {
        "blocks": columns,
        "owners": [owner._asdict() for owner in owners.numbers],
        "readers": list(readers.numbers),
    }


def _name(sequence: Sequence) -> str:
    request = sequence.request
    return request.request_id if request.n == 1 else f"{request.request_id}#{sequence.index}"


def request_now(request: Request) -> Json:
    """A request and its receipt so far."""
    params = request.params
    return {
        "id": request.request_id,
        "tenant": request.namespace.tenant,
        "label": request.label,
        "priority": request.priority,
        "arrived_at": unix(request.arrived_at),
        "max_tokens": None if params is None else params.max_tokens,
        "choices": [
            {
                "name": _name(sequence),
                "status": "preempted" if sequence.preempted else sequence.status.value,
                "tokens": len(sequence.token_ids),
                "computed": sequence.num_computed,
            }
            for sequence in request.sequences
        ],
        "receipt": request.receipt.to_dict(),
    }


def merged(events: Iterable[Event]) -> list[Json]:
    """Events as JSON, those of blocks with the same reason and owner as one, with a count."""
    merged: dict[Hashable, Json] = {}
    for number, event in enumerate(events):
        about_block = bool(event.digest)
        key = (event.kind, event.reason, event.owner) if about_block else number
        known = merged.get(key)
        if known is None:
            merged[key] = {
                "time": unix(event.time),
                "kind": event.kind,
                "reason": event.reason,
                "request_id": event.request_id,
                "owner": None if event.owner is None else event.owner._asdict(),
                "blocks": int(about_block),
                "tokens": event.tokens,
            }
        else:
            known["time"] = unix(event.time)
            known["blocks"] += 1
            known["tokens"] += event.tokens
    return list(merged.values())


def columns_of(samples: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Samples as one list per name."""
    columns: dict[str, list[Any]] = {}
    for values in samples:
        for name, value in values.items():
            columns.setdefault(name, []).append(value)
    return columns
