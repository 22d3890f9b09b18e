"""The engine for asyncio: one thread runs the loop, everybody else sends it calls and reads snapshots.

    generate ─ prepare (door) ─ submit ─▶ inbox ─▶ engine thread: calls, step, calls, step ... ─▶ stream ─▶ iterator

The engine is made, used and dropped in its own thread, so nothing in it needs a lock, and the thread pool's size,
which torch keeps per calling thread, is set where it counts. With nothing to do the thread sleeps in its inbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
import traceback
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from octavo.config import EngineConfig
from octavo.door import Prompt
from octavo.engine import Engine, EngineStats
from octavo.errors import ConfigError, InvalidRequest, OctavoError, RequestCancelled
from octavo.live import LiveRequest
from octavo.model.pull import Notice
from octavo.outputs import CompletionOutput, RequestOutput
from octavo.params import SamplingParams
from octavo.schedule.full import FullQueue
from octavo.watch import EngineTotals, Health, Observer

logger = logging.getLogger("octavo")

T = TypeVar("T")


class AsyncEngine:
    """A model, loaded and ready, for many requests at once. An async context manager.

    `model` is an `EngineConfig`, or MODEL with the options of one. The constructor blocks until the model is loaded;
    raises what `Engine` raises. All but `generate` may be used from any thread or event loop.
    """

    def __init__(self, model: EngineConfig | str, *, notice: Notice | None = None, **options: Any) -> None:
        if isinstance(model, EngineConfig) and options:
            raise ConfigError(f"options {', '.join(options)} belong into the EngineConfig that was given")
        self.config = model if isinstance(model, EngineConfig) else EngineConfig.create(model, **options)
        self._names = itertools.count()
        self._lock = threading.Lock()  # nothing enters the inbox or a thread after _ended is set
        self._ended: Callable[[], OctavoError] | None = None
        self._inbox: SimpleQueue[_Call[Any] | None] = SimpleQueue()
        self._streams: dict[str, _Stream] = {}  # the engine thread's own
        # Steps done, when there was progress, whether there is work: written by the engine thread, all at once.
        self._progress = (0, time.monotonic(), False)
        # By which requests are turned away that come now; None too while some are `_leaving`, who may make room.
        self._full: FullQueue | None = None
        self._leaving = 0
        self._turned_away: list[float] = []  # intervals of those the engine thread has not counted yet
        # One thread encodes prompts in the order they came; a long one delays no step.
        self._door = ThreadPoolExecutor(1, "octavo-door")
        # Another one compiles forms; a costly one delays no prompt that has none.
        self._forms = ThreadPoolExecutor(1, "octavo-forms")
        started: Future[Engine] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(notice, started), name="octavo-engine", daemon=True
        )
        self._thread.start()
        try:
            self._engine: Engine | None = started.result()
        except BaseException:  # Ctrl-C while it loads, too
            self._inbox.put(None)
            raise
        self.tokenizer = self._engine.tokenizer

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tenant: str | None = None,
        label: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Snapshots of one request, each with all that came so far; the last one is `finished`.

        Steps are merged when the reader is slow. Raises the errors of this request: `InvalidRequest` (also for an id
        in use), `Overloaded`, and `OctavoError` if the engine ends before it. Leaving or cancelling the iterator
        aborts the request. An id is made up where none is given; `tenant` and `label` as in `Engine.prepare`.
        """
        name = f"request-{next(self._names)}" if request_id is None else request_id
        if not isinstance(name, str):
            raise InvalidRequest(f"request_id={name!r} is not a string", param="request_id")
        self._turn_away_if_full()
        own = SamplingParams() if params is None else params
        arrived = time.monotonic()
        grammar = None
        if isinstance(own, SamplingParams) and (form := own.structured_outputs) is not None:
            grammar = await self._at(self._forms, lambda engine: engine.door.compile(form))
        prepared = await self._at(
            self._door,
            lambda engine: engine.prepare(name, prompt, own, tenant=tenant, label=label, grammar=grammar),
        )
        prepared.arrived = arrived
        stream = _Stream(asyncio.get_running_loop(), prepared)
        ended = False
        try:
            await self.call(lambda engine: self._submit(engine, stream))
            while not ended:
                output = await stream.take()
                ended = output.finished
                yield output
        except OctavoError:
            ended = True
            raise
        finally:
            if not ended:
                self._send_away(lambda engine: self._leave(engine, stream))

    def abort(self, request_id: str) -> None:
        """End a request before the next step; no error if there is none.

        Its iterator gives one more snapshot, with `finish_reason` `abort`, and ends.
        """
        self._send_away(lambda engine: self._abort(engine, request_id))

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What `function` returns or raises when it is called with the engine, between two steps."""
        return await asyncio.wrap_future(self._send(function))

    def ask(self, function: Callable[[Engine], T]) -> Future[T]:
        """As `call`, for those who are in no event loop."""
        return self._send(function)

    async def aside(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises in the thread that encodes prompts, off the event loop and beside the
        steps: for chat templates and text. Raises what ended the engine once it has ended."""
        return await self._at(self._door, lambda _: function())

    def check_text(self, text: str) -> None:
        """Raises `ContextLengthExceeded` if `text` is so long that it need not be encoded to be refused."""
        if (engine := self._engine) is not None:
            engine.door.check_text(text)

    def health(self) -> Health:
        """Whether work goes on, seen from outside: answers at once, whatever the engine thread is doing."""
        steps, since, busy = self._progress
        ended = self._ended
        return Health(
            steps=steps,
            seconds_since_progress=max(0.0, time.monotonic() - since),
            has_work=ended is None and busy,
            failed=None if ended is None else str(ended()),
        )

    async def totals(self) -> EngineTotals:
        """What has been done since the engine began."""
        return await self.call(Engine.totals)

    def observe(self, observer: Observer) -> None:
        """Tell `observer` from the next step on, in the engine's thread, and nobody else."""
        self._send(lambda engine: engine.observe(observer))

    async def reset_prefix_cache(self) -> int:
        """Forget every published block, while requests run too. Returns how many were forgotten."""
        return await self.call(Engine.reset_prefix_cache)

    async def stats(self) -> EngineStats:
        """The account of the cache now."""
        return await self.call(Engine.stats)

    async def check(self) -> None:
        """Raises `BooksDoNotBalance` if the conservation law of the cache does not hold."""
        await self.call(Engine.check)

    def close(self) -> None:
        """End the engine after the step it is in; open iterators raise `RequestCancelled`. Idempotent."""
        self._inbox.put(None)
        self._thread.join()
        self._door.shutdown()
        self._forms.shutdown()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)

    shutdown = close  # vLLM's name for it

    async def _at(self, thread: ThreadPoolExecutor, function: Callable[[Engine], T]) -> T:
        def enter() -> T:
            engine = self._engine
            if engine is None:
                assert self._ended is not None
                raise self._ended()
            return function(engine)

        with self._lock:
            if self._ended is not None:
                raise self._ended()
            entered = asyncio.get_running_loop().run_in_executor(thread, enter)
        return await entered

    def _send(self, function: Callable[[Engine], T]) -> Future[T]:
        call = _Call(function)
        with self._lock:
            if self._ended is None:
                self._inbox.put(call)
            else:
                call.future.set_exception(self._ended())
        return call.future

    def _send_away(self, function: Callable[[Engine], None]) -> None:
        """Send what ends a request. Until it is done nobody is turned away for what was seen before it."""

        def leave(engine: Engine) -> None:
            with self._lock:
                self._leaving -= 1
            function(engine)

        with self._lock:
            self._leaving += 1
            self._full = None
        self._send(leave)

    def _turn_away_if_full(self) -> None:
        """Raises `Overloaded` where the queue is seen to be full, so that a crowd costs the steps next to nothing."""
        with self._lock:
            if (full := self._full) is None:
                return
            number = len(self._turned_away)
            self._turned_away.append(full.interval_s)
        raise full.refusal(number)

    def _look_at_queue(self, engine: Engine) -> None:
        """Count those who were turned away, and say whether more are from now on."""
        scheduler = engine.scheduler
        with self._lock:
            if self._turned_away:
                scheduler.turn_away(len(self._turned_away), sum(self._turned_away))
                self._turned_away.clear()
            self._full = None if self._leaving else scheduler.full()

    def _run(self, notice: Notice | None, started: Future[Engine]) -> None:
        """The engine thread, from loading to the end."""
        try:
            engine = Engine(self.config, notice=notice)
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(engine)
        del started  # its result would keep the arena
        ended: Callable[[], OctavoError] = _closed
        try:
            while self._obey(engine):
                self._step(engine)
        except Exception as error:
            logger.exception("the engine has failed")
            traceback.clear_frames(error.__traceback__)  # so would they
            ended = _failed(error)
        del engine
        self._end(ended)

    def _obey(self, engine: Engine) -> bool:
        """Make the calls that wait; sleep while there is nothing to compute. False when it is time to end."""
        waiting = (
            self._inbox.qsize()
        )  # those that come meanwhile wait for the next step, or there might never be one
        while waiting > 0 or not engine.has_work:
            idle = not engine.has_work
            if not self._make_call(engine, idle):
                return False
            waiting = self._inbox.qsize() if idle else waiting - 1
        return True

    def _make_call(self, engine: Engine, idle: bool) -> bool:
        """In a method of its own, so that a thread that sleeps holds on to nothing."""
        call = self._inbox.get()
        if call is None:
            return False
        if idle:
            self._progress = (engine.steps, time.monotonic(), True)
        self._look_at_queue(engine)
        call.make(engine)
        if not engine.has_work:
            self._progress = (engine.steps, time.monotonic(), False)
        return True

    def _step(self, engine: Engine) -> None:
        news = engine.step()
        self._look_at_queue(engine)  # before anybody learns of the room that an answer has left
        for live in news:
            self._deliver(live)
        steps, since, _ = self._progress
        if engine.steps > steps:
            since = time.monotonic()
        self._progress = (engine.steps, since, engine.has_work)

    def _end(self, ended: Callable[[], OctavoError]) -> None:
        with self._lock:
            self._ended, self._full = ended, None
        self._engine = None
        while not self._inbox.empty():
            if (call := self._inbox.get()) is not None:
                call.fail(ended())
        for stream in self._streams.values():
            stream.fail(ended())
        self._streams.clear()

    def _submit(self, engine: Engine, stream: _Stream) -> None:
        engine.submit(stream.live)
        self._streams[stream.live.request.request_id] = stream

    def _deliver(self, live: LiveRequest) -> None:
        name = live.request.request_id
        stream = self._streams.pop(name) if live.finished else self._streams[name]
        if live.error is not None:
            stream.fail(live.error)
        else:
            stream.put(live.output())

    def _abort(self, engine: Engine, request_id: str) -> None:
        live = engine.abort(request_id)
        if live is None:
            return
        output = live.output()
        if not output.outputs:  # it was still waiting, or reading its prompt
            output.outputs = [
                CompletionOutput(index, "", [], finish_reason="abort") for index in range(live.params.n)
            ]
        self._streams.pop(request_id).put(output)

    def _leave(self, engine: Engine, stream: _Stream) -> None:
        """Nobody reads `stream` any more."""
        name = stream.live.request.request_id
        if self._streams.get(name) is stream:
            del self._streams[name]
            engine.abort(name)


