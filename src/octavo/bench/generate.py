"""One greedy generation three ways, timed token by token: no cache, transformers' cache, Octavo."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from octavo.bench.baseline import Baseline
from octavo.bench.work import ModelWork, Work
from octavo.engine import Engine
from octavo.params import SamplingParams


@dataclass(frozen=True)
class Generation:
    """The tokens of one run and when each came: `seconds[i]` passed between token i - 1 (or the start) and i.

    `prefill` and `decode` are the work until the first token and after it; `positions[i]` is how many positions were
    computed for token i.
    """

    name: str
    token_ids: list[int]
    seconds: list[float]
    positions: list[int]
    prefill: Work
    decode: Work

    @property
    def total_s(self) -> float:
        """Seconds of the whole run."""
        return sum(self.seconds)

    @property
    def decode_s(self) -> float:
        """Seconds after the first token."""
        return sum(self.seconds[1:])

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, prompt included in the time."""
        return len(self.token_ids) / self.total_s


def greedy(tokens: int) -> SamplingParams:
    """`tokens` greedy tokens, whatever the model wants to say."""
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)


def timed(count: int, next_token: Callable[[int], int]) -> tuple[list[int], list[float]]:
    """Call `next_token(i)` for i below `count`; returns tokens and the seconds each call took."""
    tokens, seconds = [], []
    for i in range(count):
        start = time.perf_counter()
        tokens.append(next_token(i))
        seconds.append(time.perf_counter() - start)
    return tokens, seconds


def without_cache(engine: Engine, work: ModelWork, prompt: list[int], count: int) -> Generation:
    """Octavo's own kernels, everything recomputed for every token. `engine` caches no prefixes."""
    known = list(prompt)

    def next_token(_: int) -> int:
        known.append(answer(engine, known, 1)[0])
        return known[-1]

    token_ids, seconds = timed(count, next_token)
    lengths = range(len(prompt), len(prompt) + count)
    chunk = engine.config.max_num_batched_tokens
    decode = sum((work.prefill(n, chunk) for n in lengths[1:]), Work(0, 0))
    first = work.prefill(len(prompt), chunk)
    return Generation("no cache", token_ids, seconds, list(lengths), first, decode)


def with_transformers(baseline: Baseline, work: ModelWork, prompt: list[int], count: int) -> Generation:
    """transformers and its cache."""
    token_ids, seconds = timed(count, lambda i: (baseline.step() if i else baseline.start([prompt]))[0])
    first = work.prefill(len(prompt), len(prompt))
    return _cached("transformers", work, prompt, token_ids, seconds, first)


def with_octavo(engine: Engine, work: ModelWork, prompt: list[int], count: int) -> Generation:
    """Octavo as it is."""
    live = engine.prepare("bench", prompt, greedy(count))

    def next_token(i: int) -> int:
        if i == 0:
            engine.submit(live)
        while not engine.step():
            pass
        return live.answers[0].choice.token_ids[-1]

    token_ids, seconds = timed(count, next_token)
    first = work.prefill(len(prompt), engine.config.max_num_batched_tokens)
    return _cached("octavo", work, prompt, token_ids, seconds, first)


def answer(engine: Engine, prompt: list[int], count: int) -> list[int]:
    """The greedy answer of `count` tokens to one prompt that has the engine to itself."""
    live = engine.prepare("bench", prompt, greedy(count))
    engine.submit(live)
    while not live.finished:
        engine.step()
    return live.output().outputs[0].token_ids


def _cached(
    name: str, work: ModelWork, prompt: list[int], token_ids: list[int], seconds: list[float], first: Work
) -> Generation:
    positions = [len(prompt)] + [1] * (len(token_ids) - 1)
    decode = work.decode(len(prompt), len(token_ids) - 1)
    return Generation(name, token_ids, seconds, positions, first, decode)
