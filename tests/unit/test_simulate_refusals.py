"""`octavo simulate`: what it refuses, by which name, and what it says would work."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from octavo.cli import app, main
from octavo.cli.simulate import CACHE_ONLY

SERVED = ("--model", "smollm2", "--hardware", "cpu")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "trace.jsonl"
    request = {"timestamp": 0, "input_length": 1030, "output_length": 7, "hash_ids": [1, 2, 3]}
    file.write_text(json.dumps(request))
    return file


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ([], "model"),
        (["--model", "nope"], "model"),
        (["--model", "smollm2", "--hardware", "2xH100"], "hardware"),
        (["--model", "llama-3-70b", "--hardware", "H100"], "hardware"),
        ([*SERVED, "--kv-cache-dtype", "int3"], "kv_cache_dtype"),
        ([*SERVED, "--capacity", "some"], "capacity"),
        ([*SERVED, "--capacity", "9" * 5000], "capacity"),
        ([*SERVED, "--capacity", "1k,0"], "capacity"),
        ([*SERVED, "--capacity", "unlimited"], "capacity"),
        ([*SERVED, "--capacity", "1k", "--kv-budget", "1GiB"], "capacity"),
        ([*SERVED, "--capacity", "3", "--kv-cache-dtype", "int4"], "capacity"),
        ([*SERVED, "--kv-budget", "100"], "kv_budget"),
        ([*SERVED, "--kv-budget", "1e-9"], "kv_budget"),
        ([*SERVED, "--replicas", "0"], "replicas"),
        ([*SERVED, "--replicas", "9" * 5000], "replicas"),
        ([*SERVED, "--replicas", "100001"], "replicas"),
        ([*SERVED, "--processes", "100000"], "processes"),
        ([*SERVED, "--plot", ""], "plot"),
        ([*SERVED, "--plot", "picture.nothing"], "plot"),
        ([*SERVED, "--routing", "best"], "routing"),
        ([*SERVED, "--cache-policy", "fifo"], "cache_policy"),
        ([*SERVED, "--max-num-seqs", "0"], "max_num_seqs"),
        ([*SERVED, "--processes", "0"], "processes"),
        ([*SERVED, "--processes", "2", "--routing", "prefix"], "processes"),
        ([*SERVED, "--num-threads", "0"], "num_threads"),
        (["--requests", "0", "--cache-only"], "requests"),
        ([*SERVED, "--speed", "-1"], "speed"),
        ([*SERVED, "--speed", "nan"], "speed"),
        ([*SERVED, "--speed", "1e-320"], "speed"),
        (["--cache-only", "--capacity", "1"], "capacity"),
    ],
)
def test_bad_input_is_named(
    trace: Path, arguments: list[str], param: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), *arguments, "--json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--capacity", "0"), "from 1 to 1000000000000"),
        (("--replicas", "0"), "from 1 to 100000"),
        (("--speed", "0"), "from 0.000001 to 1000000"),
        (("--capacity", "3", "--kv-cache-dtype", "int4"), "give 4 or more"),
        (("--capacity", "unlimited"), "--cache-only"),
        (("--model", "llama-3-70b", "--hardware", "H100"), "weights=int4 works"),
        (("--model", "llama-3-70b", "--hardware", "L4-24GB"), "larger hardware works"),
    ],
)
def test_the_limit_and_what_would_work_are_named(
    trace: Path, option: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), *SERVED, *option]) == 1
    assert words in capsys.readouterr().err


def _options() -> dict[str, list[str]]:
    """Every option of the command, with a value that its type allows."""
    params = typer.main.get_command(app).get_command(None, "simulate").params  # type: ignore[attr-defined]
    return {
        p.name: [p.opts[0]] if p.is_flag else [p.opts[0], "1"]
        for p in params
        if p.param_type_name == "option" and p.name != "help"
    }


@pytest.mark.parametrize("name", sorted(_options().keys() - set(CACHE_ONLY)))
def test_an_option_that_does_nothing_for_hits_alone_is_refused(
    trace: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", str(trace), "--cache-only", "--json", *_options()[name]]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["param"] == name
    assert "--cache-only does not read it" in error["message"]
