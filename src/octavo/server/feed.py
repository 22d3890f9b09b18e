"""The feed: what happens in the cache, for all who watch.

One task looks at the engine, however many watch: about twice a second, less often where a look takes more than a
hundredth of the time. A watcher gets the whole picture and then what has changed since what it was sent last, so a
slow one gets fewer and larger changes, and nothing is queued for it. While nobody watches only a few counters are
read now and then, so that the first one to come sees the last minutes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any

import orjson

from octavo.aio import AsyncEngine
from octavo.errors import OctavoError, Overloaded
from octavo.server.moment import Json, Moment, change, columns_of, look, sample, whole
from octavo.server.sse import event

if TYPE_CHECKING:
    from fastapi import FastAPI

PERIOD_S = 0.5
LONGEST_PERIOD_S = 5.0
SHARE = 0.01
"""The most of the engine's time that looking at it may take."""
SAMPLES = 600
EVENTS = 400
WATCHERS = 32


class Ring:
    """The last items, each with a number that only grows."""

    def __init__(self, size: int) -> None:
        self._items: deque[Any] = deque(maxlen=size)
        self.count = 0

    def add(self, item: Any) -> None:
        self._items.append(item)
        self.count += 1

    def since(self, count: int) -> list[Any]:
        """Those that came after there were `count`, as far as they are still there."""
        items = list(self._items)
        return items[max(0, len(items) - (self.count - count)) :]


class Feed:
    """Begins in the running event loop and belongs to it. `closing` says when watchers are to be sent away."""

    def __init__(self, engine: AsyncEngine, closing: Callable[[], bool] = lambda: False) -> None:
        self.events = Ring(EVENTS)
        self.samples = Ring(SAMPLES)
        self._engine = engine
        self._closing = closing
        self._watchers = 0
        self._period = PERIOD_S
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
            took, moment = await self._engine.call(_timed_look)
            await asyncio.to_thread(lambda: moment.picture.rows)
            self._period = min(max(PERIOD_S, took / SHARE), LONGEST_PERIOD_S)
            for item in moment.events:
                self.events.add(item)
            self.samples.add(moment.sample)
            self._latest = moment
        return moment

    async def picture(self) -> bytes:
        """The answer of `/cache`."""
        moment = await self.look()
        recent = self.events.since(0)
        return await asyncio.to_thread(lambda: orjson.dumps({**whole(moment), "events": recent}))

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Events for one watcher: `picture`, then `change` after `change`. Raises `Overloaded` if too many watch."""
        if self._watchers >= WATCHERS:
            raise Overloaded(f"{WATCHERS} watch already; close another dashboard")
        self._watchers += 1
        self._came.set()
        try:
            sent = await self.look()
            history, events = columns_of(self.samples.since(0)), self.events.since(0)
            seen = self.samples.count, self.events.count
            first = {**whole(sent), "history": history, "events": events}
            yield event(await asyncio.to_thread(orjson.dumps, first), "picture")
            while not self._closing():
                await self._other_than(sent)
                latest = self._latest
                assert latest is not None
                more: Json = {
                    "history": columns_of(self.samples.since(seen[0])),
                    "events": self.events.since(seen[1]),
                }
                seen = self.samples.count, self.events.count
                before, sent = sent, latest
                yield event(await asyncio.to_thread(_dump_change, before, sent, more), "change")
        finally:
            self._watchers -= 1

    async def _run(self) -> None:
        try:
            while True:
                self._came.clear()
                if self._watchers:
                    await self.look()
                    self._tell()
                    await asyncio.sleep(self._period)
                else:
                    self.samples.add(await self._engine.call(sample))
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._came.wait(), LONGEST_PERIOD_S)
        except OctavoError as error:
            self._failure = error
            self._tell()

    async def _other_than(self, sent: Moment) -> None:
        while self._latest is sent and not self._closing():
            if self._failure is not None:
                raise self._failure
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), LONGEST_PERIOD_S)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


def feed_of(app: FastAPI) -> Feed:
    """The feed of `app`. The first call, in the event loop that serves it, starts it."""
    feed: Feed | None = getattr(app.state, "feed", None)
    if feed is None or feed.ended:
        state = app.state.octavo
        feed = app.state.feed = Feed(state.engine, lambda: state.draining)
    return feed


def _timed_look(engine: Any) -> tuple[float, Moment]:
    start = time.perf_counter()
    moment = look(engine)
    return time.perf_counter() - start, moment


def _dump_change(before: Moment, after: Moment, more: Json) -> bytes:
    return orjson.dumps({**change(before, after), **more})
