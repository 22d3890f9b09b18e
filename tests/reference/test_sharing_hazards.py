"""What could hand one request another's numbers: memory that was given back half filled, and equal hashes."""

from collections.abc import Callable, Sequence

import pytest
import torch

from octavo.cache.hashing import Hasher
from octavo.engine import Engine
from octavo.params import SamplingParams
from support.engines import greedy, submit
from support.sharing import assert_sums, hear, pool, serve
from support.sizes import sized

B = 4
POOL = 60
NEW = 3
CANCELS = 19
KIND = "llama"


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(256, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def params() -> SamplingParams:
    return greedy(NEW, temperature=0.8, seed=3)


@pytest.mark.parametrize(("block_size", "chunk"), sized([(4, 8)], [(4, 8), (4, 9), (16, 34)]))
@pytest.mark.parametrize("poison", [False, True], ids=["plain", "poison"])
@pytest.mark.parametrize("taken", ["free", "all"])
def test_a_prompt_cancelled_after_each_chunk(
    taken: str, poison: bool, block_size: int, chunk: int, single_of: Callable[..., Engine]
) -> None:
    """40 blocks; fillers take every block that the cancelled request left free, or every block there is."""
    prompt = tokens(40 * block_size, 1)
    asked = [(prompt, params()), ([*prompt[: 3 * block_size], *tokens(9, 2)], params())]
    plain = single_of(KIND, enable_prefix_caching=False)
    expected = [hear(plain, [request])[0] for request in asked]
    engine = single_of(
        KIND,
        block_size=block_size,
        max_num_batched_tokens=chunk,
        kv_cache_memory=pool(POOL, block_size),
        poison=poison,
    )
    block = engine.layout.block_bytes(0)
    for chunks in range(1, CANCELS + 1):
        engine.cache.reset()
        submit(engine, "cancelled", asked[0])
        for _ in range(chunks):
            engine.step()
        engine.abort("cancelled")
        engine.check()
        left = min(chunks * chunk, len(prompt)) // block_size
        assert engine.stats().bytes_free == (POOL - left) * block
        engine.events()
        filler = tokens((POOL - left if taken == "free" else POOL) * block_size - 1, 100 + chunks)
        hear(engine, [(filler, greedy(1))])
        # Its last block was never full, so it is free again; it was the last one there was.
        assert engine.stats().bytes_free == block
        reclaimed = sum(event.kind == "reclaimed" for event in engine.events())
        assert reclaimed == (0 if taken == "free" else left)
        for request, right in zip(asked, expected, strict=True):
            assert hear(engine, [request]) == [right]


@pytest.mark.parametrize("bits", [8, 256])
def test_prompts_whose_hashes_collide(bits: int, single_of: Callable[..., Engine]) -> None:
    """600 prompts that differ from their first block on, and 256 hashes for all their blocks."""
    count, wide = 600, sized(200, 600)
    asked = [(tokens(6 + i % 17, 1000 + i), greedy(NEW)) for i in range(count)]
    plain = single_of(KIND, enable_prefix_caching=False)
    expected = hear(plain, asked)
    engine = single_of(KIND, block_size=B)
    engine.cache.index._hasher = Hasher(bits)
    heard, receipts = serve(engine, asked)
    assert heard == expected
    assert len({tuple(prompt[:B]) for prompt, _ in asked}) == count
    assert all(receipt.reused_tokens == 0 for receipt in receipts)
    assert all(receipt.miss is not None for receipt in receipts)
    collisions = engine.cache.index.collisions
    assert (collisions > count) == (bits == 8)
    again, warm = serve(engine, asked[:wide])
    assert again == expected[:wide]
    hits = sum(receipt.reused_tokens for receipt in warm)
    assert hits > 0
    assert (hits < sum((len(prompt) - 1) // B * B for prompt, _ in asked[:wide])) == (bits == 8)
    assert_sums(engine.scheduler.totals, [*receipts, *warm])


def test_prompts_that_share_a_prefix_under_colliding_hashes(single_of: Callable[..., Engine]) -> None:
    shared = [tokens(5 * B, seed) for seed in range(4)]
    asked = [
        ([*shared[i % 4][: B * (1 + i % 5)], *tokens(7, 50 + i)], params()) for i in range(sized(80, 600))
    ]
    plain = single_of(KIND, enable_prefix_caching=False)
    engine = single_of(KIND, block_size=B, kv_cache_memory=pool(100, B), poison=True)
    engine.cache.index._hasher = Hasher(8)
    assert hear(engine, asked) == hear(plain, asked)
    assert engine.cache.index.collisions > 0
    assert engine.scheduler.totals.reused_tokens > 0


def test_recycled_memory_never_shows(single_of: Callable[..., Engine]) -> None:
    """Every kind of layer group, in a pool so small that each request lives in the blocks of the one before."""
    for kind in ("llama", "qwen2, mixed windows", "gemma2"):
        asked: Sequence[tuple[list[int], SamplingParams]] = [
            (tokens(5 + 7 * i, 200 + i), params()) for i in range(8)
        ]
        plain = single_of(kind, enable_prefix_caching=False)
        small = single_of(
            kind, block_size=B, kv_cache_memory=pool(18, B, kind), max_num_batched_tokens=10, poison=True
        )
        expected = hear(plain, asked)
        assert hear(small, asked) == expected
        assert hear(small, asked) == expected
        assert any(event.kind == "reclaimed" for event in small.events())
