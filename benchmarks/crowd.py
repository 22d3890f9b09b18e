"""Many clients at once, who come back when they are told to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import httpx


@dataclass
class Tally:
    """What became of the requests of a crowd. `refusals` counts each 503; `lost` ended in anything else.

    `seconds` passed until the first client had nothing left to ask, and answers of so many `tokens` were complete by
    then: what comes later is the end of a crowd, and no crowd.
    """

    answers: int = 0
    tokens: int = 0
    refusals: int = 0
    lost: list[str] = field(default_factory=list)
    seconds: float | None = None

    @property
    def tokens_per_s(self) -> float:
        assert self.seconds is not None
        return self.tokens / self.seconds


def crowd(url: str, model: str, prompts: Sequence[list[int]], new: int, clients: int) -> Tally:
    """`clients` at a time ask for completions of `new` tokens until all `prompts` are answered. One that is refused
    waits as long as `Retry-After` says and asks again."""
    return asyncio.run(_crowd(url, model, prompts, new, clients))


async def _crowd(url: str, model: str, prompts: Sequence[list[int]], new: int, clients: int) -> Tally:
    tally = Tally()
    left = iter(prompts)
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits, trust_env=False) as http:
        start = time.perf_counter()
        for client in asyncio.as_completed(_client(http, model, left, new, tally) for _ in range(clients)):
            await client
            if tally.seconds is None:
                tally.seconds = time.perf_counter() - start
    return tally


async def _client(
    http: httpx.AsyncClient, model: str, left: Iterator[list[int]], new: int, tally: Tally
) -> None:
    for prompt in left:
        body = {"model": model, "prompt": prompt, "max_tokens": new, "ignore_eos": True, "temperature": 0}
        while True:
            response = await http.post("/v1/completions", json=body)
            if response.status_code != 503 or "retry-after" not in response.headers:
                break
            tally.refusals += 1
            await asyncio.sleep(float(response.headers["retry-after"]))
        if response.status_code == 200:
            tally.answers += 1
            if tally.seconds is None:
                tally.tokens += response.json()["usage"]["completion_tokens"]
        else:
            tally.lost.append(f"{response.status_code}: {response.text[:200]}")
