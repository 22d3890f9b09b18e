"""The start-up probe notices rows that depend on their company, and finds the tile that helps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.engine import Engine
from octavo.errors import InvalidRequest
from octavo.kernels.native import PackedLinear
from support.engines import alone, greedy, together, varied

PROMPTS = [list(range(3, 3 + n)) for n in (1, 7, 20, 33)]
REQUESTS = [(prompt, varied(i, 8)) for i, prompt in enumerate(PROMPTS)]


@pytest.fixture(autouse=True)
def fresh_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine_of: object) -> None:
    """No verdict of another test; `engine_of` sets the session's home, so this comes after it."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))


def replace_linear(monkeypatch: pytest.MonkeyPatch, disturbance: Callable[[torch.Tensor], Any]) -> None:
    honest = torch.nn.Linear.forward

    def forward(self: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return honest(self, x) + disturbance(x)

    monkeypatch.setattr(torch.nn.Linear, "forward", forward)


def number_of_rows(x: torch.Tensor) -> float:
    return 0.05 * x.shape[-2]


def many_rows(x: torch.Tensor) -> float:
    return 0.5 if x.shape[-2] > 200 else 0.0


def place_of_the_row(x: torch.Tensor) -> torch.Tensor:
    return 0.05 * torch.arange(x.shape[-2], dtype=x.dtype)[:, None]


def test_an_honest_unfused_model_is_tiled_all_the_same(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of("llama", dtype="bfloat16", fuse=False, num_threads=1, max_num_batched_tokens=18)
    assert (engine.runner.tile, engine.runner.exact) == (16, True)


@pytest.mark.parametrize(
    ("disturbance", "step", "tile"),
    [(number_of_rows, 18, 16), (many_rows, 256, 16), (place_of_the_row, 18, 1)],
)
def test_rows_that_depend_on_company_are_tiled(
    disturbance: Callable[[torch.Tensor], Any],
    step: int,
    tile: int,
    engine_of: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replace_linear(monkeypatch, disturbance)
    engine = engine_of("llama", dtype="bfloat16", fuse=False, num_threads=1, max_num_batched_tokens=step)
    assert (engine.runner.tile, engine.runner.exact) == (tile, True)
    assert together(engine, REQUESTS) == alone(engine, REQUESTS)


def test_without_a_tile_the_disturbed_linear_does_change_answers(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests above show something only if this holds."""
    replace_linear(monkeypatch, number_of_rows)
    monkeypatch.setattr("octavo.model.runner.probe", lambda *_: True)
    monkeypatch.setattr("octavo.model.runner.TILES", (None,))
    engine = engine_of("llama", dtype="bfloat16", fuse=False, num_threads=1, max_num_batched_tokens=18)
    assert engine.runner.tile is None
    assert together(engine, REQUESTS) != alone(engine, REQUESTS)


def test_a_model_that_nothing_helps_says_so(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter(range(10**9))
    replace_linear(monkeypatch, lambda x: 0.05 * (next(calls) % 97))
    engine = engine_of("llama", dtype="bfloat16", fuse=False, num_threads=1, max_num_batched_tokens=18)
    assert not engine.runner.exact
    live = engine.prepare("a", PROMPTS[0], greedy(2))
    engine.submit(live)
    while engine.has_work:
        engine.step()
    receipt = live.output().receipt
    assert receipt is not None
    assert receipt.to_dict()["exact"] is False
    with pytest.raises(InvalidRequest, match="exact=True cannot be promised") as caught:
        engine.prepare("b", PROMPTS[0], greedy(2, exact=True))
    assert caught.value.param == "exact"


def test_fused_layers_are_probed_too(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = PackedLinear.__call__

    def call(self: PackedLinear, x: torch.Tensor, out: torch.Tensor, epilogue: int) -> None:
        honest(self, x, out, epilogue)  # type: ignore[arg-type]
        out += number_of_rows(x)

    assert engine_of("llama", dtype="bfloat16").runner.exact
    monkeypatch.setattr(PackedLinear, "__call__", call)
    # The verdict is kept by weights and machine; another block size is another way of running them.
    assert not engine_of("llama", dtype="bfloat16", block_size=8).runner.exact


def test_a_narrow_engine_and_a_wide_one_compute_the_same_tiles(
    engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_linear(monkeypatch, number_of_rows)
    narrow = engine_of("llama", dtype="bfloat16", fuse=False, num_threads=1, max_num_batched_tokens=1)
    assert (narrow.runner.tile, narrow.runner.exact) == (16, True)
    wide = engine_of("llama", dtype="bfloat16", fuse=False, num_threads=1, max_num_batched_tokens=18)
    assert (wide.runner.tile, wide.runner.exact) == (16, True)
    assert alone(narrow, REQUESTS) == together(wide, REQUESTS)


def test_a_verdict_is_kept(engine_of: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    first = engine_of("llama", dtype="bfloat16", fuse=False, num_threads=1, max_num_batched_tokens=18)
    monkeypatch.setattr("octavo.model.runner.probe", lambda *_: pytest.fail("probed again"))
    second = engine_of("llama", dtype="bfloat16", fuse=False, num_threads=1, max_num_batched_tokens=18)
    assert (second.runner.tile, second.runner.exact) == (first.runner.tile, first.runner.exact)
