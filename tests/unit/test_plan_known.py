"""Known numbers of caches. Sizes are decimal; every source is named where its number is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.plan.advice import HeadVariant, head_variants
from octavo.plan.facts import table
from octavo.plan.report import make_plan


def row(model: str, **options: Any) -> dict[str, Any]:
    """The one row of a plan for eight H100, unless `options` say otherwise."""
    plan = make_plan(model, **{"hardware": "8xH100-80GB", **options})
    rows: list[dict[str, Any]] = plan.to_dict()["rows"]
    assert len(rows) == 1
    return rows[0]


def variants(model: str, **options: Any) -> dict[int, HeadVariant]:
    plan = make_plan(model, **{"hardware": "8xH100-80GB", **options})
    return {variant.kv_heads: variant for variant in head_variants(plan.first)}


@pytest.mark.parametrize(
    ("model", "gigabytes"), [("llama-3-70b", 10.5), ("llama-3.1-70b", 10.5), ("llama-3-8b", 4.2)]
)
def test_a_request_of_32_000_tokens(model: str, gigabytes: float) -> None:
    """Source: "The Llama 3 Herd of Models", arXiv 2407.21783, table 3: 80 (32) layers, 8 KV heads, and heads of 128;
    2 x 80 x 8 x 128 x 2 bytes x 32,000 = 10.5 GB."""
    assert round(row(model, context="32k")["bytes_per_request"] / 1e9, 1) == gigabytes


def test_requests_on_eight_h100_by_heads_and_format() -> None:
    """Half of 640 GB holds about 3 requests of 32,000 tokens with 64 KV heads, 30 with 8, 60 to 61 in fp8.

    Source: the sizes above, and NVIDIA's data sheet (80 GB are 80e9 bytes); scales and the two blocks at compute
    precision cost fp8 the 61st."""
    options = {"context": "32k", "kv_budget": "0.5"}
    bf16, fp8 = (row("llama-3-70b", kv_cache_dtype=name, **options) for name in ("bf16", "fp8"))
    assert bf16["cache_bytes"] == 320_000_000_000
    assert bf16["max_requests"] == 30
    assert fp8["max_requests"] in (60, 61)
    assert variants("llama-3-70b", **options)[64].max_requests == 3
    assert bf16["binding"] == "cache"


def test_a_configuration_with_64_kv_heads_says_the_same_as_the_variant(tmp_path: Path) -> None:
    config = {**table()["llama-3-70b"]["config"], "num_key_value_heads": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"context": "32k", "kv_budget": "0.5"}
    own, variant = row(str(tmp_path), **options), variants("llama-3-70b", **options)[64]
    assert (own["max_requests"], own["bytes_per_token"]) == (variant.max_requests, variant.bytes_per_token)


def test_llama_70b_at_200_000_tokens() -> None:
    """40 to 80 GB: between the 42.9 GB of 131,072 tokens
    (https://www.spheron.network/blog/kv-cache-optimization-guide) and one whole H100."""
    assert 40e9 < row("llama-3.1-70b", context="200k")["bytes_per_request"] < 80e9
    assert round(row("llama-3.1-70b", context="131072")["bytes_per_request"] / 1e9, 1) == 42.9


def test_fewer_heads_make_the_cache_as_much_smaller() -> None:
    """Source: arXiv 1911.02150 (one KV head for all queries: MQA) and arXiv 2305.13245 (groups: GQA)."""
    found = {heads: variant.bytes_per_token for heads, variant in variants("llama-3-70b").items()}
    assert found[64] == 64 * found[1] == 8 * found[8]


@pytest.mark.parametrize("format", ["fp8", "int8", "int4", "int2"])
def test_ratios_of_format_and_heads_multiply(format: str) -> None:
    whole, small = variants("llama-3-70b"), variants("llama-3-70b", kv_cache_dtype=format)
    format_alone = whole[64].bytes_per_token / small[64].bytes_per_token
    heads_alone = whole[64].bytes_per_token / whole[8].bytes_per_token
    both = whole[64].bytes_per_token / small[8].bytes_per_token
    assert both == pytest.approx(format_alone * heads_alone, rel=1e-3)


@pytest.mark.parametrize(
    ("model", "bytes_per_token"),
    [("deepseek-v3", 70_272), ("qwen2.5-72b", 327_680), ("llama-3.1-405b", 516_096)],
)
def test_bytes_per_token(model: str, bytes_per_token: int) -> None:
    """Source: "Insights into DeepSeek-V3", arXiv 2505.09343, table 1: 70.272, 327.680 and 516.096 KB at bf16.
    DeepSeek-V3 keeps (512 + 64) numbers in each of 61 layers (arXiv 2412.19437)."""
    assert row(model)["bytes_per_token"] == bytes_per_token


def test_windows_bound_most_layers_of_gemma_3() -> None:
    """Source: Gemma 3 report, arXiv 2503.19786: five layers with a window of 1,024 for each global one, so that at 32k
    tokens the cache takes less than 15 % of the memory instead of 60 %."""
    found = row("gemma-3-27b", context="32768")
    assert found["bytes_per_request"] < 0.22 * found["bytes_per_token"] * 32_768
    assert found["bytes_per_request"] < 0.15 * (found["bytes_per_request"] + found["weights_bytes"])
