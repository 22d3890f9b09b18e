"""`octavo simulate`: what it prints, whose times it uses, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.plan.facts import find_model
from octavo.plan.machine import Machine
from octavo.plan.report import make_plan
from octavo.simulate import fitted
from octavo.simulate.fitted import FittedCost, Measured
from octavo.simulate.report import load
from octavo.simulate.synthetic import Synthetic

SERVED = ("--model", "smollm2", "--hardware", "cpu")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {
            "timestamp": 300 * a.index,
            "input_length": a.prompt,
            "output_length": a.output,
            "hash_ids": [a.index % 5, *range(10 + 9 * a.index, 10 + 9 * a.index + a.prompt // 128 - 1)],
            "block_size": 128,
        }
        for a in Synthetic(40, 3.0, prompt=400, output=30, shared=128).arrivals()
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_json_holds_the_contract(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "llama-3.1-8b", "--hardware", "H100", "--capacity", "300"]
    assert main(["simulate", str(trace), *arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["requests"] == 40
    assert 0 < found["hit_rate"] < 1
    for name in ("ttft_s", "itl_s", "waiting_s"):
        assert set(found[name]) == {"mean", "p50", "p95", "p99"}
    assert found["ttft_s"]["p50"] <= found["ttft_s"]["p95"] <= found["ttft_s"]["p99"]
    assert found["output_tokens_per_s"] == found["output_tokens"] / found["duration_s"]
    assert found["preemptions"] == 0
    assert found["capacity_blocks"] == 300
    assert found["block_lifetime_s"]["mean"] > 0
    assert all(0 <= share <= 1 for _, share in found["occupancy"]["running"])
    assert "rows" not in found


def test_the_context_of_the_model_bounds_prompts_and_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """smollm2 has 8,192 positions."""
    file = tmp_path / "long.csv"
    lengths = [(8192, 1), (8191, 5), (8190, 5), (100, 9000)]
    lines = [f"2023-11-16 18:15:46.0,{prompt},{output}" for prompt, output in lengths]
    file.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    arguments = ["--model", "smollm2", "--hardware", "cpu", "--capacity", "10k", "--no-lifetimes", "--json"]
    assert main(["simulate", str(file), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rejected"], found["requests"]) == (1, 3)
    assert found["output_tokens"] == 1 + 2 + 8092


def test_sweeps_have_a_row_each_and_are_drawn(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "sweep.png"
    arguments = [
        "--model",
        "smollm2",
        "--hardware",
        "cpu",
        "--capacity",
        "100,1k",
        "--cache-policy",
        "lru,cost",
    ]
    arguments += ["--replicas", "1,2", "--routing", "round-robin,prefix", "--requests", "15", "--speed", "2"]
    assert main(["simulate", str(trace), *arguments, "--json", "--plot", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 16
    settings = {(r["capacity_blocks"], r["cache_policy"], r["replicas"], r["routing"]) for r in found["rows"]}
    assert len(settings) == 16
    assert all(row["requests"] == 15 for row in found["rows"])
    assert file.stat().st_size > 10_000


def test_people_read_tables(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(trace), "--cache-only", "--capacity", "100,unlimited"]) == 0
    assert "unlimited" in capsys.readouterr().out
    arguments = [
        "--model",
        "smollm2",
        "--hardware",
        "cpu",
        "--routing",
        "round-robin,prefix",
        "--replicas",
        "2",
    ]
    assert main(["simulate", str(trace), *arguments]) == 0
    text = capsys.readouterr().out
    for words in ("round-robin", "prefix", "40 requests", "roofline"):
        assert words in text


def test_every_row_says_what_it_rejected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.csv"
    times = ["2023-11-16 18:15:46", "2023-11-16 18:15:47"]
    lines = [f"{at},{prompt},5" for at, prompt in zip(times, (20, 2000), strict=True)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    command = ["simulate", str(trace), "--model", "smollm2", "--hardware", "cpu"]
    assert main([*command, "--capacity", "20,500"]) == 0
    out = capsys.readouterr().out
    assert "2 requests" in out
    header, *rows = (
        [cell.strip() for cell in re.split("[┃│]", line)] for line in out.splitlines() if line[0] in "┃│"
    )
    at = header.index("rejected")
    assert [row[at] for row in rows] == ["1", "0"]
    assert [row[1] for row in rows] == ["1 replica, round-robin"] * 2
    assert main([*command, "--capacity", "500"]) == 0
    assert "rejected" not in capsys.readouterr().out


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of smollm2 in bf16 take a second, on as many threads as there are processors."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    kept = Machine("a CPU", 1, 20e9, 400e9, 190e9, 350 << 20)
    monkeypatch.setattr("octavo.plan.hardware.this_machine", lambda environment, notice: kept)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    cost = FittedCost((None,), (1.0,), (1, 2), (1.0, 1.0), 0.0, 0.0, 0.0, 0.0)
    fitted.save(cost, tmp_path / "home", Measured(find_model("smollm2"), "bf16", 3))


@pytest.mark.usefixtures("calibrated")
def test_a_calibration_is_for_its_compute_type_threads_and_no_smaller_format(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*options: str) -> list[tuple[str, bool]]:
        """Where the times of each row are from, and whether they are those of the calibration."""
        arguments = ["--model", "smollm2", "--capacity", "300", "--requests", "3", *options]
        assert main(["simulate", str(trace), *arguments, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        return [(row["cost"], row["itl_s"]["mean"] >= 1) for row in found.get("rows", [found])]

    here, not_here = ("calibration", True), ("roofline", False)
    assert rows("--hardware", "this", "--kv-cache-dtype", "bf16,int8,f32") == [here, not_here, not_here]
    assert rows("--hardware", "this", "--weights", "f32") == [not_here]
    assert rows("--hardware", "this", "--weights", "int4", "--kv-cache-dtype", "int4") == [not_here]
    assert rows("--hardware", "this", "--num-threads", "3") == [here]
    assert rows("--hardware", "cpu") == [not_here]
    for options in (["--num-threads", "2"], ["--num-threads", "3", "--hardware", "cpu"]):
        assert main(["simulate", str(trace), "--model", "smollm2", *options, "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["error"]["param"] == "num_threads"


@pytest.mark.usefixtures("calibrated")
def test_people_read_which_times_are_calibrated(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", "smollm2", "--capacity", "300", "--requests", "2", "--kv-cache-dtype"]
    assert main(["simulate", str(trace), *arguments, "bf16"]) == 0
    assert "step times from calibration" in capsys.readouterr().out
    assert main(["simulate", str(trace), *arguments, "bf16,int8"]) == 0
    text = capsys.readouterr().out
    assert "step times as said below" in text
    assert "cali" in text  # narrow tables wrap
    assert "roof" in text


def test_a_block_of_capacity_is_sealed_in_its_format(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    formats = "bf16,fp8,int4"
    arguments = [*SERVED, "--requests", "3", "--block-size", "128", "--kv-budget", "64MiB"]
    assert main(["simulate", str(trace), *arguments, "--kv-cache-dtype", formats, "--json"]) == 0
    blocks = {r["kv_cache_dtype"]: r["capacity_blocks"] for r in json.loads(capsys.readouterr().out)["rows"]}
    cases = make_plan("smollm2", "cpu", kv_cache_dtype=formats, block_size=128).cases
    assert blocks == {c.format: (64 << 20) // sum(c.layout.sealed_sizes_bytes) for c in cases}
    assert sorted(blocks, key=lambda format: blocks[format]) == formats.split(",")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--model", "llama-3-70b", "--hardware", "L4-24GB", "--capacity", "1k"), "L4-24GB holds 0 blocks"),
        ((*SERVED, "--capacity", "100000000k"), "that there are 100000000000 is assumed"),
        ((*SERVED, "--kv-budget", "90000GiB"), "of the 87.9 TiB are left beside the weights"),
        ((*SERVED, "--capacity", "1k"), None),
        ((*SERVED, "--kv-budget", "1GiB"), None),
        (SERVED, None),
    ],
)
def test_a_cache_that_the_machine_cannot_hold_is_noted(
    trace: Path, options: tuple[str, ...], words: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["simulate", str(trace), "--requests", "2", *options]
    assert main([*arguments, "--json"]) == 0
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert [words in note for note in notes] == [True] if words else notes == []
    assert main(arguments) == 0
    assert (words or "tokens/s") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "rows"),
    [
        ((*SERVED, "--capacity", "1k,1000, 1k", "--routing", "prefix,prefix", "--replicas", "1,1"), 1),
        ((*SERVED, "--kv-cache-dtype", "bf16,auto", "--cache-policy", "lru,cost,lru"), 2),
        (("--cache-only", "--capacity", "1k,unlimited,1000,unlimited"), 2),
    ],
)
def test_what_is_said_twice_is_simulated_once(
    trace: Path, options: tuple[str, ...], rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), "--requests", "2", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found.get("rows", [found])) == rows


@pytest.mark.parametrize("speed", ["1e-6", "1", "1e6"])
@pytest.mark.parametrize("last", [0, 1e-310, 1e17])
def test_numbers_are_finite_whatever_the_times(
    tmp_path: Path, last: float, speed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    lines = [{"timestamp": at, "input_length": 20, "output_length": 3, "block_size": 64} for at in (0, last)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert main(["simulate", str(file), *SERVED, "--speed", speed, "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["requests"] == 2


def test_it_says_what_it_has_drawn(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", str(trace), *SERVED, "--requests", "2", "--plot", "p"]) == 0
    assert "Drawn in p.png" in capsys.readouterr().out
    assert (tmp_path / "p.png").exists()


def test_a_trace_comes_faster_or_in_part(trace: Path) -> None:
    whole, fast, part = load(trace), load(trace, speed=3.0), load(trace, requests=7)
    assert [a.at for a in fast] == pytest.approx([a.at / 3 for a in whole])
    assert part == whole[:7]
    assert replace(fast[3], at=whole[3].at) == whole[3]