class _Call(Generic[T]):
    """A function to be called with the engine, and the future of its result."""

    def __init__(self, function: Callable[[Engine], T]) -> None:
        self.future: Future[T] = Future()
        self._function = function

    def make(self, engine: Engine) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self._function(engine)
        except Exception as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)

    def fail(self, error: OctavoError) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class _Stream:
    """Between the engine thread, which puts, and the event loop of one reader, which takes.

    Only the newest snapshot is kept: it has all that the older ones had.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, live: LiveRequest) -> None:
        self.live = live
        self._loop = loop
        self._lock = threading.Lock()
        self._output: RequestOutput | None = None
        self._error: OctavoError | None = None
        self._news = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        with self._lock:
            known, self._output = self._output is not None, output
        if not known:
            self._wake()

    def fail(self, error: OctavoError) -> None:
        """What was put before is still taken first."""
        with self._lock:
            self._error = error
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # the reader's event loop is closed
            self._loop.call_soon_threadsafe(self._news.set)

    async def take(self) -> RequestOutput:
        """The newest snapshot, once there is one that was not taken yet. Raises the request's error."""
        while True:
            await self._news.wait()
            with self._lock:
                output, self._output = self._output, None
                if output is not None:
                    return output
                if self._error is not None:
                    raise self._error
                self._news.clear()


def _closed() -> OctavoError:
    return RequestCancelled("the engine is closed; make a new one")


def _failed(cause: Exception) -> Callable[[], OctavoError]:
    def error() -> OctavoError:
        error = OctavoError(f"the engine has failed ({type(cause).__name__}: {cause}); make a new one")
        error.__cause__ = cause
        return error

    return error
