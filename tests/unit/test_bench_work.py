"""Operations and bytes of a step, counted by hand; the machine's limits are read from every byte."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from octavo.bench.baseline import Baseline
from octavo.bench.cache import common_prefix, growth, measure_cache
from octavo.bench.cli import app
from octavo.bench.generate import Generation
from octavo.bench.limits import MachineLimits, measure_limits
from octavo.bench.text import prompt_ids
from octavo.bench.work import ModelWork, Work, model_work
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.errors import ConfigError
from octavo.kernels import limits, native
from octavo.model.load import load_model
from octavo.model.spec import ModelSpec
from octavo.model.tokenizer import Tokenizer
from unit.model_builders import LLAMA, save_model

LIMITS = MachineLimits(2, 1e9, 4e9, 2e9)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 48, 4, 2, 8, 264
LAYER = HIDDEN * HEAD_DIM * (HEADS + 2 * KV_HEADS) + HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INNER


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(AutoConfig.for_model("llama", **LLAMA), tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def work(tiny: Path) -> ModelWork:
    spec = ModelSpec.from_config(AutoConfig.from_pretrained(tiny))
    return model_work(tiny, spec, CacheLayout(spec.layer_groups(), 16, "f32"))


def test_matrices_of_a_model_are_counted_without_its_embedding(work: ModelWork) -> None:
    assert work.body == 2 * LAYER
    assert work.head == VOCAB * HIDDEN
    assert work.weight_bytes == 4 * (2 * LAYER + VOCAB * HIDDEN)


def test_a_tied_head_is_counted_once(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", **LLAMA, tie_word_embeddings=True)
    spec = ModelSpec.from_config(config)
    config.save_pretrained(tmp_path)
    tied = model_work(tmp_path, spec, CacheLayout(spec.layer_groups(), 16, "bf16"))
    assert (tied.body, tied.head, tied.item_bytes) == (2 * LAYER, VOCAB * HIDDEN, 2)


def test_a_decode_step_reads_all_weights_and_its_context(work: ModelWork) -> None:
    step = work.step([(9, 10)], logits=1)
    assert step.flops == 2 * (work.body + work.head) + 2 * 4 * HEADS * HEAD_DIM * 10
    assert step.bytes_read == work.weight_bytes + 2 * 2 * KV_HEADS * HEAD_DIM * 4 * 10


def test_a_prompt_in_chunks_reads_weights_per_chunk_and_the_head_once(work: ModelWork) -> None:
    whole, chunked = work.prefill(10, 10), work.prefill(10, 4)
    assert chunked.flops == whole.flops
    assert chunked.bytes_read == whole.bytes_read + 2 * 4 * work.body + work.cache_bytes(
        0, 4
    ) + work.cache_bytes(0, 8)
    assert whole.flops == 2 * (10 * work.body + work.head) + 2 * 4 * HEADS * HEAD_DIM * 55


def test_decode_is_the_sum_of_its_steps(work: ModelWork) -> None:
    steps = [work.step([(p, p + 1)], 1) for p in (5, 6, 7)]
    assert work.decode(5, 3) == sum(steps, Work(0, 0))


def test_a_window_bounds_what_attention_reads(work: ModelWork) -> None:
    layout = CacheLayout((LayerGroup((0, 1), KV_HEADS, HEAD_DIM, window=4),), 16, "f32")
    windowed = ModelWork(work.spec, layout, work.body, work.head, 4)
    assert windowed.attention_flops(0, 6) == 2 * 4 * HEADS * HEAD_DIM * (1 + 2 + 3 + 4 + 4 + 4)
    assert windowed.cache_bytes(9, 10) == 2 * 2 * KV_HEADS * HEAD_DIM * 4 * 4


@pytest.mark.parametrize("streams", limits.STREAMS)
@pytest.mark.parametrize("path", native.paths())
@pytest.mark.parametrize("nbytes", [8, 64, 4096, 100_008])
def test_a_read_pass_reads_every_byte(nbytes: int, path: str, streams: int) -> None:
    buffer = native.HugeBuffer(nbytes)
    limits.fill(buffer, 0xA5)
    word = int(np.frombuffer(b"\xa5" * 8, np.uint64)[0])
    usual = native.path()
    try:
        native.select(path)
        assert limits.read_pass(buffer, streams) == nbytes // 8 * word % 2**64
    finally:
        native.select(usual)


def test_limits_are_rates_of_the_threads_in_use() -> None:
    found = measure_limits(read_bytes=1 << 20, gemm_sizes=(32, 64), repeats=1)
    assert found.threads == native.num_threads()
    assert min(found.read_bytes_per_s, found.bf16_flops_per_s, found.f32_flops_per_s) > 0
    assert LIMITS.flops_per_s(torch.bfloat16) == 4e9
    assert LIMITS.flops_per_s(torch.float32) == 2e9


def test_prompts_have_the_wanted_length_and_differ_from_the_start(tiny: Path) -> None:
    tokenizer = load_model(str(tiny), dtype="float32").tokenizer
    one, other = (prompt_ids(tokenizer, 3000, variant, vocab_size=VOCAB) for variant in (1, 2))
    assert len(one) == len(other) == 3000
    assert one[:4] != other[:4]
    bare = prompt_ids(Tokenizer(None), 10, 1, vocab_size=20)
    assert len(bare) == 10
    assert all(0 <= token < 20 for token in bare)


def test_all_three_ways_say_the_same_and_the_work_is_what_they_did(tiny: Path) -> None:
    report = measure_cache(str(tiny), prompt_tokens=20, new_tokens=12, num_threads=1, limits=LIMITS)
    assert [run.name for run in report.runs] == ["no cache", "transformers", "octavo"]
    assert report.same_tokens == {"no cache": 12, "transformers": 12, "octavo": 12}
    bare, theirs, ours = report.runs
    assert bare.positions == list(range(20, 32))
    assert theirs.positions == ours.positions == [20] + [1] * 11
    assert bare.prefill == theirs.prefill == ours.prefill
    assert bare.decode.flops > 10 * ours.decode.flops
    assert theirs.decode == ours.decode
    phase = report.decode["octavo"]
    assert phase.tokens_per_s == pytest.approx(11 / ours.decode_s)
    assert phase.gflops_share == pytest.approx(phase.gflops / 2)
    assert phase.gbytes_share == pytest.approx(phase.gbytes_per_s)


def test_growth_counts_positions_for_one_token_and_so_far() -> None:
    run = Generation(
        "no cache", list(range(9)), [5.0] + [0.001] * 8, list(range(4, 13)), Work(0, 0), Work(0, 0)
    )
    points = growth(run, prompt_tokens=4)
    assert [p.length for p in points] == [5, 7, 9, 10, 12]
    assert [p.positions for p in points] == [5, 7, 9, 10, 12]
    assert points[-1].positions_so_far == sum(range(4, 13))
    assert {p.ms_per_token for p in points} == {1.0}


def test_tokens_are_compared_up_to_the_first_difference() -> None:
    assert common_prefix([1, 2, 3], [1, 2, 3]) == 3
    assert common_prefix([1, 2, 3], [1, 5, 3]) == 1
    assert common_prefix([], [1]) == 0


def test_lengths_that_cannot_be_measured_are_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="new_tokens=1"):
        measure_cache(str(tiny), prompt_tokens=4, new_tokens=1, limits=LIMITS)
    with pytest.raises(ConfigError, match="max_model_len=201"):
        measure_cache(str(tiny), prompt_tokens=100, new_tokens=100, limits=LIMITS)


def test_the_baseline_says_what_its_model_says_without_a_cache(tiny: Path) -> None:
    prompts = [[1, 2, 3, 4, 5], [9, 8, 7, 6, 5]]
    baseline = Baseline(tiny, torch.float32)
    columns = [baseline.start(prompts), *(baseline.step() for _ in range(3))]
    model, known = load_model(str(tiny), dtype="float32").model, torch.tensor(prompts)
    for column in columns:
        known = torch.cat([known, model(known).logits[:, -1:].argmax(-1)], dim=1)
        assert known[:, -1].tolist() == column


def test_the_command_prints_tables_and_draws(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.bench.cache.measure_limits", lambda: LIMITS)
    arguments = [
        "cache",
        str(tiny),
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "6",
        "--out",
        str(tmp_path / "new"),
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    for word in ("no cache", "transformers", "octavo", "Prefill", "Decode", "Growth", "6 of 6"):
        assert word in result.stdout
    assert (tmp_path / "new" / "cache.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_prints_one_json_object(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.bench.cache.measure_limits", lambda: LIMITS)
    arguments = [
        "cache",
        str(tiny),
        "--prompt-tokens",
        "8",
        "--new-tokens",
        "6",
        "--out",
        str(tmp_path),
        "--json",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert (report["prompt_tokens"], report["new_tokens"], report["dtype"]) == (8, 6, "float32")
    assert [run["same_tokens"] for run in report["runs"]] == [6, 6, 6]
    assert report["runs"][2]["octavo_times_faster"] == 1.0
