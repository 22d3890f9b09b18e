"""Random requests under random settings, preempted and cancelled at random, against a large and quiet engine."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from octavo.config import BLOCK_SIZES
from octavo.engine import Engine
from octavo.live import LiveRequest
from support.engines import Request, greedy
from support.sharing import hear, serve
from support.sizes import sized
from support.tiny import WINDOW

KINDS_TRIED = ("llama", "qwen3", "mistral, window", "qwen2, mixed windows", "gpt2")
DTYPES = ("float32", "bfloat16")
# A small run takes each kind once, in one of the two types.
CASES = [
    (seed, kind, dtype)
    for seed in range(sized(1, 40))
    for i, kind in enumerate(KINDS_TRIED)
    for dtype in sized(DTYPES[i % 2 :][:1], DTYPES)
]
LONGEST = 150
VOCABULARY = 256
assert WINDOW not in BLOCK_SIZES  # so that no window ends where a block does


class Chance:
    """What one seed decides."""

    def __init__(self, *names: object) -> None:
        self.random = random.Random(repr(names))

    def pick(self, options: Sequence[Any]) -> Any:
        return self.random.choice(options)

    def prompts(self, count: int) -> list[list[int]]:
        """Prompts of all lengths, many of which begin alike."""
        stem = [self.random.randrange(VOCABULARY) for _ in range(LONGEST)]
        made = []
        for _ in range(count):
            shared = stem[: self.random.randrange(LONGEST // 2)]
            own = [self.random.randrange(VOCABULARY) for _ in range(1 + self.random.randrange(LONGEST // 4))]
            made.append(shared + own)
        return made

    def requests(self, kind: str, block_size: int) -> list[Request]:
        return [(prompt, self._params(kind, block_size)) for prompt in self.prompts(6)]

    def settings(self, block_size: int) -> dict[str, Any]:
        return {
            "block_size": block_size,
            "max_num_batched_tokens": self.pick([1, 3, 16, 50, 512]),
            "max_num_seqs": self.pick([1, 2, 5, 64]),
            "enable_prefix_caching": self.pick([True, True, False]),
            "num_threads": self.pick([1, 2]),
        }

    def _params(self, kind: str, block_size: int) -> Any:
        options: dict[str, Any] = {"seed": self.random.randrange(2**64), "n": self.pick([1, 1, 1, 3])}
        options |= self.pick(
            [
                {},
                {"temperature": 1.2, "top_k": 40},
                {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.7, "repetition_penalty": 1.2},
                {"logit_bias": {7: 3.0}, "frequency_penalty": 0.5, "bad_words": ["ab", "c"]},
                {"stop_token_ids": list(range(0, VOCABULARY, 5)), "min_tokens": 4},
            ]
        )
        options |= self.pick([{}, {}, {"prompt_logprobs": 2}, {"logprobs": -1}, {"stop": ["e", "to", "\n"]}])
        options |= self.pick(
            [{}, {"priority": 3}, {"priority": -1}, {"cache_salt": "s"}, {"cache_ttl": 60.0}]
        )
        if kind in ("llama", "qwen3") and block_size <= 16 and self.pick([True, False]):
            options |= {"context_policy": "window", "sinks": block_size, "window": 2 * block_size}
        return greedy(4 + self.random.randrange(20), **options)


class Trouble:
    """Between steps: now and then a running sequence is preempted or a request cancelled, and the books are read."""

    def __init__(self, engine: Engine, chance: Chance, victims: set[str]) -> None:
        self.engine, self.chance, self.victims = engine, chance, victims
        self.preemptions = 0

    def __call__(self, lives: list[LiveRequest]) -> None:
        fate = self.chance.random.random()
        running = self.engine.scheduler.running
        if fate < 0.1 and running and self.preemptions < 20:
            self.engine.scheduler.preempt(self.chance.pick(running))
            self.preemptions += 1
        elif fate < 0.2 and self.victims:
            victim = self.chance.pick(sorted(self.victims))
            self.victims.remove(victim)
            self.engine.abort(victim)
        self.engine.check()


def pool_bytes(engine: Engine, spare_blocks: int) -> int:
    """A cache that barely holds the longest sequence of these tests, and `spare_blocks` more per layer group."""
    return engine.layout.sequence_bytes(LONGEST) + spare_blocks * sum(engine.layout.block_sizes_bytes)


@pytest.mark.parametrize(("seed", "kind", "dtype"), CASES)
def test_no_schedule_changes_an_answer(
    seed: int, kind: str, dtype: str, engine_of: Callable[..., Engine]
) -> None:
    chance = Chance(seed, kind, dtype)
    block_size = chance.pick(BLOCK_SIZES[:5])
    requests = chance.requests(kind, block_size)
    quiet = engine_of(kind, dtype=dtype, block_size=block_size, enable_prefix_caching=False, num_threads=1)
    expected = [hear(quiet, [request])[0] for request in requests]

    budget = pool_bytes(quiet, chance.pick([0, 1, 4, 30]))
    settings = chance.settings(block_size)
    tight = engine_of(
        kind, dtype=dtype, kv_cache_memory=budget, poison=True, max_model_len=LONGEST, **settings
    )
    company = chance.requests(kind, block_size)
    for _ in ("cold", "warm"):
        victims = {f"request {i}" for i in range(len(requests), len(requests) + len(company))}
        heard, _ = serve(tight, requests + company, Trouble(tight, chance, victims))
        for i, (found, wanted) in enumerate(zip(heard, expected, strict=False)):
            assert found == wanted, (i, requests[i], settings)
    assert tight.stats().bytes_running == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_how_wide_an_engine_is_does_not_change_its_bits(dtype: str, engine_of: Callable[..., Engine]) -> None:
    """One row at a time is a shape of its own to torch: a narrow engine must not settle for another tile."""
    asked = [(list(range(60)), greedy(8, prompt_logprobs=2))]
    wide, narrow = engine_of("gpt2", dtype=dtype), engine_of("gpt2", dtype=dtype, max_num_batched_tokens=1)
    assert hear(narrow, asked) == hear(wide, asked)
    assert narrow.runner.tile == wide.runner.tile
