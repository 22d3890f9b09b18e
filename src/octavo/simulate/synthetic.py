"""Made-up traces of any size: Poisson arrivals, lengths around a mean, and prompts that begin alike."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from octavo.simulate.trace import Arrival


@dataclass(frozen=True)
class Synthetic:
    """`requests` requests at `rate` per second. Lengths are geometric around their means. A prompt begins with one of
    `prefixes` prefixes of `shared` tokens, the first ones most often (Zipf)."""

    requests: int
    rate: float
    prompt: int = 1000
    output: int = 100
    prefixes: int = 1000
    shared: int = 512
    seed: int = 0

    def arrivals(self) -> Iterator[Arrival]:
        """One after the other, never all in memory."""
        draw = random.Random(self.seed)
        weights = [1 / (rank + 1) for rank in range(self.prefixes)]
        at = 0.0
        drawn: list[int] = []
        for index in range(self.requests):
            at += draw.expovariate(self.rate)
            if not drawn:
                drawn = draw.choices(range(self.prefixes), weights, k=10_000)
            prompt = self.shared + 1 + int(draw.expovariate(1 / max(1, self.prompt - self.shared)))
            output = 1 + int(draw.expovariate(1 / self.output))
            name = drawn.pop()
            # One id for the shared prefix; what follows belongs to the request alone.
            yield Arrival(index, at, prompt, output, self.shared, (name,) if prompt >= self.shared else ())
