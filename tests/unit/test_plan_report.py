"""`octavo plan`: rows, what binds, what would help, and how it refuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from octavo.cache.formats import FORMATS
from octavo.cli import main
from octavo.errors import ConfigError
from octavo.plan import hardware
from octavo.plan.facts import table
from octavo.plan.machine import Machine
from octavo.plan.planner import Budget, Case
from octavo.plan.report import make_plan
from octavo.plan.roofline import Bounds
from octavo.plan.show import decimal_bytes, seconds

EIGHT = "8xH100-80GB"
REQUIRED = {
    "kv_cache_dtype",
    "context",
    "weights_bytes",
    "bytes_per_token",
    "bytes_per_request",
    "max_requests",
    "max_context",
    "binding",
}


def first(model: str = "llama-3-70b", device: str = EIGHT, **options: Any) -> Case:
    return make_plan(model, device, **options).first


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", *arguments, "--json"]) == 0
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    found: dict[str, Any] = json.loads(output)
    return found


def test_json_holds_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(
        capsys,
        *("llama-3-70b", "--hardware", EIGHT, "--context", "8k,32k"),
        *("--kv-cache-dtype", "bf16,fp8", "--kv-budget", "0.5"),
    )
    assert (found["model"], found["hardware"]) == ("llama-3-70b", EIGHT)
    rows = found["rows"]
    assert all(set(row) >= REQUIRED for row in rows)
    assert [(row["kv_cache_dtype"], row["context"]) for row in rows] == [
        (format, context) for format in ("bf16", "fp8") for context in (8000, 32000)
    ]
    assert {row["weights_bytes"] for row in rows} == {2 * 70_553_706_496}
    assert [row["max_requests"] for row in rows] == [122, 30, 240, 60]


def test_what_does_not_fit_prints_its_rows(capsys: pytest.CaptureFixture[str]) -> None:
    rows = printed(capsys, "llama-3-70b", "--hardware", "H100-80GB", "--kv-cache-dtype", "bf16,int4")["rows"]
    assert [(row["max_requests"], row["binding"]) for row in rows] == [(0, "weights")] * 2
    assert all(row["cache_bytes"] == row["max_context"] == 0 for row in rows)
    timed = ("prefill_s", "decode_batch", "decode_step_s", "compute_bound_batch", "prefill_share")
    assert all(row[name] is None for row in rows for name in timed)
    assert main(["plan", "llama-3-70b", "--hardware", "H100-80GB", "--context", "8k"]) == 0
    text = capsys.readouterr().out
    assert "weights" in text
    assert "tokens/s" not in text
    assert "tokens per second" not in text


@pytest.mark.parametrize(
    ("options", "binding"),
    [
        ({}, "cache"),
        ({"concurrency": 10_000}, "cache"),
        ({"concurrency": 2}, "bandwidth"),
        ({"concurrency": 1000, "context": "512"}, "compute"),
        ({"kv_budget": "1000"}, "cache"),
        ({"device": "H100-80GB"}, "weights"),
        ({"device": "2xH100-80GB", "context": "64k"}, "weights"),
        ({"model": "llama-3.1-405b", "device": "L4-24GB", "context": "1M"}, "weights"),
        ({"context": "3M"}, "cache"),
    ],
)
def test_what_binds(options: dict[str, Any], binding: str) -> None:
    case = first(**options)
    assert case.binding == binding
    assert (case.max_requests == 0) == (
        binding == "weights" or options in ({"kv_budget": "1000"}, {"context": "3M"})
    )


def test_the_budget_is_bounded_by_what_weights_leave() -> None:
    left = 640_000_000_000 - 2 * 70_553_706_496
    assert first(kv_budget="1").cache_bytes == first(kv_budget="0.99").cache_bytes == left
    assert (
        first(kv_budget="0.25").cache_bytes == first(kv_budget="160000000000").cache_bytes == 160_000_000_000
    )
    assert first(kv_budget="1GiB").cache_bytes == 1 << 30
    assert first().cache_bytes == int(0.9 * 640e9) - 2 * 70_553_706_496


def test_a_cpu_gives_half_of_what_weights_leave() -> None:
    case = first("smollm2", "cpu")
    assert case.cache_bytes == (256_000_000_000 - 2 * 134_515_008) // 2


def test_this_machine_keeps_room_for_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Machine("a CPU", 2, 20e9, 400e9, 190e9, 350 << 20)
    monkeypatch.setattr(hardware, "this_machine", lambda environment, notice: kept)
    monkeypatch.setattr(hardware, "available_bytes", lambda: 4 << 30)
    monkeypatch.setattr(hardware, "total_bytes", lambda: 16 << 30)
    left = (4 << 30) - (350 << 20) - 2 * 134_515_008
    assert first("smollm2", "this").cache_bytes == left // 2
    assert first("smollm2", "this", kv_budget="0.5").cache_bytes == left
    assert first("smollm2", "this", kv_budget="1GiB").cache_bytes == 1 << 30


@pytest.mark.parametrize("format", list(FORMATS))
@pytest.mark.parametrize("model", ["gemma-3-1b", "deepseek-v2-lite", "smollm2", "mistral-7b-v0.1"])
def test_the_longest_context_is_the_last_that_fits(model: str, format: str) -> None:
    case = first(model, "H100-80GB", kv_cache_dtype=format, kv_budget="1GiB", concurrency=3)
    if case.max_context is None:
        assert replace(case, context=10**12).max_requests >= 3
        return
    assert replace(case, context=case.max_context).max_requests >= 3
    assert replace(case, context=case.max_context + 1).max_requests < 3


def test_a_model_of_windows_alone_has_any_context(capsys: pytest.CaptureFixture[str]) -> None:
    row = printed(capsys, "mistral-7b-v0.1", "--hardware", "H100")["rows"][0]
    assert row["max_context"] == 32_768


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        (["no-such-model"], "model"),
        (["llama-3-8b", "--hardware", "9xZX81"], "hardware"),
        (["llama-3-8b", "--hardware", "0xH100"], "hardware"),
        (["llama-3-8b", "--hardware", "cpu", "--context", "-5"], "context"),
        (["llama-3-8b", "--hardware", "cpu", "--context", "8k,,9k"], "context"),
        (["llama-3-8b", "--hardware", "cpu", "--kv-cache-dtype", "fp7"], "kv_cache_dtype"),
        (["llama-3-8b", "--hardware", "cpu", "--weights", "int3"], "weights"),
        (["llama-3-8b", "--hardware", "cpu", "--kv-budget", "-1"], "kv_budget"),
        (["llama-3-8b", "--hardware", "cpu", "--kv-budget", "1.5"], "kv_budget"),
        (["llama-3-8b", "--hardware", "cpu", "--kv-budget", "nan"], "kv_budget"),
        (["llama-3-8b", "--hardware", "cpu", "--kv-budget", "some"], "kv_budget"),
        (["llama-3-8b", "--hardware", "cpu", "--concurrency", "0"], "concurrency"),
        (["llama-3-8b", "--hardware", "cpu", "--block-size", "17"], "block_size"),
        (["llama-3-8b", "--hardware", "cpu", "--context", "64", "--output", "64"], "output"),
        (["llama-3-8b", "--hardware", "cpu", "--plot", "/no/such/place/plan.png"], "plot"),
        (["llama-3-8b", "--hardware", "cpu", "--plot", "plan.nothing"], "plot"),
        (["llama-3-8b", "--hardware", "cpu", "--plot", ""], "plot"),
        (["llama-3-8b", "--hardware", "cpu", "--plot", "/"], "plot"),
        (["llama-3-8b", "--hardware", "cpu", "--plot", "/tmp/"], "plot"),
        (["llama-3-8b", "--hardware", "cpu", "--plot", "x" * 5000], "plot"),
    ],
)
def test_bad_input_is_named(arguments: list[str], param: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]


def test_a_configuration_with_a_field_missing_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64}')
    assert main(["plan", str(tmp_path), "--hardware", "cpu", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["error"]["param"] == "intermediate_size"


def test_people_read_tables(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert (
        main(["plan", "deepseek-v3", "--hardware", "8xH200-141GB", "--context", "32k", "--concurrency", "4"])
        == 0
    )
    text = capsys.readouterr().out
    for words in (
        "671 billion parameters, 37.6 billion",
        "70.3 kB",
        "4 requests of 32,000 tokens in bf16",
        "compute",
    ):
        assert words in text
    assert "other heads" not in text


@pytest.mark.parametrize("width", ["80", "71"])
def test_a_narrow_terminal_shows_all_of_it(
    width: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["plan", "llama-3-70b", "--hardware", EIGHT, "--kv-cache-dtype", "bf16,fp8"]
    assert main(command) == 0
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", width)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(command) == 0
    narrow = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert max(map(len, narrow.splitlines())) <= int(width)

    def numbers(text: str) -> list[str]:
        return sorted(re.findall(r"\d[\d.,]*", text))

    assert numbers(narrow) == numbers(wide)


def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.png"
    assert (
        main(["plan", "smollm2", "--hardware", "cpu", "--kv-cache-dtype", "bf16,fp8", "--plot", str(file)])
        == 0
    )
    assert f"Drawn in {file}" in capsys.readouterr().out
    with Image.open(file) as image:
        assert min(image.size) > 400
        assert len(image.convert("RGB").getcolors(1 << 20) or []) > 100


def test_the_file_that_was_drawn_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "smollm2", "--hardware", "cpu", "--plot", str(tmp_path / "p")]) == 0
    assert f"Drawn in {tmp_path / 'p.png'}\n" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["p.png"]


def test_a_model_that_names_no_positions_is_not_said_to_be_made_for_some(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {k: v for k, v in table()["llama-3-8b"]["config"].items() if k != "max_position_embeddings"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main(["plan", str(tmp_path), "--hardware", "H100"]) == 0
    assert "8.03 billion parameters\n" in capsys.readouterr().out


def test_a_picture_of_what_does_not_fit_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    assert main(["plan", "llama-3-70b", "--hardware", "H100-80GB", "--plot", str(file), "--json"]) == 0
    assert file.stat().st_size


def test_times_and_sizes_for_people() -> None:
    assert seconds(Bounds(0.7, 1.8, "compute")) == "0.7–1.8 s, compute"
    assert seconds(Bounds(0.0169, 0.123, "bandwidth")) == "17–123 ms, bandwidth"
    assert seconds(Bounds(2e-6, 9e-5, "bandwidth")) == "2–90 µs, bandwidth"
    assert [decimal_bytes(n) for n in (7, 70_272, 1.05e10, 3e12)] == ["7 B", "70.3 kB", "10.5 GB", "3 TB"]


def test_a_plan_for_named_hardware_loads_no_torch() -> None:
    import subprocess

    code = (
        "import sys\nfrom octavo.cli import main\n"
        f"main(['plan', 'llama-3-8b', '--hardware', {EIGHT!r}, '--json'])\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_an_output_without_a_prompt_names_what_works() -> None:
    with pytest.raises(ConfigError, match=r"output=100 .* context of 100; at most 99, or context=101 works"):
        make_plan("llama-3-8b", "cpu", context="100", output="100")
    with pytest.raises(ConfigError, match=r"output=1 .* context of 1; context=2 works"):
        make_plan("llama-3-8b", "cpu", context="1", output="1")


def test_a_refused_budget_names_what_works() -> None:
    for wrong in ("0", "-1", "1.5"):
        with pytest.raises(
            ConfigError, match=rf"kv_budget='{wrong}' must be a share .* above 0 .* or a size such as"
        ):
            make_plan("llama-3-8b", "cpu", kv_budget=wrong)


def test_budgets_of_a_case_can_be_given_directly() -> None:
    case = replace(first(), budget=Budget(nbytes=10))
    assert (case.cache_bytes, case.max_requests) == (10, 0)
