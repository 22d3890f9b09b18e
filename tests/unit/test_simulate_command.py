"""`octavo simulate`: what it prints, whose times it uses, and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.plan.machine import Machine
from octavo.simulate import fitted
from octavo.simulate.fitted import FittedCost, Measured
from octavo.simulate.report import load
from octavo.simulate.synthetic import Synthetic


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


@pytest.fixture
def calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of smollm2 in bf16 take a second, on as many threads as there are processors."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    kept = Machine("a CPU", 1, 20e9, 400e9, 190e9, 350 << 20)
    monkeypatch.setattr("octavo.plan.hardware.this_machine", lambda environment, notice: kept)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2})
    cost = FittedCost((None,), (1.0,), (1, 2), (1.0, 1.0), 0.0, 0.0, 0.0, 0.0)
    fitted.save(cost, tmp_path / "home", Measured("smollm2-135m", "bf16", 3))


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


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ([], "model"),
        (["--model", "nope"], "model"),
        (["--model", "smollm2", "--hardware", "2xH100"], "hardware"),
        (["--model", "llama-3-70b", "--hardware", "H100"], "hardware"),
        (["--model", "smollm2", "--hardware", "cpu", "--kv-cache-dtype", "int3"], "kv_cache_dtype"),
        (["--model", "smollm2", "--hardware", "cpu", "--capacity", "some"], "capacity"),
        (["--model", "smollm2", "--hardware", "cpu", "--replicas", "0"], "replicas"),
        (["--model", "smollm2", "--hardware", "cpu", "--routing", "best"], "routing"),
        (["--model", "smollm2", "--hardware", "cpu", "--cache-policy", "fifo"], "cache_policy"),
        (["--model", "smollm2", "--hardware", "cpu", "--max-num-seqs", "0"], "max_num_seqs"),
        (["--model", "smollm2", "--hardware", "cpu", "--processes", "0"], "processes"),
        (["--model", "smollm2", "--hardware", "cpu", "--processes", "2", "--routing", "prefix"], "processes"),
        (["--model", "smollm2", "--hardware", "cpu", "--num-threads", "0"], "num_threads"),
        (["--requests", "0", "--cache-only"], "requests"),
        (["--speed", "-1", "--cache-only"], "speed"),
        (["--speed", "nan", "--cache-only"], "speed"),
        (["--cache-only", "--capacity", "1"], "capacity"),
        (["--cache-only", "--plot", "x.png"], "plot"),
    ],
)
def test_bad_input_is_named(
    trace: Path, arguments: list[str], param: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), *arguments, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["param"] == param
    assert param in error["message"]


def test_a_trace_comes_faster_or_in_part(trace: Path) -> None:
    whole, fast, part = load(trace), load(trace, speed=3.0), load(trace, requests=7)
    assert [a.at for a in fast] == pytest.approx([a.at / 3 for a in whole])
    assert part == whole[:7]
    assert replace(fast[3], at=whole[3].at) == whole[3]
