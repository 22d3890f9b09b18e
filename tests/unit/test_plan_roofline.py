"""Work in closed form against the sums of `octavo.bench.work`, and the bounds that follow from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.bench.work import model_work
from octavo.plan.facts import ModelFacts, facts_of, find_model
from octavo.plan.planner import Case
from octavo.plan.report import make_plan
from support.tiny import KINDS

DENSE = [
    "llama",
    "llama, tied",
    "mistral, window",
    "qwen2, mixed windows",
    "12 over 4 heads of 80",
    "multi-query",
    "gemma2",
]


def facts(kind: str) -> ModelFacts:
    return facts_of(kind, KINDS[kind]().to_dict(), "", "bf16")


def case(of: ModelFacts, **options: object) -> Case:
    plan = make_plan("smollm2", "H100-80GB", **options)  # type: ignore[arg-type]
    first = plan.first
    return Case(of, first.hardware, first.weights, first.format, first.context, first.output)


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("tokens", [1, 7, 24, 25, 100])
def test_work_is_the_sum_over_positions(kind: str, tokens: int, tmp_path: Path) -> None:
    of = facts(kind)
    roofline = case(of).roofline
    KINDS[kind]().save_pretrained(tmp_path)
    work = model_work(tmp_path, of.spec, roofline.layout)
    assert roofline.prefill_flops(tokens) == work.prefill(tokens, tokens).flops
    step = work.decode(tokens - 1, 1)
    assert roofline.decode_flops(tokens) == step.flops
    assert roofline.weight_reads(1) + roofline.cache_reads(tokens) == step.bytes_read


def test_latent_attention_reads_its_vector_once_and_works_on_it() -> None:
    """DeepSeek-V3 (arXiv 2412.19437): 128 heads share 576 numbers per layer and token."""
    roofline = case(find_model("deepseek-v3")).roofline
    assert roofline.cache_reads(1000) == 70_272 * 1000
    more = roofline.decode_flops(1001) - roofline.decode_flops(1000)
    assert more == 61 * 2 * 128 * (576 + 576)
    unfolded = roofline.prefill_flops(2) - 2 * roofline.prefill_flops(1)
    head = 2 * find_model("deepseek-v3").weights.head_matrix
    assert unfolded + head == 61 * 2 * 128 * (192 + 128)


def test_layers_that_borrow_read_what_another_keeps() -> None:
    raw = {
        "model_type": "gemma3n_text",
        "vocab_size": 264,
        "vocab_size_per_layer_input": 264,
        "hidden_size": 64,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    roofline = case(facts_of("x", raw, "", "bf16")).roofline
    one_layer = 2 * 2 * 16 * 2  # K and V, KV heads, head_dim, bytes
    assert roofline.layout.bytes_per_token == 2 * one_layer
    assert roofline.cache_reads(100) == 2 * one_layer * (100 + 8)


def test_a_token_meets_its_experts_and_a_batch_meets_most() -> None:
    weights = find_model("mixtral-8x7b").weights
    assert weights.experts_met(1) == weights.active_experts == weights.experts / 4
    assert weights.experts_met(2) == weights.experts * (1 - 0.75**2)
    assert weights.experts_met(1000) == pytest.approx(weights.experts)


def test_bounds_enclose_and_name_the_slower_resource() -> None:
    roofline = case(find_model("llama-3-8b")).roofline
    short, long = roofline.decode(1000, 1), roofline.prefill(4000)
    assert (short.bound, long.bound) == ("bandwidth", "compute")
    assert short.low < short.high
    reads = roofline.weight_reads(1) + roofline.cache_reads(1000)
    assert short.low == reads / 3350e9
    assert long.low == roofline.prefill_flops(4000) / 989.4e12
    assert long.high >= long.low / 0.4


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b", "deepseek-v3", "smollm2-135m"])
@pytest.mark.parametrize("context", [1, 128, 512])
def test_the_compute_bound_batch_is_the_first(model: str, context: int) -> None:
    roofline = case(find_model(model)).roofline
    batch = roofline.compute_bound_batch(context)
    if batch is None:
        assert roofline.decode(context, 1 << 20).bound == "bandwidth"
        return
    assert roofline.decode(context, batch).bound == "compute"
    assert batch == 1 or roofline.decode(context, batch - 1).bound == "bandwidth"


def test_some_batches_are_compute_bound_and_long_contexts_never_are() -> None:
    """Without a cache to read, decode turns at (FLOP/s) / (bytes/s) for bf16: 989.4 / 3.35 = 295 on an H100."""
    roofline = case(find_model("llama-3-8b")).roofline
    found = roofline.compute_bound_batch(1)
    assert found is not None
    assert 295 <= found <= 300
    assert roofline.compute_bound_batch(100_000) is None
