"""The core suite: one model against transformers and other engines, and against what the machine can do."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count

import torch

from benchmarks.measure import Line, alternate
from benchmarks.overhead import measure_overhead
from benchmarks.peers import PeerResults
from benchmarks.subjects import Subjects
from octavo.bench.limits import READ_BYTES, ReadProbe, seconds
from octavo.kernels import limits, native
from octavo.kernels.native import HugeBuffer, LayerCache
from octavo.model.batch import Piece, make_batch
from octavo.model.load import cpu_multiplies_bf16


@dataclass(frozen=True)
class Sizes:
    """Tokens, repetitions, and bytes that the machine reads to show its bandwidth. `goals=False` where the lengths are
    not those the requirements speak of."""

    prompt: int = 512
    long_prompt: int = 4096
    decode: int = 64
    batch: int = 16
    batch_prompt: int = 576
    batch_new: int = 64
    attention_sequences: int = 16
    attention_context: int = 4096
    repeats: int = 5
    read_bytes: int = READ_BYTES
    goals: bool = True

    def goal(self, at_least: float) -> float | None:
        """A requirement, where it applies."""
        return at_least if self.goals and cpu_multiplies_bf16() else None


QUICK = Sizes(64, 256, 8, 4, 72, 8, 4, 512, 1, read_bytes=1 << 20, goals=False)


def decode(on: Subjects, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """One sequence after its prompt: tokens per second, and the share of the time that reading weights and cache takes
    at the machine's read bandwidth."""

    def per_token(times: list[float]) -> float:
        return sum(times[1:]) / sizes.decode

    def octavo() -> float:
        return per_token(on.octavo_times(on.prompts.next(sizes.prompt), sizes.decode + 1))

    def baseline() -> float:
        return per_token(on.baseline_times([on.prompts.next(sizes.prompt)], sizes.decode + 1))

    contenders: dict[str, Callable[[], float]] = {
        "read": ReadProbe(sizes.read_bytes),
        "octavo": octavo,
        "transformers": baseline,
    }
    found = alternate(contenders, sizes.repeats)
    bandwidth = found.pop("read")
    read = on.work.decode(sizes.prompt, sizes.decode).bytes_read / sizes.decode
    rates = {name: 1 / s for name, s in found.items()}
    octavo_rate = rates.pop("octavo")
    return [
        Line(
            "decode",
            f"decode after {sizes.prompt} tokens",
            "tokens/s",
            octavo_rate,
            {**rates, **peers.figures("decode")},
            "transformers",
            sizes.goal(4.0),
        ),
        Line(
            "decode_read_share",
            f"weights and cache read in decode after {sizes.prompt} tokens",
            "GB/s",
            read / found["octavo"] / 1e9,
            {"read bandwidth": bandwidth / 1e9},
            "read bandwidth",
            sizes.goal(0.6),
        ),
    ]


def first_token(
    on: Subjects, sizes: Sizes, peers: PeerResults, *, name: str, length: int, at_least: float
) -> list[Line]:
    """Time to the first token of a prompt that nobody has seen."""
    found = alternate(
        {
            "octavo": lambda: on.octavo_times(on.prompts.next(length), 1)[0],
            "transformers": lambda: on.baseline_times([on.prompts.next(length)], 1)[0],
        },
        sizes.repeats,
    )
    line = Line(
        name,
        f"time to first token, {length} tokens",
        "s",
        found.pop("octavo"),
        {**found, **peers.figures(name)},
        "transformers",
        sizes.goal(at_least),
        lower_is_better=True,
    )
    return [line]


