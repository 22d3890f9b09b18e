"""`octavo bench calibrate`: real steps of many shapes, timed, and the cost that fits them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from octavo.engine import Engine
from octavo.params import SamplingParams
from octavo.schedule.scheduler import StepPlan
from octavo.simulate.cost import work_of
from octavo.simulate.fitted import FittedCost, Sample, fit

_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_PROMPTS = (8, 100, 400, 1000, 2000, 4000)
_NEW = 6
_MOST_TOKENS = 16_000  # of one burst


def calibrate(engine: Engine, *, most_tokens: int = _MOST_TOKENS, seed: int = 0) -> FittedCost:
    """Fit the steps of `engine`, which is to have nothing to do."""
    return fit_steps(engine, time_steps(engine, most_tokens=most_tokens, seed=seed))


def time_steps(
    engine: Engine, *, most_tokens: int = _MOST_TOKENS, seed: int = 0, turn: int = 0, turns: int = 1
) -> list[Sample]:
    """Serve bursts of equal requests: their prompts give steps of all widths, their answers steps of all batches, and
    both at several depths. Each of `turns` calls takes its share, so that they can be spread over time."""
    samples: list[Sample] = []
    windows = _windows(engine)
    with _watched(engine) as plans:
        for burst, (batch, prompt) in list(enumerate(_bursts(engine, most_tokens)))[turn::turns]:
            draw = random.Random(seed + burst)
            for i in range(batch):
                ids = [draw.randrange(engine.loaded.spec.vocab_size) for _ in range(prompt)]
                params = SamplingParams(max_tokens=_NEW, temperature=0.0, ignore_eos=True)
                engine.submit(engine.prepare(f"calibrate {burst} {i}", ids, params))
            while engine.has_work:
                start = time.perf_counter()
                engine.step()
                seconds = time.perf_counter() - start
                samples.append(Sample(work_of(plans.pop().chunks, windows), seconds))
    return samples


def fit_steps(engine: Engine, samples: Sequence[Sample]) -> FittedCost:
    """The cost that fits `samples` of this engine."""
    groups = engine.layout.groups
    layers = sum(len(group.layers) for group in groups)
    return fit(samples, _windows(engine), tuple(len(group.layers) / layers for group in groups))


def _windows(engine: Engine) -> tuple[int | None, ...]:
    return tuple(group.window for group in engine.layout.groups)


def _bursts(engine: Engine, most_tokens: int) -> Iterator[tuple[int, int]]:
    room = engine.cache.arena.bytes_total
    for prompt in _PROMPTS:
        if prompt + _NEW > engine.scheduler.limit:
            return
        for batch in _BATCHES:
            fits = engine.layout.sequences_that_fit(room, prompt + _NEW)
            if batch <= min(engine.config.max_num_seqs, fits) and (
                batch == 1 or batch * prompt <= most_tokens
            ):
                yield batch, prompt


@contextmanager
def _watched(engine: Engine) -> Iterator[list[StepPlan]]:
    """The plans that the engine's scheduler makes inside."""
    plans: list[StepPlan] = []
    plan = engine.scheduler.plan

    def watching() -> StepPlan:
        plans.append(plan())
        return plans[-1]

    engine.scheduler.plan = watching  # type: ignore[method-assign]
    try:
        yield plans
    finally:
        del engine.scheduler.plan
