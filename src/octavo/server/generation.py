"""The one path from a checked request to the engine and back, whatever API it came by.

A snapshot of the engine holds all there is; `deltas` says what is new in it, `whole` waits for the last one. Both
remember what was said, so that the next turn of a conversation finds its blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from octavo.errors import RequestCancelled
from octavo.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from octavo.params import SamplingParams
from octavo.server.logs import begin, note, note_aborted
from octavo.server.state import ServerState

T = TypeVar("T")

_counting = ThreadPoolExecutor(1, "octavo-tokenize")


@dataclass(frozen=True)
class Job:
    """One prompt to be answered. `label` is what the dashboard and the log call it.

    `chat_text` is the rendered conversation that `prompt` is the ids of; None for a plain completion.
    """

    prompt: str | list[int]
    params: SamplingParams
    request_id: str
    tenant: str
    label: str | None = None
    chat_text: str | None = None

    @property
    def owner(self) -> tuple[str, str | None]:
        """Whose conversation it is."""
        return self.tenant, self.params.cache_salt


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice. The last one has a `finish_reason`, and `stop_reason` where there is one."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None


async def encode_chat(
    state: ServerState,
    messages: Sequence[Mapping[str, Any]],
    owner: tuple[str, str | None],
    *,
    exact: bool = False,
    **options: Any,
) -> tuple[str, list[int]]:
    """A conversation as the text that its template makes of it, and that text's token ids.

    Answers that were given to `owner` keep the ids they were generated with, unless the ids must be `exact`.
    `options` go to the template. Raises `InvalidRequest` where the template rejects the messages.
    """

    def encode() -> tuple[str, list[int]]:
        text = state.tokenizer.render_chat(messages, **options)
        state.engine.check_text(text)
        return text, state.turns.encode(text, owner, exact)

    return await state.engine.aside(encode)


async def count_chat(
    state: ServerState,
    messages: Sequence[Mapping[str, Any]],
    owner: tuple[str, str | None],
    **options: Any,
) -> list[int]:
    """The token ids that `encode_chat` gives, however many. Raises as it does."""
    return await count(lambda: state.turns.encode(state.tokenizer.render_chat(messages, **options), owner))


async def count(function: Callable[[], T]) -> T:
    """What `function` returns or raises in a thread for what is only counted, which delays no request's prompt."""
    return await asyncio.get_running_loop().run_in_executor(_counting, function)


async def deltas(state: ServerState, job: Job) -> AsyncGenerator[tuple[list[Delta], RequestOutput], None]:
    """What is new in each snapshot that has something new, and the snapshot.

    Raises the errors of the request, before the first item if it never began, and `RequestCancelled` where somebody
    else ended it. To close the iterator ends the request before the next step.
    """
    given: dict[int, _Given] = {}
    async with aclosing(_snapshots(state, job)) as snapshots:
        async for output in snapshots:
            new = _new(output, given)
            if new or output.finished:
                yield new, output


async def whole(state: ServerState, job: Job) -> RequestOutput:
    """The finished request. Raises as `deltas` does; cancelling it ends the request before the next step."""
    async with aclosing(_snapshots(state, job)) as snapshots:
        async for output in snapshots:
            if output.finished:
                return output
    raise RequestCancelled(f"request {job.request_id} has ended without an answer")


async def _snapshots(state: ServerState, job: Job) -> AsyncGenerator[RequestOutput, None]:
    begin(job.label)
    run = state.engine.generate(job.prompt, job.params, job.request_id, tenant=job.tenant, label=job.label)
    async with aclosing(run) as outputs:
        async for output in outputs:
            note(output)
            if any(answer.finish_reason == "abort" for answer in output.outputs):
                note_aborted("shutdown")
                raise RequestCancelled(f"request {job.request_id} was ended by the server")
            if output.finished and job.chat_text is not None:
                await _remember(state, job, job.chat_text, output)
            yield output


async def _remember(state: ServerState, job: Job, text: str, output: RequestOutput) -> None:
    """Before the answer is given: the next turn may follow at once."""

    def remember() -> None:
        for answer in output.outputs:
            state.turns.remember(text, output.prompt_token_ids + answer.token_ids, job.owner)

    await state.engine.aside(remember)


def deltas_of(output: RequestOutput) -> list[Delta]:
    """All there is in `output`, one for each choice: what a stream would have given in pieces."""
    return _new(output, {})


def _new(output: RequestOutput, given: dict[int, _Given]) -> list[Delta]:
    found = [given.setdefault(answer.index, _Given()).take(answer) for answer in output.outputs]
    return [delta for delta in found if delta is not None]


class _Given:
    """How much of one choice was given out."""

    def __init__(self) -> None:
        self._characters = 0
        self._tokens = 0
        self._finished = False

    def take(self, answer: CompletionOutput) -> Delta | None:
        """What `answer` has beyond that, None if nothing."""
        text, token_ids = answer.text[self._characters :], answer.token_ids[self._tokens :]
        if self._finished or not (text or token_ids or answer.finished):
            return None
        logprobs = None if answer.logprobs is None else answer.logprobs[self._tokens :]
        self._characters, self._tokens = len(answer.text), len(answer.token_ids)
        self._finished = answer.finished
        return Delta(answer.index, text, token_ids, logprobs, answer.finish_reason, answer.stop_reason)


async def together(works: Sequence[Awaitable[T]]) -> list[T]:
    """What `works` give, done at once. The first error ends the others and is raised."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """The items of all `sources`, none of them empty, as they come, each with the index of its source.

    Nothing is given before all have begun, so that what refuses one of them comes before any item. An error ends all.
    """
    items: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(
        1
    )  # a slow reader holds the sources
    all_began = asyncio.Event()

    async def pump(index: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await items.put((index, item))
                    await all_began.wait()
        except Exception as error:
            await items.put(error)
        else:
            await items.put(None)

    async def take() -> tuple[int, T] | None:
        item = await items.get()
        if isinstance(item, Exception):
            raise item
        return item

    tasks = [asyncio.ensure_future(pump(*pair)) for pair in enumerate(sources)]
    try:
        first = [await take() for _ in tasks]
        all_began.set()
        for item in first:
            assert item is not None
            yield item
        unfinished = len(tasks)
        while unfinished:
            if (item := await take()) is None:
                unfinished -= 1
            else:
                yield item
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