def short_first_token(on: Subjects, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """Prefill: time, and the share of the GEMM rate."""
    [line] = first_token(on, sizes, peers, name="ttft", length=sizes.prompt, at_least=1.2)
    work = on.work.prefill(sizes.prompt, on.engine.config.max_num_batched_tokens)
    dtype = on.engine.loaded.torch_dtype
    share = Line(
        "prefill_flops_share",
        f"operations in prefill of {sizes.prompt} tokens",
        "GFLOP/s",
        work.flops / line.octavo / 1e9,
        {"GEMM rate": on.limits.flops_per_s(dtype) / 1e9},
        "GEMM rate",
        sizes.goal(0.6),
    )
    return [line, share]


def long_first_token(on: Subjects, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """A prompt where attention weighs."""
    return first_token(on, sizes, peers, name="ttft_long", length=sizes.long_prompt, at_least=1.4)


def batch(on: Subjects, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """Several requests at once, from the first prompt token to the last new one; transformers gets a static batch."""

    def octavo() -> float:
        return on.octavo_batch_s(on.batch(sizes.batch, sizes.batch_prompt), sizes.batch_new)

    def baseline() -> float:
        return sum(on.baseline_times(on.batch(sizes.batch, sizes.batch_prompt), sizes.batch_new))

    found = alternate({"octavo": octavo, "transformers": baseline}, sizes.repeats)
    title = f"{sizes.batch} requests of {sizes.batch_prompt} tokens, {sizes.batch_new} new each"
    others = {"transformers": found["transformers"], **peers.figures("batch")}
    goal = sizes.goal(2.7)
    return [Line("batch", title, "s", found["octavo"], others, "transformers", goal, lower_is_better=True)]


def attention(on: Subjects, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """Decode attention alone: one query of each of several long sequences, all layers, cache beyond every CPU cache."""
    one_pass, nbytes = attention_pass(on, sizes.attention_sequences, sizes.attention_context)
    found = alternate(
        {"read": ReadProbe(sizes.read_bytes), "octavo": lambda: seconds(one_pass)}, sizes.repeats
    )
    return [
        Line(
            "attention_read_share",
            f"decode attention alone, {sizes.attention_sequences} sequences of {sizes.attention_context} tokens",
            "GB/s",
            nbytes / found["octavo"] / 1e9,
            {"read bandwidth": found["read"] / 1e9},
            "read bandwidth",
            sizes.goal(0.6),
        )
    ]


def attention_pass(
    on: Subjects, sequences: int, context: int, *, shared: bool = False
) -> tuple[Callable[[], None], int]:
    """One attention call per layer over `sequences` sequences of `context` positions, and the bytes of K and V that
    these calls must read. The cache is the model's own layout in a buffer of its own; with `shared` all sequences are
    one prefix of `context` positions and a block of their own after it."""
    layout, spec, dtype = on.engine.layout, on.engine.loaded.spec, on.engine.loaded.torch_dtype
    blocks = layout.num_blocks(context)
    sets = 1 if shared else sequences
    arena = HugeBuffer((sets * blocks + sequences) * sum(layout.block_sizes_bytes))
    limits.fill(arena, 0x3C)  # small numbers in bf16 and float32
    free = count(0)
    pieces = []
    offset = 0
    tables: list[array[int]] = []
    for number in range(sequences):
        if number < sets:
            tables = []
            for size in layout.block_sizes_bytes:
                tables.append(array("q", [offset + i * size for i in range(blocks)]))
                offset += blocks * size
        own = tables
        if shared:
            own = []
            for table, size in zip(tables, layout.block_sizes_bytes, strict=True):
                own.append(array("q", [*table, offset]))
                offset += size
        pieces.append(Piece([next(free) % spec.vocab_size], context - 1 + shared, tuple(own)))
    step = make_batch(pieces, layout)
    calls = []
    for i, layer in enumerate(spec.layers):
        g = next(g for g, group in enumerate(layout.groups) if i in group.layers)
        heads = (layer.num_kv_heads, layer.head_dim, spec.num_attention_heads)
        cache = LayerCache(arena.address, layout.layer_offset(g, i), layout.block_size, *heads)
        q = torch.ones(sequences, spec.num_attention_heads, layer.head_dim, dtype=dtype)
        calls.append(partial(native.attention, cache, step.plans[g], q, torch.empty_like(q), layer.scaling))

    def run(keep: HugeBuffer = arena) -> None:
        for call in calls:
            call()

    return run, sets * on.work.cache_bytes(context - 1, context)


def overhead(on: Subjects, sizes: Sizes, peers: PeerResults) -> list[Line]:
    """Milliseconds per step at batch 1 that are spent outside kernels."""
    found = measure_overhead(on, sizes.prompt, sizes.decode, sizes.repeats)
    found.show()
    line = Line(
        "overhead",
        f"step time outside kernels and linear, batch 1 after {sizes.prompt} tokens",
        "ms",
        1000 * found.outside_s,
        {"limit": 2.0},
        "limit",
        sizes.goal(1.0),
        lower_is_better=True,
    )
    return [line]


LINES: dict[str, Callable[[Subjects, Sizes, PeerResults], list[Line]]] = {
    "decode": decode,
    "ttft": short_first_token,
    "ttft_long": long_first_token,
    "batch": batch,
    "attention": attention,
    "overhead": overhead,
}
