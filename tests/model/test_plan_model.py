"""SmolLM2 in a cache of exactly the bytes that `octavo plan smollm2` names."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from octavo import LLM, SamplingParams
from octavo.cache.formats import FORMATS
from octavo.errors import KVCacheTooSmall
from octavo.plan.report import make_plan
from support.sizes import sized

pytestmark = pytest.mark.model


@pytest.mark.parametrize("format", sized(["bf16", "int8"], list(FORMATS)))
def test_a_request_fills_the_planned_bytes_and_one_block_more_is_refused(
    format: str, smollm2_of: Callable[..., AbstractContextManager[LLM]]
) -> None:
    weights, dtype = ("f32", "float32") if format == "f32" else ("bf16", "bfloat16")
    context = sized(128, 1024)

    def planned(tokens: int) -> int:
        plan = make_plan("smollm2", "cpu", context=str(tokens), kv_cache_dtype=format, weights=weights)
        return plan.first.bytes_per_request

    block_size = make_plan("smollm2", "cpu", kv_cache_dtype=format).first.layout.block_size
    options = {"dtype": dtype, "kv_cache_dtype": format, "block_size": block_size}
    with smollm2_of(kv_cache_memory=planned(context), enable_prefix_caching=False, **options) as llm:
        prompt, params = list(range(1, context - 7)), SamplingParams(max_tokens=100, ignore_eos=True)
        answer = llm.generate([prompt], params)[0].outputs[0]
        assert (len(answer.token_ids), answer.finish_reason) == (8, "length")
        assert llm.stats().bytes_total == llm.stats().bytes_free == planned(context)
        with pytest.raises(KVCacheTooSmall, match=f"at least {planned(context + 1)}"):
            llm.generate([list(range(1, context + 1))], params)
        llm.check()
