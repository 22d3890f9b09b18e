"""A trace against a running engine, in real time, counted as a simulation counts."""

from __future__ import annotations

import time
from collections.abc import Sequence

from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.live import LiveRequest
from octavo.params import SamplingParams
from octavo.simulate.measure import Measures
from octavo.simulate.trace import Arrival


def replay(engine: Engine, arrivals: Sequence[Arrival], width: float = 1.0) -> Measures:
    """Serve `arrivals` when they are due. Raises `ConfigError` if they need more tokens than the model has."""
    names = 1 + max((name for a in arrivals for name in (*a.ids, *a.output_ids)), default=-1)
    if names + len(arrivals) > engine.loaded.spec.vocab_size:
        raise ConfigError(
            f"trace: {names} blocks and {len(arrivals)} requests cannot be told apart by "
            f"{engine.loaded.spec.vocab_size} tokens; give fewer requests",
            param="requests",
        )
    measures, waiting = Measures(width), list(reversed(arrivals))
    serving: dict[str, tuple[Arrival, LiveRequest, int, float]] = {}
    before = engine.scheduler.totals.preemptions
    start = time.perf_counter()
    while waiting or serving:
        now = time.perf_counter() - start
        while waiting and waiting[-1].at <= now:
            arrival = waiting.pop()
            live = _submit(engine, arrival, names)
            serving[live.request.request_id] = arrival, live, 0, 0.0
        if not engine.has_work:
            time.sleep(max(0.0, waiting[-1].at - now))
            continue
        for live in engine.step():
            _count(measures, serving, live, time.perf_counter() - start)
    measures.preemptions = engine.scheduler.totals.preemptions - before
    return measures


def _submit(engine: Engine, arrival: Arrival, names: int) -> LiveRequest:
    # Ids from 1 << 30 up belong to one request each; here they follow those of the blocks.
    ids = [token if token < 1 << 30 else names + arrival.index for token in arrival.prompt_tokens()]
    # Several answers are to differ, as they do in a simulation.
    temperature = 0.0 if arrival.n == 1 else 1.0
    params = SamplingParams(
        n=arrival.n, max_tokens=arrival.output, temperature=temperature, ignore_eos=True, seed=arrival.index
    )
    live = engine.prepare(f"replay {arrival.index}", ids, params)
    engine.submit(live)
    return live


def _count(
    measures: Measures,
    serving: dict[str, tuple[Arrival, LiveRequest, int, float]],
    live: LiveRequest,
    now: float,
) -> None:
    name = live.request.request_id
    arrival, _, known, last = serving[name]
    tokens = sum(len(answer.choice.token_ids) - arrival.prompt for answer in live.answers)
    if tokens > known:
        if known:
            measures.itl.add(now - last, tokens - known)
        else:
            measures.ttft.add(now - arrival.at)
    serving[name] = arrival, live, tokens, now
    if live.finished:
        receipt = live.request.receipt
        measures.finished += 1
        measures.output_tokens += tokens
        measures.prompt_tokens += receipt.prompt_tokens
        measures.reused_tokens += receipt.reused_tokens
        measures.recomputed_tokens += receipt.recomputed_tokens
        measures.ended_at = now
        del serving[name]
