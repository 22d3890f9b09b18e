"""The engines that are measured in this process, on the same cores, and how long their answers take."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.data import Prompts
from octavo.bench.baseline import Baseline
from octavo.bench.generate import greedy
from octavo.bench.limits import MachineLimits
from octavo.bench.work import ModelWork, model_work
from octavo.config import EngineConfig
from octavo.engine import Engine

CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Subjects:
    """Octavo and transformers on one model directory, in one compute type. Prompts never repeat, and no prefix is
    cached, so that nothing is reused between repetitions."""

    engine: Engine
    baseline: Baseline
    work: ModelWork
    limits: MachineLimits
    prompts: Prompts

    @classmethod
    def load(cls, model: str, dtype: str, limits: MachineLimits) -> Subjects:
        """Load `model` twice. Raises what `Engine` raises."""
        engine = Engine(
            EngineConfig(model, dtype=dtype, kv_cache_memory=CACHE_BYTES, enable_prefix_caching=False)
        )
        loaded = engine.loaded
        return cls(
            engine=engine,
            baseline=Baseline(loaded.path, loaded.torch_dtype),
            work=model_work(loaded.path, loaded.spec, engine.layout),
            limits=limits,
            prompts=Prompts(engine.tokenizer, loaded.spec.vocab_size),
        )

    def octavo_times(self, prompt: list[int], new_tokens: int) -> list[float]:
        """Seconds until each of `new_tokens` tokens of one answer, counted from the one before."""
        live = self.engine.prepare("bench", prompt, greedy(new_tokens))
        times = [time.perf_counter()]
        self.engine.submit(live)
        for _ in range(new_tokens):
            while not self.engine.step():
                pass
            times.append(time.perf_counter())
        return _differences(times)

    def octavo_batch_s(self, prompts: list[list[int]], new_tokens: int) -> float:
        """Seconds until all answers of `new_tokens` tokens are complete."""
        start = time.perf_counter()
        for i, prompt in enumerate(prompts):
            self.engine.submit(self.engine.prepare(str(i), prompt, greedy(new_tokens)))
        while self.engine.has_work:
            self.engine.step()
        return time.perf_counter() - start

    def baseline_times(self, prompts: list[list[int]], new_tokens: int) -> list[float]:
        """The same for transformers, with a static batch of prompts of equal length."""
        times = [time.perf_counter()]
        self.baseline.start(prompts)
        times.append(time.perf_counter())
        for _ in range(new_tokens - 1):
            self.baseline.step()
            times.append(time.perf_counter())
        return _differences(times)

    def batch(self, count: int, length: int) -> list[list[int]]:
        """`count` fresh prompts."""
        return [self.prompts.next(length) for _ in range(count)]


def _differences(times: list[float]) -> list[float]:
    return [after - before for before, after in pairwise(times)]
