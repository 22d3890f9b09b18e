"""The account of `octavo bench waste`, on cases small enough to count by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from octavo.bench.cli import app
from octavo.bench.waste import (
    SMOLLM2_LAYERS,
    Lengths,
    bytes_used,
    compare_waste,
    drawn_lengths,
    read_azure_trace,
    run_account,
)
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.errors import ConfigError
from support.sizes import DATA

AZURE = DATA / "traces" / "azure" / "AzureLLMInferenceTrace_conv.csv"
TOKEN = 8  # bytes: 1 layer, 1 KV head of 2 numbers, K and V, bf16
LAYOUT = CacheLayout((LayerGroup((0,), num_kv_heads=1, head_dim=2),), 4, "bf16")


def test_one_request_is_counted_step_by_step() -> None:
    # Steps leave 5, 6, 7 positions in blocks of 4: always two blocks.
    account = run_account([Lengths(5, 3)], LAYOUT, 64 * TOKEN, max_num_seqs=8, max_num_batched_tokens=16)
    assert account.steps == 3
    assert account.reserved == 8 * TOKEN
    assert account.used == 6 * TOKEN
    assert account.wasted == 2 * TOKEN
    assert account.waste == 1 / 4
    assert (account.most_running, account.mean_running, account.preemptions) == (1, 1.0, 0)


def test_a_prompt_in_chunks_holds_only_what_it_has_reached() -> None:
    # Chunks of 4 leave 4 and 8 positions, the third step 9; the answer is that step's token.
    account = run_account([Lengths(9, 1)], LAYOUT, 64 * TOKEN, max_num_seqs=8, max_num_batched_tokens=4)
    assert account.steps == 3
    assert account.reserved == pytest.approx((4 + 8 + 12) / 3 * TOKEN)
    assert account.used == pytest.approx((4 + 8 + 9) / 3 * TOKEN)


def test_contiguous_reservation_holds_the_longest_request_from_the_first_step() -> None:
    # The longest has 4 + 4 tokens. Both run for two steps, then the longer one alone for two more.
    report = compare_waste([Lengths(4, 2), Lengths(4, 4)], LAYOUT, 16 * TOKEN)
    held, used = [16, 16, 8, 8], [4 + 4, 5 + 5, 6, 7]
    assert report.longest == 8
    assert report.contiguous.steps == 4
    assert report.contiguous.reserved == sum(held) / 4 * TOKEN
    assert report.contiguous.used == sum(used) / 4 * TOKEN
    assert report.contiguous.mean_running == 1.5


def test_more_requests_fit_in_blocks_than_in_reservations() -> None:
    requests = [Lengths(3, 2)] * 6 + [Lengths(20, 4)]
    report = compare_waste(requests, LAYOUT, 48 * TOKEN)
    assert report.contiguous.most_running == 2
    assert report.blocks.most_running == 7
    assert report.blocks.steps < report.contiguous.steps


def test_a_window_keeps_only_what_it_reaches() -> None:
    layout = CacheLayout((LayerGroup((0,), 1, 2), LayerGroup((1, 2), 1, 2, window=6)), 4, "bf16")
    assert bytes_used(layout, 5) == 5 * 3 * TOKEN
    assert bytes_used(layout, 10) == (10 + 2 * 6) * TOKEN


def test_a_budget_below_the_longest_request_is_refused() -> None:
    with pytest.raises(ConfigError, match="longest request has 30 tokens, give at least 240 bytes"):
        compare_waste([Lengths(28, 2)], LAYOUT, 239)


def test_lengths_of_a_trace_are_scaled_and_never_zero(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,374,44\n1,396,1\n2,9,9\n")
    assert read_azure_trace(trace, 2, 0.25) == [Lengths(94, 11), Lengths(99, 1)]
    with pytest.raises(ConfigError, match="holds 3 requests"):
        read_azure_trace(trace, 4, 0.25)
    trace.write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="ContextTokens"):
        read_azure_trace(trace, 1, 1.0)


def test_made_up_lengths_are_the_same_every_time() -> None:
    assert drawn_lengths(50, 0.25) == drawn_lengths(50, 0.25)
    assert drawn_lengths(50, 0.25) != drawn_lengths(50, 0.5)


@pytest.mark.skipif(not AZURE.exists(), reason=f"no Azure trace in {DATA}")
def test_on_the_azure_trace_blocks_waste_at_most_4_percent_and_reservations_60_to_80() -> None:
    requests = read_azure_trace(AZURE, requests=200, scale=0.25)
    report = compare_waste(requests, CacheLayout((SMOLLM2_LAYERS,), 16, "bf16"), 256 << 20)
    assert report.blocks.waste <= 0.04
    assert 0.60 <= report.contiguous.waste <= 0.80
    assert report.blocks.most_running > 3 * report.contiguous.most_running
    # Nothing is lost: both rules computed every position that had to be there, at least once.
    positions = sum(r.cached for r in requests)
    assert report.blocks.steps * 512 >= positions


def test_smaller_blocks_waste_less() -> None:
    requests = drawn_lengths(40, 0.25)
    layout = CacheLayout((SMOLLM2_LAYERS,), 16, "bf16")
    wastes = [
        compare_waste(requests, replace(layout, block_size=size), 256 << 20).blocks.waste
        for size in (8, 16, 32)
    ]
    assert wastes == sorted(wastes)
    assert wastes[0] > 0


def test_the_command_prints_one_json_object() -> None:
    result = CliRunner().invoke(app, ["waste", "--requests", "12", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["requests"], report["block_size"], report["budget"]) == (12, 16, 256 << 20)
    assert report["blocks"]["waste"] < report["contiguous"]["waste"]


def test_the_command_prints_a_table() -> None:
    result = CliRunner().invoke(app, ["waste", "--requests", "12"])
    assert result.exit_code == 0, result.output
    assert "contiguous" in result.stdout
    assert "blocks of 16" in result.stdout
