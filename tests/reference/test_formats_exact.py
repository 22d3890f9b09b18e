"""Cache formats in the engine: within each, the same request gets the same bits whatever the cache did."""

from collections.abc import Callable

import pytest
import torch

from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.params import SamplingParams
from support.engines import Request, alone, finish, greedy, shuffled, submit, together, varied
from support.sizes import sized
from support.texts import spread

LENGTHS = spread(sized(5, 12), 1, 290)
NEW = sized(40, 64)  # past the end of a block
FORMATS = ["int8", "int4", "int2", "fp8", "k=int8,v=int4"]
KINDS = [
    *(("12 over 4 heads of 80", format, "bfloat16") for format in FORMATS),
    ("12 over 4 heads of 80", "int8", "float32"),
    ("qwen2, mixed windows", "int4", "bfloat16"),
    ("multi-query", "int8", "bfloat16"),
    ("gpt2", "int8", "bfloat16"),
]


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(256, (n,), generator=generator).tolist() for n in LENGTHS]
    return [(prompt, varied(i, NEW)) for i, prompt in enumerate(prompts)]


ORDER = [3, 1, 0, 4, 2, *range(5, len(LENGTHS))]


@pytest.mark.parametrize(("kind", "format", "dtype"), KINDS)
def test_answers_within_a_format_do_not_depend_on_the_schedule(
    kind: str, format: str, dtype: str, engine_of: Callable[..., Engine]
) -> None:
    options = {"dtype": dtype, "kv_cache_dtype": format}
    plain = engine_of(kind, enable_prefix_caching=False, num_threads=2, **options)
    assert plain.layout.block_size == 32
    expected = together(plain, requests())
    assert alone(plain, requests()) == expected
    small = engine_of(kind, max_num_batched_tokens=16, num_threads=1, **options)
    for _ in ("cold", "warm"):
        assert shuffled(small, requests(), ORDER) == expected
    assert small.stats().formats.keys() > {"bf16" if dtype == "bfloat16" else "f32"}
    large = engine_of(kind, max_num_batched_tokens=100, max_num_seqs=3, poison=True, **options)
    assert together(large, requests()) == expected


@pytest.mark.parametrize("format", ["int8", "int2"])
def test_a_preempted_answer_is_the_same(format: str, engine_of: Callable[..., Engine]) -> None:
    options = {"dtype": "bfloat16", "kv_cache_dtype": format}
    expected = together(engine_of("multi-query", **options), requests())
    small = engine_of("multi-query", **options)
    tight = engine_of(
        "multi-query",
        kv_cache_memory=small.layout.sequence_bytes(max(LENGTHS) + NEW + 32),
        poison=True,
        **options,
    )
    for _ in ("cold", "warm"):
        assert together(tight, requests()) == expected
    assert tight.totals().preemptions > 0


@pytest.mark.parametrize("format", ["int4", "fp8"])
def test_forks_share_sealed_blocks_and_answer_as_they_would_alone(
    format: str, engine_of: Callable[..., Engine]
) -> None:
    engine = engine_of("12 over 4 heads of 80", dtype="bfloat16", kv_cache_dtype=format)
    prompt = requests()[-1][0]
    params = {"max_tokens": NEW, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    live = submit(engine, "three", (prompt, SamplingParams(n=3, **params)))
    finish(engine)
    one = submit(engine, "one", (prompt, SamplingParams(**params)))
    finish(engine)
    assert live.output().outputs[0].token_ids == one.output().outputs[0].token_ids
    assert len({tuple(o.token_ids) for o in live.output().outputs}) == 3


def test_the_receipt_counts_positions_by_format(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("multi-query", dtype="bfloat16", kv_cache_dtype="int8")
    prompt = requests()[-1][0][:100]
    for reused in (0, 96):
        live = submit(engine, f"after {reused}", (prompt, greedy(40)))
        finish(engine)
        receipt = live.request.receipt
        assert receipt.reused_tokens == reused
        # 139 positions were computed: a block as it was filled, three stored, and 11 in an open one.
        assert dict(receipt.formats) == {"bf16": 43, "int8": 96}
    assert dict(engine.scheduler.totals.formats) == {"bf16": 86, "int8": 192}


def test_an_arena_of_one_sequence_holds_it_to_its_last_token(engine_of: Callable[..., Engine]) -> None:
    for format in FORMATS:
        planned = engine_of("multi-query", dtype="bfloat16", kv_cache_dtype=format).layout
        for length in (32, 64, 96, 320):
            tight = engine_of(
                "multi-query",
                dtype="bfloat16",
                kv_cache_dtype=format,
                kv_cache_memory=planned.sequence_bytes(length),
            )
            live = submit(tight, "one", ([7] * 20, greedy(1000)))
            finish(tight)
            assert live.request.receipt.prompt_tokens + live.request.receipt.completion_tokens == length
            assert live.request.receipt.recomputed_tokens == 0


def test_a_prompt_takes_no_more_room_at_once_than_there_is(engine_of: Callable[..., Engine]) -> None:
    """Blocks being filled lie beside those they are sealed into; a chunk that would need a neighbour's room is cut."""
    options = {"dtype": "bfloat16", "kv_cache_dtype": "int4", "enable_prefix_caching": False}
    planned = engine_of("multi-query", **options).layout
    room = planned.sequence_bytes(60) + planned.sequence_bytes(600) + 2 * planned.block_sizes_bytes[0]
    tight = engine_of("multi-query", **options, kv_cache_memory=room, max_num_batched_tokens=256)
    lives = [submit(tight, "long", ([7] * 590, greedy(5))), submit(tight, "short", ([8] * 20, greedy(30)))]
    finish(tight)
    assert [live.request.receipt.preemptions for live in lives] == [0, 0]
    assert [live.request.receipt.recomputed_tokens for live in lives] == [0, 0]


def test_impossible_formats_are_refused_by_name(engine_of: Callable[..., Engine]) -> None:
    for options, words in (
        ({"kv_cache_dtype": "int3"}, "kv_cache_dtype='int3'"),
        ({"kv_cache_dtype": "int8", "block_size": 8}, "block_size=8"),
        ({"kv_cache_dtype": "k=f32,v=int8", "dtype": "bfloat16"}, "compute type 'bf16'"),
        ({"kv_cache_dtype_overrides": ["sliding=int8"]}, "sliding=int8"),
        ({"kv_cache_dtype_overrides": {"odd": "int8"}}, "'odd'"),
        ({"kv_cache_dtype_overrides": ["int8"]}, "kind=format"),
    ):
        with pytest.raises(ConfigError, match=words):
            engine_of("multi-query", **options)


def test_a_kind_of_layers_may_have_a_format_of_its_own(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(
        "qwen2, mixed windows",
        dtype="bfloat16",
        kv_cache_dtype="int8",
        kv_cache_dtype_overrides=["sliding=int4"],
    )
    names = {engine.layout.sealed_format(g).name for g in range(len(engine.layout.groups))}
    assert names == {"int8", "int4"}
    together(engine, requests())
    assert engine.stats().formats.keys() >= {"int8", "bf16"}
