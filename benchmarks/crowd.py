"""Many clients at once, who come back when they are told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import httpx


@dataclass
class Tally:
    """What became of the requests of a crowd. `refusals` counts each 503; `lost` ended in anything else."""

    answers: int = 0
    tokens: int = 0
    refusals: int = 0
    lost: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


Question = tuple[list[int], int]
"""A prompt, and how many tokens to answer."""


def crowd(url: str, model: str, questions: Sequence[Question], clients: int) -> Tally:
    """`clients` at a time ask for completions until all `questions` are answered. One that is refused waits as long as
    `Retry-After` says and asks again."""
    return asyncio.run(_crowd(url, model, questions, clients))


async def _crowd(url: str, model: str, questions: Sequence[Question], clients: int) -> Tally:
    tally = Tally()
    left = iter(questions)
    async with AsyncExitStack() as stack:
        # A connection each: a pool that they share looks at all of its connections for every request.
        https = [await stack.enter_async_context(_connection(url)) for _ in range(clients)]
        start = time.perf_counter()
        await asyncio.gather(*(_client(http, model, left, tally) for http in https))
        tally.seconds = time.perf_counter() - start
    return tally


def _connection(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, verify=False)


async def _client(http: httpx.AsyncClient, model: str, left: Iterator[Question], tally: Tally) -> None:
    for prompt, new in left:
        body = {"model": model, "prompt": prompt, "max_tokens": new, "ignore_eos": True, "temperature": 0}
        while True:
            response = await http.post("/v1/completions", json=body)
            if response.status_code != 503 or "retry-after" not in response.headers:
                break
            tally.refusals += 1
            await asyncio.sleep(float(response.headers["retry-after"]))
        if response.status_code == 200:
            tally.answers += 1
            tally.tokens += response.json()["usage"]["completion_tokens"]
        else:
            tally.lost.append(f"{response.status_code}: {response.text[:200]}")
