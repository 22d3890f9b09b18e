"""The serving suite of the benchmarks: its crowd on a tiny server, and what it reads of a load generator's report."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks import loadgen
from benchmarks.crowd import Question, crowd
from benchmarks.serving import QUICK, load_table, overload

from octavo import AsyncEngine
from support.serving import SMALL, Served, serving


@pytest.fixture
def narrow(tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    engine = AsyncEngine(str(tiny("llama")), **SMALL, max_num_seqs=1, max_waiting=1)
    with serving(engine) as served:
        yield served
    engine.close()


def questions(count: int, new: int) -> list[Question]:
    return [([i, *range(20, 40)], new) for i in range(count)]


def test_a_crowd_comes_back_until_all_is_answered(narrow: Served) -> None:
    tally = crowd(narrow.url, "tiny", questions(12, 200), clients=6)
    assert (tally.answers, tally.tokens, tally.lost) == (12, 12 * 200, [])
    assert tally.refusals > 0
    totals = narrow.ask(lambda engine: engine.totals())
    assert totals.rejected == tally.refusals
    assert sum(totals.finished.values()) == 12


def test_what_is_lost_is_told(narrow: Served) -> None:
    tally = crowd(narrow.url, "unknown", questions(2, 4), clients=1)
    assert tally.answers == 0
    assert [lost[:3] for lost in tally.lost] == ["404", "404"]


class Counting:
    """Prompts of any length, none twice."""

    def __init__(self) -> None:
        self._drawn = 0

    def next(self, length: int) -> list[int]:
        self._drawn += 1
        return [self._drawn % 200, *range(length - 1)]


def test_the_overload_line_compares_two_crowds(narrow: Served) -> None:
    line, tally = overload(narrow.url, "tiny", Counting(), QUICK)  # type: ignore[arg-type]
    assert (line.name, line.reference, line.at_least) == ("overload", "no overload", None)
    assert tally.answers == 2 * QUICK.asked  # one round does not count
    assert line.octavo > 0


REPORT: dict[str, Any] = {
    "benchmarks": [
        {
            "duration": 4.0,
            "metrics": {
                "request_totals": {"successful": 5, "errored": 1, "incomplete": 2},
                "time_to_first_token_ms": {"successful": {"median": 10.0, "percentiles": {"p95": 20.0}}},
                "inter_token_latency_ms": {"successful": {"median": 1.5, "percentiles": {"p95": 3.0}}},
                "output_token_count": {"successful": {"total_sum": 640}},
            },
        }
    ]
}


def test_a_report_of_guidellm_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        output = json.loads(command[command.index("--output") + 1])
        Path(output["path"]).write_text(json.dumps(REPORT))
        assert options["env"]["PYTHONPATH"] == str(tmp_path.resolve())
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    traffic = loadgen.Traffic((1, 8), 5, 64, 16)
    loads = loadgen.measure_load("http://here", "m", tmp_path / "model", traffic, tmp_path)
    assert loads[1] == loadgen.Load(8, 5, 3, 10.0, 20.0, 1.5, 3.0, 160.0)
    constraints = [json.loads(c[c.index("--constraint") + 1]) for c in commands]
    assert [c["count"] for c in constraints] == [5, 40]
    assert load_table(loads).row_count == 2


def test_a_load_generator_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pip install --target DIR"):
        loadgen.measure_load("http://here", "m", tmp_path, loadgen.Traffic((1,), 1, 1, 1), tmp_path)
