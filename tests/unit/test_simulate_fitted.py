"""Fitting a step cost: a law that made the samples is found again, disturbed steps are left out."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.plan.facts import find_model, table
from octavo.simulate import fitted
from octavo.simulate.cost import StepWork, factor
from octavo.simulate.fitted import FittedCost, Measured, Sample, fit

WINDOWS, SHARES = (None, 32), (0.25, 0.75)
MEASURED = Measured(find_model("smollm2"), "bf16", 2)


def works(count: int, seed: int = 0) -> list[StepWork]:
    draw = random.Random(seed)
    made = []
    for _ in range(count):
        rows = draw.choice([1, 1, 2, 3, 5, 8, 16, 31, 64, 100, 300, 512])
        sequences = draw.randint(1, rows)
        seen = (draw.randint(rows, 4000 * sequences), draw.randint(1, 32 * sequences))
        pairs = (draw.randint(0, 500 * rows), draw.randint(0, 32 * rows))
        made.append(StepWork(sequences, rows, draw.randint(0, sequences), seen, seen, pairs))
    return made


def law(work: StepWork) -> float:
    seen = 0.25 * work.seen[0] + 0.75 * work.seen[1]
    pairs = 0.25 * work.prompt_pairs[0] + 0.75 * work.prompt_pairs[1]
    base = 4e-3 + 5e-5 * max(work.rows, 16)  # flat while the weights are read, then by the row
    return base + 2e-8 * seen + 1e-9 * pairs + 3e-4 * work.logits + 1e-5 * work.sequences


def test_the_law_is_found_again() -> None:
    cost = fit([Sample(work, law(work)) for work in works(400)], WINDOWS, SHARES)
    for work in works(100, seed=1):
        assert cost.seconds(work) == pytest.approx(law(work), rel=1e-6)
    assert cost.per_logit == pytest.approx(3e-4, rel=1e-3)


def test_disturbed_steps_are_left_out() -> None:
    draw = random.Random(5)
    samples = [
        Sample(work, law(work) * (draw.uniform(0.97, 1.03) if i % 20 else 8.0))
        for i, work in enumerate(works(800))
    ]
    cost = fit(samples, WINDOWS, SHARES)
    errors = [cost.seconds(work) / law(work) - 1 for work in works(200, seed=2)]
    assert max(map(abs, errors)) < 0.12
    assert abs(sum(errors) / len(errors)) < 0.02


def test_a_step_that_takes_now_more_now_less_takes_its_mean() -> None:
    samples = [Sample(work, law(work) * (1 + sign * 0.25)) for work in works(400) for sign in (-1, 1)]
    cost = fit(samples, WINDOWS, SHARES)
    for work in works(100, seed=1):
        assert cost.seconds(work) == pytest.approx(law(work), rel=0.01)


def test_how_far_steps_spread_is_found_again() -> None:
    """Nine of ten steps take 0.9, the tenth 1.3 of 0.94 times the law, whatever their work; one is disturbed."""
    samples = [Sample(work, law(work) * (1.3 if i == 9 else 0.9)) for work in works(400) for i in range(10)]
    cost = fit([*samples, Sample(samples[0].work, 9.0)], WINDOWS, SHARES)
    assert sum(cost.spread) / len(cost.spread) == pytest.approx(1.0)
    assert min(cost.spread) == pytest.approx(0.9 / 0.94, rel=0.01)
    assert max(cost.spread) == pytest.approx(1.3 / 0.94, rel=0.01)
    slow = sum(value > 1.1 for value in cost.spread) / len(cost.spread)
    assert slow == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("count", [1, 3, 64])
def test_every_factor_comes_equally_often(count: int) -> None:
    spread = tuple(float(i) for i in range(count))
    for first in (0, 12_345):
        came = Counter(factor(spread, step) for step in range(first, first + 100 * count))
        assert set(came) == set(spread)
        assert max(came.values()) - min(came.values()) <= 4


def test_no_part_is_negative_and_wider_steps_are_extrapolated() -> None:
    samples = [Sample(work, 1e-2 / (1 + work.logits)) for work in works(200)]
    cost = fit(samples, WINDOWS, SHARES)
    assert min(*cost.base, cost.per_seen, cost.per_prompt_pair, cost.per_logit, cost.per_sequence) >= 0
    straight = FittedCost(WINDOWS, SHARES, (1, 2, 4), (1.0, 1.0, 2.0), 0.0, 0.0, 0.0, 0.0)
    zero = (0, 0)
    assert [straight.seconds(StepWork(1, rows, 0, zero, zero, zero)) for rows in (1, 2, 3, 4, 8)] == [
        1,
        1,
        1.5,
        2,
        4,
    ]


def test_one_kind_of_step_is_enough_and_none_is_not() -> None:
    work = StepWork(1, 1, 1, (5, 5), (5, 5), (0, 0))
    assert fit([Sample(work, 0.5)], WINDOWS, SHARES).seconds(work) == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="no step"):
        fit([], WINDOWS, SHARES)


def test_a_calibration_is_kept_by_model_type_and_threads(tmp_path: Path) -> None:
    cost = fit([Sample(work, law(work)) for work in works(50)], WINDOWS, SHARES)
    file = fitted.save(cost, tmp_path, MEASURED)
    assert fitted.load(tmp_path, MEASURED) == cost
    for other in ({"model": find_model("llama-3-8b")}, {"compute": "f32"}, {"threads": 1}):
        assert fitted.load(tmp_path, replace(MEASURED, **other)) is None
    kept = json.loads(file.read_text())
    for damage in (
        *({"base": []}, {"base": [0.0] * len(cost.base)}, {"spread": []}, {"spread": [0.0]}),
        *({"per_seen": "x"}, {"knots": [1]}, {"windows": None}, {"shares": 5}),
    ):
        file.write_text(json.dumps(kept | damage))
        assert fitted.load(tmp_path, MEASURED) is None
    file.write_text("{}")
    assert fitted.load(tmp_path, MEASURED) is None


def test_a_calibration_is_found_by_what_the_model_is_not_by_how_it_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = table()["smollm2-135m"]["config"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    cost = fit([Sample(work, law(work)) for work in works(50)], WINDOWS, SHARES)
    fitted.save(cost, tmp_path, Measured(find_model("mine"), "bf16", 2))
    for name in ("./mine", str(tmp_path / "mine"), "mine/config.json"):
        assert fitted.load(tmp_path, Measured(find_model(name), "bf16", 2)) == cost
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    assert fitted.load(tmp_path, Measured(find_model("mine"), "bf16", 2)) is None


def test_a_calibration_that_cannot_be_kept_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "calibration").write_text("a file where a directory should be")
    cost = fit([Sample(work, law(work)) for work in works(50)], WINDOWS, SHARES)
    with pytest.raises(ConfigError, match="cannot be written"):
        fitted.save(cost, tmp_path, MEASURED)
