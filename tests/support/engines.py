"""Running engines in tests: answers as plain values that can be compared bit for bit."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.config import EngineConfig
from octavo.engine import Engine
from octavo.live import LiveRequest
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams

Request = tuple[list[int], SamplingParams]


@dataclass(frozen=True)
class Answer:
    """All that must not depend on the schedule: ids, text, log-probs of every reported token."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None
    logprobs: tuple[tuple[tuple[int, float, int], ...], ...]
    cumulative: float | None


def answers(output: RequestOutput) -> list[Answer]:
    """One `Answer` per choice."""
    return [
        Answer(
            tuple(c.token_ids),
            c.text,
            c.finish_reason,
            tuple(
                tuple((token, entry.logprob, entry.rank) for token, entry in step.items())
                for step in c.logprobs or ()
            ),
            c.cumulative_logprob,
        )
        for c in output.outputs
    ]


def make_engine(model: object, *, fuse: bool = True, poison: bool | None = None, **options: Any) -> Engine:
    """An engine with a small cache, unless `options` say otherwise."""
    return Engine(
        EngineConfig.create(str(model), **{"kv_cache_memory": "8MiB", **options}), fuse=fuse, poison=poison
    )


def submit(engine: Engine, name: str, request: Request) -> LiveRequest:
    """Queue `request` under `name`."""
    live = engine.prepare(name, *request)
    engine.submit(live)
    return live


def finish(engine: Engine) -> None:
    """Step until nothing is left to do; the books must balance then."""
    while engine.has_work:
        engine.step()
    engine.check()


def together(engine: Engine, requests: Sequence[Request]) -> list[list[Answer]]:
    """Answers of `requests` served at once."""
    lives = [submit(engine, f"request {i}", request) for i, request in enumerate(requests)]
    finish(engine)
    assert all(live.error is None for live in lives)
    return [answers(live.output()) for live in lives]


def alone(engine: Engine, requests: Sequence[Request]) -> list[list[Answer]]:
    """Answers of `requests` served one after the other."""
    return [together(engine, [request])[0] for request in requests]


def shuffled(engine: Engine, requests: Sequence[Request], order: Sequence[int]) -> list[list[Answer]]:
    """Answers of `requests` served at once but arriving in another `order`."""
    found = together(engine, [requests[i] for i in order])
    return [answer for _, answer in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy decoding with log-probs, past any end token."""
    defaults = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, "logprobs": 2}
    return SamplingParams(**{**defaults, **options})


def varied(index: int, max_tokens: int) -> SamplingParams:
    """Both kinds in turn: greedy, with and without penalties, and seeded sampling with penalties."""
    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        {"repetition_penalty": 1.2},
        {"temperature": 1.3, "top_k": 40, "min_p": 0.02, "repetition_penalty": 1.1},
    ]
    return greedy(max_tokens, **kinds[index % len(kinds)], seed=1000 + index)
