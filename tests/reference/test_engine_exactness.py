"""The same request gets the same bits however it was scheduled: every kind of tiny model, both compute types."""

from collections.abc import Callable

import pytest
import torch

from octavo.engine import Engine
from support.engines import Request, alone, greedy, shuffled, together, varied
from support.sizes import sized
from support.texts import spread

# Across a span's end at 256, and more than one query tile.
LENGTHS = spread(sized(6, 12), 1, 290)
NEW = sized(8, 48)
BOTH = ("bfloat16", "float32")
FUSED = [
    *((kind, d) for kind in ("12 over 4 heads of 80", "multi-query") for d in BOTH),
    *sized(
        [("qwen2, mixed windows", "bfloat16"), ("qwen3", "float32")],
        [(kind, d) for kind in ("qwen2, mixed windows", "qwen3") for d in BOTH],
    ),
]
UNFUSED = sized(
    [("gpt2", "float32"), ("gpt-neox", "bfloat16"), ("mixtral", "bfloat16"), ("gemma2", "bfloat16")],
    [(kind, d) for kind in ("gpt2", "gpt-neox", "mixtral", "gemma2") for d in BOTH],
)


def requests() -> list[Request]:
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(256, (n,), generator=generator).tolist() for n in LENGTHS]
    return [(prompt, varied(i, NEW)) for i, prompt in enumerate(prompts)]


ORDER = [3, 1, 5, 0, 4, 2, *range(6, len(LENGTHS))]


@pytest.mark.parametrize(("kind", "dtype"), FUSED)
def test_answers_of_fused_models_do_not_depend_on_the_schedule(
    kind: str, dtype: str, engine_of: Callable[..., Engine]
) -> None:
    plain = engine_of(kind, dtype=dtype, enable_prefix_caching=False, num_threads=2)
    assert plain.runner.exact
    expected = together(plain, requests())
    assert alone(plain, requests()) == expected
    small = engine_of(kind, dtype=dtype, block_size=8, max_num_batched_tokens=16, num_threads=1)
    for _ in ("cold", "warm"):
        assert shuffled(small, requests(), ORDER) == expected
    large = engine_of(kind, dtype=dtype, block_size=32, max_num_batched_tokens=100, max_num_seqs=3)
    assert together(large, requests()) == expected


@pytest.mark.parametrize(("kind", "dtype"), UNFUSED)
def test_answers_of_unfused_models_do_not_depend_on_the_schedule(
    kind: str, dtype: str, engine_of: Callable[..., Engine]
) -> None:
    plain = engine_of(kind, dtype=dtype, enable_prefix_caching=False, num_threads=2)
    assert plain.runner.exact
    expected = together(plain, requests())
    assert alone(plain, requests()) == expected
    other = engine_of(kind, dtype=dtype, block_size=8, max_num_batched_tokens=100, num_threads=1)
    for _ in ("cold", "warm"):
        assert shuffled(other, requests(), ORDER) == expected


@pytest.mark.parametrize("kind", ["12 over 4 heads of 80", "qwen2, mixed windows", "gpt2"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_greedy_is_a_full_recompute_at_every_step(
    kind: str, dtype: str, engine_of: Callable[..., Engine]
) -> None:
    engine = engine_of(kind, dtype=dtype, enable_prefix_caching=False)
    asked = [(prompt, greedy(NEW)) for prompt, _ in requests()]
    found = together(engine, asked)
    sequences = [list(prompt) for prompt, _ in asked]
    for step in range(NEW):
        naive = together(engine, [(ids, greedy(1)) for ids in sequences])
        for ids, [one], [answer] in zip(sequences, naive, found, strict=True):
            assert one.token_ids[0] == answer.token_ids[step]
            assert one.logprobs[0] == answer.logprobs[step]
            ids.append(one.token_ids[0])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_choices_of_one_request_do_not_depend_on_the_schedule(
    dtype: str, engine_of: Callable[..., Engine]
) -> None:
    """Answer 0 of n is the one of n = 1; forked choices equal those that waited and recomputed their prompt."""
    [(prompt, params)] = requests()[5:6]
    assert params.seed is not None
    sampled = greedy(NEW, temperature=1.2, seed=params.seed)
    several = greedy(NEW, temperature=1.2, seed=params.seed, n=4)
    roomy = engine_of("llama", dtype=dtype)
    expected = together(roomy, [(prompt, several)])[0]
    assert len({answer.token_ids for answer in expected}) == 4
    assert together(roomy, [(prompt, sampled)])[0] == expected[:1]
    narrow = engine_of("llama", dtype=dtype, max_num_seqs=2, max_num_batched_tokens=7, block_size=4)
    assert together(narrow, [(prompt, several)])[0] == expected


@pytest.mark.parametrize("kind", ["multi-query", "gpt2"])
def test_decoded_logprobs_are_those_of_the_prompt(kind: str, engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(kind)
    for prompt, params in requests():
        [answer] = together(engine, [(prompt, params)])[0]
        live = engine.prepare("again", [*prompt, *answer.token_ids], greedy(1, prompt_logprobs=0))
        engine.submit(live)
        while engine.has_work:
            engine.step()
        read = live.output().prompt_logprobs
        assert read is not None
        for token, step, entries in zip(answer.token_ids, answer.logprobs, read[len(prompt) :], strict=True):
            assert entries is not None
            assert (token, entries[token].logprob, entries[token].rank) == step[0]
