"""The feed: what happens in the cache, for all who watch.

However many watch or ask for a picture, the engine is looked at about twice a second at most, less often where that,
and what is made of it, takes more than a hundredth of the time. A watcher gets the whole picture and then what has
changed since what it was sent last, so a slow one gets fewer and larger changes, and nothing is queued for it. While
nobody watches only a few counters are read now and then, so that the first one to come sees the last minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

import orjson

from octavo.aio import AsyncEngine
from octavo.errors import OctavoError, Overloaded
from octavo.server.moment import Json, Moment, change, columns_of, look, merged, sample, whole
from octavo.server.problems import internal
from octavo.server.sse import event
from octavo.server.witness import ENDED, Witness

if TYPE_CHECKING:
    from fastapi import FastAPI

    from octavo.engine import Engine

logger = logging.getLogger("octavo")

T = TypeVar("T")

PERIOD_S = 0.5
LONGEST_PERIOD_S = 5.0
SHARE = 0.01
"""The most of the time that looking at the engine may take, where `LONGEST_PERIOD_S` is enough for that."""
SAMPLES = 600
EVENTS = 400
WATCHERS = 32


class Ring:
    """The last `size` items."""

    def __init__(self, size: int) -> None:
        self._items: deque[Any] = deque(maxlen=size)
        self.count = 0

    def add(self, items: Iterable[Any]) -> None:
        for item in items:
            self._items.append(item)
            self.count += 1

    def since(self, count: int) -> list[Any]:
        """Those that came after there were `count`, as far as they are still there."""
        items = list(self._items)
        return items[max(0, len(items) - (self.count - count)) :]


class Recent:
    """What a watcher is sent besides the blocks: what happened of late, and counters over the last minutes."""

    def __init__(self) -> None:
        self.samples, self.events, self.ended = Ring(SAMPLES), Ring(EVENTS), Ring(ENDED)

    def add(self, moment: Moment, events: list[Json]) -> None:
        """Keep what is new in `moment`, whose events these are."""
        self.samples.add([moment.sample])
        self.events.add(events)
        self.ended.add(moment.ended)

    @property
    def counts(self) -> tuple[int, int, int]:
        """How much there has been."""
        return self.samples.count, self.events.count, self.ended.count

    def since(self, counts: tuple[int, int, int]) -> Json:
        """What came after there was so much."""
        return {
            "history": columns_of(self.samples.since(counts[0])),
            "events": self.events.since(counts[1]),
            "ended": self.ended.since(counts[2]),
        }


NOTHING = (0, 0, 0)


class Feed:
    """Begins in the running event loop and belongs to it. `closing` says when watchers are to be sent away."""

    def __init__(
        self, engine: AsyncEngine, witness: Witness, closing: Callable[[], bool] = lambda: False
    ) -> None:
        self._engine = engine
        self._witness = witness
        self._recent = Recent()
        self._closing = closing
        self._watchers = 0
        self._period = PERIOD_S
        self._looked_at = -LONGEST_PERIOD_S
        self._cost_s = 0.0  # since then, what kept the engine, or the interpreter, from other work
        self._latest: Moment | None = None
        self._failure: OctavoError | None = None
        self._one_look = asyncio.Lock()
        self._came = asyncio.Event()
        self._news = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def ended(self) -> bool:
        """Whether it looks no more: its event loop is gone, or its engine."""
        return self._task.done() or self._task.get_loop().is_closed()

    async def look(self) -> Moment:
        """A new moment, for one or for all. Raises `OctavoError` if the engine has ended."""
        async with self._one_look:
            return await self._look()

    async def _look(self) -> Moment:
        self._looked_at = time.monotonic()
        took, moment = await self._engine.call(self._timed_look)
        events = await self._aside(_digest, moment)
        cost, self._cost_s = took + self._cost_s, 0.0
        self._period = min(max(PERIOD_S, cost / SHARE), LONGEST_PERIOD_S)
        self._recent.add(moment, events)
        self._latest = moment
        return moment

    async def _moment(self, oldest: float) -> Moment:
        """One not older than `oldest`, for all who ask meanwhile; it comes when it is time to look again."""
        async with self._one_look:
            if self._latest is not None and self._looked_at >= oldest:
                return self._latest
            await asyncio.sleep(self._looked_at + self._period - time.monotonic())
            return await self._look()

    async def _aside(self, function: Callable[..., T], *args: object) -> T:
        cost, result = await asyncio.to_thread(_timed, function, *args)
        self._cost_s += cost
        return result

    async def picture(self) -> bytes:
        """The answer of `/cache`, as it is after it was asked for."""
        moment = await self._moment(time.monotonic())
        recent = self._recent.since(NOTHING)
        del recent["history"]
        return await self._aside(_dump_whole, moment, recent)

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events for one watcher: `picture`, then `change` after `change`. Raises `Overloaded` if too many watch."""
        if self._watchers >= WATCHERS:
            raise Overloaded(f"{WATCHERS} watch already; close another dashboard")
        self._watchers += 1
        self._came.set()
        try:
            sent = await self._moment(time.monotonic() - self._period)
            recent, seen = self._recent.since(NOTHING), self._recent.counts
            yield event(await self._aside(_dump_whole, sent, recent), "picture")
            while not self._closing():
                await self._other_than(sent)
                latest = self._latest
                assert latest is not None
                recent, seen = self._recent.since(seen), self._recent.counts
                before, sent = sent, latest
                yield event(await self._aside(_dump_change, before, sent, recent), "change")
        finally:
            self._watchers -= 1

    async def _run(self) -> None:
        try:
            while True:
                self._came.clear()
                if self._watchers:
                    await self._moment(time.monotonic())
                    self._tell()
                else:
                    self._latest = None  # as large as the cache has blocks
                    self._recent.samples.add([await self._engine.call(self._sample)])
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._came.wait(), LONGEST_PERIOD_S)
        except OctavoError as error:
            self._failure = error
        except Exception:
            logger.exception("the feed of the cache has failed")
            self._failure = internal()
        self._tell()

    async def _other_than(self, sent: Moment) -> None:
        while self._latest is sent and not self._closing():
            if self._failure is not None:
                raise self._failure
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LONGEST_PERIOD_S)

    def _timed_look(self, engine: Engine) -> tuple[float, Moment]:
        start = time.perf_counter()
        moment = look(engine, self._witness)
        return time.perf_counter() - start, moment

    def _sample(self, engine: Engine) -> Json:
        return sample(engine, self._witness)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def feed_of(app: FastAPI) -> Feed:
    """The feed of `app`. The first call, in the event loop that serves it, starts it."""
    feed: Feed | None = getattr(app.state, "feed", None)
    if feed is None or feed.ended:
        state = app.state.octavo
        feed = app.state.feed = Feed(state.engine, state.witness, lambda: state.draining)
    return feed


def _timed(function: Callable[..., T], *args: object) -> tuple[float, T]:
    start = time.thread_time()
    result = function(*args)
    return time.thread_time() - start, result


def _digest(moment: Moment) -> list[Json]:
    """What need not be done while the engine waits: the rows, which the moment keeps, and the events."""
    _ = moment.picture.rows
    return merged(moment.events)


def _dump_whole(moment: Moment, recent: Json) -> bytes:
    return orjson.dumps({**whole(moment), **recent})


def _dump_change(before: Moment, after: Moment, recent: Json) -> bytes:
    return orjson.dumps({**change(before, after), **recent})
