"""The folding benchmark at its smallest."""

from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.folding import LADDERS, QUICK, agreement, measure, plot


def test_agreement_is_the_share_before_the_first_difference() -> None:
    assert agreement(([1, 2, 3, 4], [1, 2, 9, 4])) == 0.5
    assert agreement(([1, 2], [1, 2])) == 1.0


def test_folding_saves_what_is_lost_without_it(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    runs = measure(str(tiny("multi-query")), "bfloat16", QUICK)
    assert [run.ladder for run in runs] == list(LADDERS)
    off, *folding = runs
    assert (off.compressed, off.folded, off.same) == (0, {}, 1.0)
    assert off.lost > 0
    for run in folding:
        assert run.again < off.again
        assert run.compressed > 0
        assert 0 < run.same <= 1
    plot(runs, QUICK, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 0
