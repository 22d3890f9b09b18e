"""The sharing suite: what a prefix costs that somebody has computed before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.core import attention_pass
from benchmarks.data import MOONCAKE_TRACE
from benchmarks.measure import Line, alternate
from benchmarks.peers import PeerResults
from benchmarks.subjects import Subjects
from octavo.bench.generate import greedy
from octavo.bench.limits import seconds
from octavo.cache.hashing import Namespace
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cache.manager import CacheManager
from octavo.engine import Engine
from octavo.simulate.trace import read_trace


@dataclass(frozen=True)
class Sizes:
    """Tokens, requests and repetitions. `goals=False` where they are not those the requirements speak of."""

    warm_prompt: int = 4000
    question: int = 100
    answer: int = 50
    turns: int = 6
    requests: int = 16
    long_prefix: int = 4096
    decode: int = 16
    prefix: int = 512
    own: int = 64
    new: int = 64
    repeats: int = 5
    trace_requests: int | None = None
    trace_blocks: int = 10_000
    goals: bool = True

    def goal(self, at_least: float) -> float | None:
        """A requirement, where it applies."""
        return at_least if self.goals else None


QUICK = Sizes(256, 24, 8, 3, 3, 256, 4, 64, 16, 4, 1, trace_requests=100, trace_blocks=1000, goals=False)


@dataclass(frozen=True)
class Sharing:
    """`apart` has an engine without prefix caching, `shared` is one with it; both run the same model."""

    apart: Subjects
    shared: Subjects

    @classmethod
    def of(cls, apart: Subjects) -> Sharing:
        """A second engine beside the one of `apart`."""
        config = replace(apart.engine.config, enable_prefix_caching=True, kv_cache_memory=5 << 29)
        return cls(apart, replace(apart, engine=Engine(config)))


def warm(on: Sharing, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """The first token of a prompt that was there before."""
    cold, again = [], []
    for _ in range(sizes.repeats):
        prompt = on.shared.prompts.next(sizes.warm_prompt)
        cold.append(on.shared.octavo_times(prompt, 1)[0])
        again.append(on.shared.octavo_times(prompt, 1)[0])
    title = f"time to first token, {sizes.warm_prompt} tokens, warm"
    others = {"cold": median(cold)}
    return [Line("warm", title, "s", median(again), others, "cold", sizes.goal(20.0), lower_is_better=True)]


def conversation(on: Sharing, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """The last turn of a conversation against a cold prompt of as many tokens as it brought."""
    turn, cold = [], []
    for _ in range(sizes.repeats):
        history: list[int] = []
        for _ in range(sizes.turns):
            history += on.shared.prompts.next(sizes.question)
            live = on.shared.engine.prepare("turn", history, greedy(sizes.answer))
            on.shared.engine.submit(live)
            start = time.perf_counter()
            while not live.answers:
                on.shared.engine.step()
            taken = time.perf_counter() - start
            while not live.finished:
                on.shared.engine.step()
            history = history + live.output().outputs[0].token_ids
        turn.append(taken)
        fresh = on.shared.prompts.next(live.request.receipt.computed_tokens)
        cold.append(on.shared.octavo_times(fresh, 1)[0])
    return [
        Line(
            "conversation",
            f"first token of turn {sizes.turns}, questions of {sizes.question} and answers of {sizes.answer} tokens",
            "s",
            median(turn),
            {"cold prompt of the new tokens": median(cold)},
            "cold prompt of the new tokens",
            sizes.goal(1 / 1.5),
            lower_is_better=True,
        )
    ]


def one_prefix(on: Sharing, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """Decode of several requests over one long prefix against separate ones of that length."""
    together, _ = attention_pass(on.shared, sizes.requests, sizes.long_prefix, shared=True)
    separate, _ = attention_pass(on.shared, sizes.requests, sizes.long_prefix)
    kernel = alternate(
        {"shared": lambda: seconds(together), "separate": lambda: seconds(separate)}, sizes.repeats
    )
    prefix = on.shared.prompts.next(sizes.long_prefix)
    on.shared.octavo_times(prefix, 1)
    tails = [[*prefix, *on.shared.prompts.next(1)] for _ in range(sizes.requests)]
    apart = on.shared.batch(sizes.requests, sizes.long_prefix)
    step = alternate(
        {
            "shared": lambda: _step_s(on.shared.engine, tails, sizes),
            "separate": lambda: _step_s(on.shared.engine, apart, sizes),
        },
        sizes.repeats,
    )
    what = f"{sizes.requests} requests over one prefix of {sizes.long_prefix} tokens"
    return [
        Line(
            "one_prefix_attention",
            f"decode attention of {what}",
            "ms",
            1000 * kernel["shared"],
            {"separate": 1000 * kernel["separate"]},
            "separate",
            sizes.goal(3.0),
            lower_is_better=True,
        ),
        Line(
            "one_prefix_decode",
            f"decode step of {what}",
            "ms",
            1000 * step["shared"],
            {"separate": 1000 * step["separate"]},
            "separate",
            sizes.goal(2.0),
            lower_is_better=True,
        ),
    ]


def _step_s(engine: Engine, prompts: Sequence[list[int]], sizes: Sizes) -> float:
    """Median seconds of a step in which all of `prompts` decode; what is cached of them is not computed again."""
    lives = [
        engine.prepare(f"decode {i}", prompt, greedy(2 * sizes.decode * len(prompts)))
        for i, prompt in enumerate(prompts)
    ]
    for live in lives:
        engine.submit(live)
    while not all(live.answers for live in lives):
        engine.step()
    times = [seconds(engine.step) for _ in range(sizes.decode)]
    for live in lives:
        engine.abort(live.request.request_id)
    return median(times)


def cold_prefix(on: Sharing, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """Requests that arrive together and share a prefix nobody has seen, as a whole."""
    found = alternate(
        {
            "octavo": lambda: on.shared.octavo_batch_s(shared_batch(on.shared, sizes), sizes.new),
            "sharing off": lambda: on.apart.octavo_batch_s(shared_batch(on.apart, sizes), sizes.new),
            "transformers": lambda: sum(on.apart.baseline_times(shared_batch(on.apart, sizes), sizes.new)),
        },
        sizes.repeats,
    )
    octavo = found.pop("octavo")
    others: dict[str, float | None] = {**found, **peers.figures("shared")}
    title = f"{sizes.requests} requests, cold prefix of {sizes.prefix}, {sizes.own} own and {sizes.new} new tokens"
    goals = {"transformers": 8.0, "sharing off": 2.5, "OpenVINO GenAI": 2.0}
    return [
        Line(
            f"cold_prefix_{name.split()[0].lower()}",
            f"{title}, against {name}",
            "s",
            octavo,
            {name: others[name]},
            name,
            sizes.goal(goal),
            lower_is_better=True,
        )
        for name, goal in goals.items()
        if others.get(name) is not None
    ]


def shared_batch(on: Subjects, sizes: Sizes) -> list[list[int]]:
    """Fresh prompts over one fresh prefix."""
    prefix = on.prompts.next(sizes.prefix)
    return [[*prefix, *on.prompts.next(sizes.own)] for _ in range(sizes.requests)]


def look_ups(on: Sharing, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """Blocks per second of the Mooncake conversation trace, each finishing before the next arrives: looked up in
    the index, and with all that follows. A block of the trace stands for one of 4 tokens here."""
    if not MOONCAKE_TRACE.exists():
        return []
    layout = CacheLayout((LayerGroup((0,), 1, 32),), 4, "bf16")
    cache = CacheManager(layout, sizes.trace_blocks * layout.block_bytes(0))
    asked, looked, whole = 0, 0.0, 0.0
    for arrival in read_trace(MOONCAKE_TRACE)[: sizes.trace_requests]:
        tokens = [
            *(name for name in arrival.ids[: arrival.full] for _ in range(layout.block_size)),
            *arrival.ids[arrival.full :],
        ]
        asked += len(arrival.ids)
        start = time.perf_counter()
        lease = cache.lease(Namespace("trace"))
        cache.match(lease, tokens)
        found = time.perf_counter()
        if not cache.extend(lease, len(tokens)):
            raise ValueError(f"{sizes.trace_blocks} blocks are too few for a request of {len(tokens)} tokens")
        cache.commit(lease, tokens, len(tokens))
        cache.release(lease)
        looked += found - start
        whole += time.perf_counter() - start
    what = f"blocks of the Mooncake conversation trace, {sizes.trace_blocks} cached"
    limit = {"limit": 100_000.0}
    return [
        Line("look_ups", f"{what}: looked up", "/s", asked / looked, limit, "limit", sizes.goal(1.0)),
        Line(
            "trace",
            f"{what}: looked up, sealed, published, reclaimed",
            "/s",
            asked / whole,
            limit,
            "limit",
            None,
        ),
    ]


LINES: dict[str, Callable[[Sharing, Sizes, PeerResults], list[Line]]] = {
    "warm": warm,
    "conversation": conversation,
    "one_prefix": one_prefix,
    "cold_prefix": cold_prefix,
    "look_ups": look_ups,
}
