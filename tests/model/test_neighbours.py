"""SmolLM2: company, cancelled neighbours and recycled memory full of NaN leave a real answer as it is."""

import pytest

from octavo import LLM
from support.engines import Request, answers, finish, greedy, make_engine, submit, together, varied
from support.sizes import sized
from support.texts import real_prompts, spread

pytestmark = pytest.mark.model

COUNT, LONGEST, NEW = sized((6, 120, 16), (16, 900, 48))
LAYERS, KV_HEADS, HEAD_DIM, BLOCK = 30, 3, 64, 16
BLOCK_BYTES = LAYERS * KV_HEADS * 2 * BLOCK * HEAD_DIM * 2


@pytest.fixture(scope="module")
def requests(smollm2_bf16: LLM) -> list[Request]:
    prompts = real_prompts(spread(COUNT, 5, LONGEST), smollm2_bf16.engine.tokenizer.encode, seed=7)
    return [(prompt, varied(i, NEW)) for i, prompt in enumerate(prompts)]


def test_recycled_and_poisoned_memory_and_cancelled_neighbours(
    smollm2_bf16: LLM, requests: list[Request]
) -> None:
    expected = together(smollm2_bf16.engine, requests)
    longest = -(-(LONGEST + NEW) // BLOCK)
    engine = make_engine(
        "smollm2",
        dtype="bfloat16",
        poison=True,
        kv_cache_memory=(longest + 3) * BLOCK_BYTES,
        max_num_batched_tokens=64,
    )
    victim = ([*requests[-1][0][:40], *range(50, 150)], greedy(40))
    preemptions = 0
    for abort_after in sized((0, 2, 5), range(12)):
        doomed = submit(engine, "victim", victim)
        lives = [submit(engine, f"request {i}", request) for i, request in enumerate(requests)]
        for _ in range(abort_after):
            engine.step()
        assert engine.abort("victim") is doomed
        engine.check()
        finish(engine)
        assert [answers(live.output()) for live in lives] == expected
        preemptions += sum(live.request.receipt.preemptions for live in lives)
    assert preemptions > 0
    assert engine.stats().bytes_running == 0
