"""The sharing suite: what a prefix costs that somebody has computed before."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.core import attention_pass
from benchmarks.measure import Line, alternate
from benchmarks.peers import PeerResults
from benchmarks.subjects import Subjects
from octavo.bench.generate import greedy
from octavo.bench.limits import seconds
from octavo.engine import Engine


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
    goals: bool = True

    def goal(self, at_least: float) -> float | None:
        """A requirement, where it applies."""
        return at_least if self.goals else None


QUICK = Sizes(256, 24, 8, 3, 3, 256, 4, 64, 16, 4, 1, goals=False)


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


LINES: dict[str, Callable[[Sharing, Sizes, PeerResults], list[Line]]] = {
    "warm": warm,
    "conversation": conversation,
    "one_prefix": one_prefix,
    "cold_prefix": cold_prefix,
}
