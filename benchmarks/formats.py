"""The formats suite: what reading a smaller cache gains in a decode step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.data import Prompts
from benchmarks.measure import Line, alternate
from benchmarks.overhead import clocks
from octavo.bench.generate import greedy
from octavo.bench.limits import READ_BYTES, ReadProbe, seconds
from octavo.config import STORED_BLOCK_SIZE, EngineConfig
from octavo.engine import Engine

FORMATS = ("bf16", "int8", "fp8", "int4", "int2")


@dataclass(frozen=True)
class Sizes:
    """`sequences` of `context` tokens decode `steps` tokens in each of `repeats` rounds; the machine reads `read_bytes`
    in each. `goals=False` where they are not those the requirements speak of."""

    sequences: int = 16
    context: int = 4096
    steps: int = 4
    repeats: int = 7
    read_bytes: int = READ_BYTES
    goals: bool = True

    def goal(self, at_least: float | None) -> float | None:
        """A requirement, where it applies."""
        return at_least if self.goals else None


QUICK = Sizes(3, 80, 2, 1, read_bytes=1 << 20, goals=False)


class Decoding:
    """An engine in which all sequences decode, and the bytes of their blocks."""

    def __init__(self, model: str, dtype: str, format: str, sizes: Sizes) -> None:
        config = EngineConfig.create(model, dtype=dtype, kv_cache_dtype=format, block_size=STORED_BLOCK_SIZE)
        # The first decodes while the others read their prompts, and may not end before all is measured.
        reading = sizes.sequences * (sizes.context // config.max_num_batched_tokens + 2)
        longest = sizes.context + reading + (sizes.repeats + 2) * sizes.steps * 2
        need = (sizes.sequences + 2) * Engine(config).layout.sequence_bytes(longest)
        self.engine = Engine(replace(config, kv_cache_memory=need))
        prompts = Prompts(self.engine.tokenizer, self.engine.loaded.spec.vocab_size)
        lives = [
            self.engine.prepare(str(i), prompts.next(sizes.context), greedy(longest - sizes.context))
            for i in range(sizes.sequences)
        ]
        for live in lives:
            self.engine.submit(live)
            while not live.answers:
                self.engine.step()
        self.bytes = self.engine.stats().bytes_running
        self._sizes = sizes

    def step_s(self) -> float:
        """Median seconds of a step."""
        return median(seconds(self._step) for _ in range(self._sizes.steps))

    def attention_s(self) -> float:
        """Median seconds of a step's attention, over all layers."""
        found = []
        for _ in range(self._sizes.steps):
            with clocks() as clock:
                self._step()
            found.append(clock.seconds["attention"])
        return median(found)

    def _step(self) -> None:
        decoded = len(self.engine.step())
        if decoded != self._sizes.sequences:
            raise RuntimeError(f"{decoded} of {self._sizes.sequences} sequences decoded in a step")


def measure(model: str, dtype: str, sizes: Sizes, say: Callable[[str], None]) -> list[Line]:
    """Every format against bf16, and the share of the machine's read bandwidth that attention reaches."""
    on = {}
    for format in FORMATS:
        say(f"{format}: reading {sizes.sequences} prompts of {sizes.context} tokens ...")
        on[format] = Decoding(model, dtype, format, sizes)
    say("decoding ...")
    attention = alternate(
        {"read": ReadProbe(sizes.read_bytes), **{name: one.attention_s for name, one in on.items()}},
        sizes.repeats,
    )
    steps = alternate({name: one.step_s for name, one in on.items()}, sizes.repeats)
    what = f"{sizes.sequences} sequences of {sizes.context} tokens"
    lines = []
    for kind, found, goals in (
        ("attention", attention, {"int8": 1.5, "int4": 1.6}),
        ("step", steps, {"int8": 1.3}),
    ):
        for name in FORMATS[1:]:
            title = f"{name}: decode {kind} of {what}"
            others = {"bf16": 1000 * found["bf16"]}
            goal = sizes.goal(goals.get(name))
            lines.append(
                Line(
                    f"{name}_{kind}",
                    title,
                    "ms",
                    1000 * found[name],
                    others,
                    "bf16",
                    goal,
                    lower_is_better=True,
                )
            )
    for name, share in (("bf16", 0.6), ("int8", 0.45)):
        rate, most = on[name].bytes / attention[name] / 1e9, attention["read"] / 1e9
        title = f"{name}: bytes that decode attention of {what} reads"
        others = {"read bandwidth": most}
        lines.append(
            Line(f"{name}_read_share", title, "GB/s", rate, others, "read bandwidth", sizes.goal(share))
        )
    return lines
