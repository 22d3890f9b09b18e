"""What would help, and what somebody who reads a plan must know."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from octavo.cli import main
from octavo.config import format_bytes
from octavo.plan.advice import advise, notes, prompt_notes
from octavo.plan.planner import Case
from octavo.plan.report import make_plan

EIGHT = "8xH100-80GB"


def first(model: str = "llama-3-70b", device: str = EIGHT, **options: Any) -> Case:
    return make_plan(model, device, **options).first


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_heads_fewer_than_devices_are_replicated() -> None:
    def on(devices: int, model: str) -> Case:
        return first(model, f"{devices}xH100-80GB", kv_budget="0.25", weights="int4")

    assert [on(n, "llama-3-70b").replication for n in (4, 8, 16)] == [1, 1, 2]
    assert on(16, "llama-3-70b").max_requests == on(8, "llama-3-70b").max_requests
    assert on(8, "deepseek-v3").replication == 8
    assert on(2, "smollm2").replication == pytest.approx(4 / 3)
    assert "9 attention heads do not divide among 2" in " ".join(notes(on(2, "smollm2")))


@pytest.mark.parametrize(
    ("model", "device", "words"),
    [
        ("llama-3-70b", "16xH100-80GB", "hold keys and values 2 times, because KV heads are fewer: 8"),
        (
            "llama-3-8b",
            "3xH100-80GB",
            "1.125 times, because 8 KV heads do not divide among them: each .* for 3",
        ),
        ("smollm2", "2xH100-80GB", "1.333 times, because 3 KV heads do not divide"),
        ("deepseek-v3", "16xH200-141GB", "16 times, because each needs the latent vectors whole"),
    ],
)
def test_why_devices_hold_copies_is_said(model: str, device: str, words: str) -> None:
    assert re.search(words, " ".join(notes(first(model, device))))


def test_one_head_on_many_devices_is_said_to_be_held_by_all(capsys: pytest.CaptureFixture[str]) -> None:
    command = ("llama-3-70b", "--kv-budget", "0.5", "--context", "32000", "--hardware")
    found = {row["kv_heads"]: row for row in printed(capsys, *command, EIGHT)["kv_head_variants"]}
    assert {heads: row["replication"] for heads, row in found.items()} == {64: 1, 8: 1, 1: 8}
    a_request = found[1]["bytes_per_token"] * found[1]["replication"] * 32_000
    assert found[1]["max_requests"] == 320e9 // a_request == found[8]["max_requests"]
    assert main(["plan", *command, EIGHT]) == 0
    assert "41 kB, held 8 times" in capsys.readouterr().out
    (advice,) = [a for a in printed(capsys, *command, "4xH100-80GB")["help"] if "MQA" in a["change"]]
    assert advice["change"] == "a model with 1 KV head (MQA, held 4 times)"


def test_advice_is_what_its_plan_says() -> None:
    case = first(context="32k", kv_budget="0.5")
    found = {advice.change: advice for advice in advise(case)}
    half = next(advice for change, advice in found.items() if change.startswith("--context 16000"))
    assert half.max_requests == first(context="16k", kv_budget="0.5").max_requests
    assert half.times == half.max_requests / 30
    fp8 = next(advice for change, advice in found.items() if "fp8" in change)
    assert fp8.max_requests == first(context="32k", kv_budget="0.5", kv_cache_dtype="fp8").max_requests
    counts = [advice.max_requests for advice in advise(case)]
    assert counts == sorted(counts, reverse=True)
    assert min(counts) > 30


def test_a_shared_prefix_is_held_once() -> None:
    case = first("smollm2", "cpu", context="1024", kv_budget="64MiB")
    sequence = case.layout.sequence_bytes
    own = sequence(1024) - sequence(512)
    shared = next(advice for advice in advise(case) if "shared prefix" in advice.change)
    assert (
        sequence(512) + shared.max_requests * own
        <= 64 << 20
        < sequence(512) + (shared.max_requests + 1) * own
    )


@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("context", ["32000", "6000"])
@pytest.mark.parametrize("model", ["mistral-7b-v0.1", "gemma-3-27b", "gpt-oss-20b", "llama-3-8b"])
def test_a_shared_prefix_saves_what_is_still_read_of_it(model: str, context: str, format: str) -> None:
    """The requests it promises fit when all are at their full length, and no more of them; counted block by block."""
    case = first(model, "H100-80GB", context=context, kv_cache_dtype=format)
    layout, last, half = case.layout, case.context - 1, case.context // 2
    prefix = range(half // layout.block_size)
    shared = sum(
        layout.format_bytes(g, layout.block_format(g, i))
        for g in range(len(layout.groups))
        for i in prefix
        if i >= layout.first_block(g, last)
    )
    left = case.cache_bytes - layout.sequence_bytes(len(prefix) * layout.block_size)
    fits = left // (case.bytes_per_request - shared)
    promised = [advice.max_requests for advice in advise(case) if "shared prefix" in advice.change]
    assert promised == ([fits] if fits > case.max_requests else [])


def test_a_prefix_that_windows_have_left_saves_nothing() -> None:
    assert not any(
        "shared prefix" in advice.change for advice in advise(first("mistral-7b-v0.1", "H100-80GB"))
    )
    found = {advice.change: advice.max_requests for advice in advise(first("gemma-3-27b", "H100-80GB"))}
    assert found["a shared prefix of 16000 tokens, held once"] <= found["--context 16000, half as long"]


def test_smaller_weights_help_where_weights_bind() -> None:
    case = first("llama-3-70b", "2xH100-80GB", context="32k")
    found = {advice.change: advice for advice in advise(case)}
    assert case.max_requests == 0
    assert found["--weights int4"].max_requests > found["--weights fp8"].max_requests > 0
    assert found["twice as many devices"].max_requests > 0
    assert all(advice.times is None for advice in found.values())


def test_prompt_heavy_work_is_told_that_a_cache_does_not_help() -> None:
    heavy, light = first(context="32k", output="16"), first(context="2k", output="1900")
    assert heavy.prefill_share > 0.9 > 0.2 > light.prefill_share
    assert "a larger cache will not give more tokens" in prompt_notes(heavy)[0]
    assert prompt_notes(light) == []


def test_long_contexts_and_crowds_are_said() -> None:
    assert notes(first(context="8k")) == []
    text = " ".join(notes(first(context="9k", kv_cache_dtype="int4", concurrency=10**6)))
    for words in ("made for 8192 positions; 9000", "of the 1000000 requests"):
        assert words in text


def test_a_budget_that_is_cut_is_noted(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["llama-3-70b", "--hardware", EIGHT, "--kv-budget", "600GiB"]
    [row] = printed(capsys, *command)["rows"]
    (note,) = [note for note in row["notes"] if "kv_budget" in note]
    assert note == "the cache is cut from the 600.0 GiB of kv_budget to the 464.6 GiB that the weights leave"
    assert format_bytes(row["cache_bytes"]) == "464.6 GiB"
    assert main(["plan", *command]) == 0
    assert f"Note: {note}." in capsys.readouterr().out
    assert not any("kv_budget" in note for note in notes(first(kv_budget="400GiB")))


@pytest.mark.parametrize("budget", ["100", "0.0001"])
def test_a_budget_without_room_for_a_request_names_the_least(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def planned(budget: str, *options: str, device: str = "3xH100-80GB") -> dict[str, Any]:
        command = ("llama-3-8b", "--hardware", device, "--kv-budget", budget, *options)
        [row] = printed(capsys, *command)["rows"]
        return dict(row)

    row = planned(budget)
    (note,) = [note for note in row["notes"] if "kv_budget" in note]
    found = re.fullmatch(rf"kv_budget={budget} holds no request of 8192 .* least .* kv_budget=(\d+)", note)
    assert found
    assert (row["max_requests"], row["binding"]) == (0, "cache")
    assert planned(found[1])["max_requests"] == 1
    assert planned(str(int(found[1]) - 1))["max_requests"] == 0
    assert "more than the weights leave" in " ".join(planned(budget, "--context", "3M")["notes"])
    assert "holds no request" not in " ".join(planned(budget, "--weights", "f32", device="L4-24GB")["notes"])
