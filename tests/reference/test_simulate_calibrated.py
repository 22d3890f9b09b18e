"""Calibration and replay against a running engine: what is counted, never how long it took."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.cli import main
from octavo.config import Environment
from octavo.engine import Engine
from octavo.errors import ConfigError
from octavo.plan.facts import find_model
from octavo.simulate import fitted
from octavo.simulate.calibrate import calibrate
from octavo.simulate.cost import UnitCost
from octavo.simulate.fitted import Measured
from octavo.simulate.loop import simulate
from octavo.simulate.replay import replay
from octavo.simulate.replica import ReplicaSpec
from octavo.simulate.trace import Arrival

OPTIONS = {"dtype": "float32", "block_size": 8, "num_threads": 1, "max_num_seqs": 8}


def test_a_calibration_gives_every_step_a_time(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("mistral, window", enable_prefix_caching=False, **OPTIONS)
    cost = calibrate(engine, most_tokens=400)
    assert cost.windows == (24,)
    assert cost.shares == (1.0,)
    assert not engine.has_work
    engine.check()
    found = simulate([Arrival(0, 0.0, 50, 5)], ReplicaSpec(engine.layout, 1 << 20, cost))
    assert 0 < found.ended_at < 60
    assert found.output_tokens == 5


def test_a_replay_counts_as_a_simulation_does(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", **OPTIONS)
    ids = [(0, 1), (0, 2), (0, 1), (3, 4)]
    arrivals = [Arrival(i, 0.01 * i, 19, 3 + i, 8, names, n=1 + i % 2) for i, names in enumerate(ids)]
    real = replay(engine, arrivals)
    spec = ReplicaSpec(engine.layout, engine.cache.arena.bytes_total, UnitCost((None,)), max_num_seqs=8)
    simulated = simulate(
        [Arrival(a.index, 100.0 * a.index, 19, a.output, 8, a.ids, n=a.n) for a in arrivals], spec
    )
    for name in ("finished", "output_tokens", "prompt_tokens", "preemptions", "recomputed_tokens"):
        assert getattr(real, name) == getattr(simulated, name)
    assert (real.ttft.count, real.itl.count) == (simulated.ttft.count, simulated.itl.count) == (4, 22)
    assert real.ended_at > 0.03


def test_a_trace_with_more_names_than_tokens_is_refused(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", **OPTIONS)
    with pytest.raises(ConfigError, match="cannot be told apart"):
        replay(engine, [Arrival(0, 0.0, 10, 1, 8, (300,))])


def test_the_command_keeps_what_simulate_then_uses(
    tiny: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("octavo.simulate.calibrate._PROMPTS", (8, 40))
    monkeypatch.setattr("octavo.simulate.calibrate._BATCHES", (1, 2))
    directory = str(tiny("llama"))
    arguments = ["--dtype", "float32", "--kv-cache-memory", "8MiB", "--num-threads", "1"]
    assert main(["bench", "calibrate", directory, *arguments]) == 0
    assert Path(capsys.readouterr().out.strip()).is_file()
    assert fitted.load(Environment.read().home, Measured(find_model(directory), "f32", 1)) is not None

    from octavo.plan import hardware
    from octavo.plan.machine import Machine

    kept = Machine("a CPU", 1, 20e9, 400e9, 190e9, 350 << 20)
    monkeypatch.setattr(hardware, "this_machine", lambda environment, notice: kept)
    trace = tmp_path / "trace.jsonl"
    trace.write_text(json.dumps({"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1]}))
    served = ["--model", directory, "--hardware", "this", "--capacity", "100", "--kv-cache-dtype", "auto"]
    assert main(["simulate", str(trace), *served, "--weights", "f32", "--num-threads", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"] == "calibration"
    assert main(["simulate", str(trace), *served, "--weights", "bf16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"] == "roofline"
