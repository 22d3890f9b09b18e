"""The start-up probe of quality: formats that a model does not bear are noticed, or refused with what would do."""

import logging
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from octavo.config import DEFAULT_QUALITY_FLOOR, EngineConfig
from octavo.engine import Engine
from octavo.errors import ConfigError
from support.engines import greedy, make_engine, together

FAST, SLOW = 0, 7  # channels that rotation turns once in a few positions, and hardly at all


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a probe finds is forgotten after each test."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def outlier(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The tiny Qwen2 with the key bias of one channel 50 times as large as that of the others."""

    def directory(channel: int) -> Path:
        place = tmp_path_factory.mktemp("outlier")
        shutil.copytree(tiny("qwen2"), place, dirs_exist_ok=True)
        model = AutoModelForCausalLM.from_pretrained(place)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.k_proj.bias[channel] = 50.0 * layer.self_attn.k_proj.bias.std()
        model.save_pretrained(place)
        return place

    return directory


def engine(model: Path, format: str, **options: object) -> Engine:
    return make_engine(model, dtype="bfloat16", kv_cache_dtype=format, num_threads=1, **options)


def kept(model: Path, format: str) -> float:
    quality = engine(model, format).quality
    assert quality is not None
    return quality.kept


def test_keys_with_an_outlier_channel_are_noticed_at_four_bits_and_not_at_eight(
    tiny: Callable[[str], Path], outlier: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "octavo")
    plain, fast = tiny("qwen2"), outlier(FAST)
    assert kept(plain, "int4") > DEFAULT_QUALITY_FLOOR
    assert kept(fast, "int8") > 0.995
    assert not caplog.records
    found = kept(fast, "int4")
    assert found < DEFAULT_QUALITY_FLOOR
    [record] = caplog.records
    assert "kv_cache_dtype='int4' is coarse for this model" in record.getMessage()
    assert f"{found:.1%} of a token's likelihood" in record.getMessage()
    # Where the rotation leaves it a constant, the zero point of the channel takes care of it.
    assert kept(outlier(SLOW), "int4") > DEFAULT_QUALITY_FLOOR


def test_with_a_floor_the_engine_refuses_and_names_a_format_that_does(outlier: Callable[[int], Path]) -> None:
    model = outlier(FAST)
    with pytest.raises(ConfigError) as caught:
        engine(model, "int4", kv_quality_floor="default")
    message = caught.value.message
    assert caught.value.param == "kv_quality_floor"
    assert message.startswith(
        f"kv_quality_floor={DEFAULT_QUALITY_FLOOR}: kv_cache_dtype='int4' is too coarse"
    )
    wider = re.search(r"; (\w+), which keeps [\d.]+%, would do", message)
    most = re.search(r"a floor of ([\d.]+)$", message)
    assert wider is not None
    assert most is not None
    assert engine(model, wider[1], kv_quality_floor="default").quality is not None
    assert engine(model, "int4", kv_quality_floor=float(most[1])).quality is not None


def test_a_floor_that_no_stored_format_keeps_names_full_precision(tiny: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match="; full precision would do"):
        engine(tiny("qwen2"), "int8", kv_quality_floor=1)
    assert engine(tiny("qwen2"), "auto", kv_quality_floor=1).quality is None


def test_formats_that_blocks_may_be_folded_to_are_judged_too(
    outlier: Callable[[int], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "octavo")
    model = outlier(FAST)
    assert engine(model, "auto", compress_under_pressure="int8").quality is None
    assert not caplog.records
    engine(model, "int8", compress_under_pressure="int4")
    [record] = caplog.records
    assert "compress_under_pressure='int4' is coarse for this model" in record.getMessage()
    with pytest.raises(ConfigError, match=r"compress_under_pressure='int4' is too coarse"):
        engine(model, "int8", compress_under_pressure="int4", kv_quality_floor="default")


@pytest.mark.parametrize("floor", [0, 1.01, -1, "nan", "much", True, float("inf"), [0.9], 10**400])
def test_impossible_floors_are_refused(floor: object) -> None:
    with pytest.raises(ConfigError, match="kv_quality_floor=") as caught:
        EngineConfig.create("any", kv_quality_floor=floor)
    assert caught.value.param == "kv_quality_floor"


def test_floors_may_be_text() -> None:
    assert EngineConfig.create("any", kv_quality_floor="0.5").kv_quality_floor == 0.5
    assert EngineConfig.create("any", kv_quality_floor="default").kv_quality_floor == DEFAULT_QUALITY_FLOOR
    assert EngineConfig.create("any").kv_quality_floor is None


def test_what_was_found_is_kept_per_format_and_block_size(
    tiny: Callable[[str], Path], home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine(tiny("qwen2"), "int8").quality
    assert len(list((home / "quality").iterdir())) == 1
    assert engine(tiny("qwen2"), "int8", block_size=16).quality != first
    assert len(list((home / "quality").iterdir())) == 2
    monkeypatch.setattr("octavo.evaluate.probe.Reading", lambda *_: pytest.fail("measured again"))
    assert engine(tiny("qwen2"), "int8").quality == first
    for file in (home / "quality").iterdir():
        file.write_text('{"positions": 3}')  # of another version
    with pytest.raises(pytest.fail.Exception, match="measured again"):
        engine(tiny("qwen2"), "int8")


def test_a_context_in_which_no_stored_block_is_read_costs_nothing(tiny: Callable[[str], Path]) -> None:
    assert engine(tiny("qwen2"), "int2", max_model_len=64).quality is None
    short = engine(tiny("qwen2"), "int2", max_model_len=66).quality
    assert short is not None
    assert short.positions == 1


def test_the_probe_leaves_the_engine_its_own_cache(tiny: Callable[[str], Path]) -> None:
    prompts = [([7, 3, 200] * 40, greedy(40))]
    probed = together(engine(tiny("qwen2"), "int4"), prompts)
    assert together(engine(tiny("qwen2"), "int4"), prompts) == probed  # this one found what was kept


def test_a_model_without_a_tokenizer_is_probed_on_drawn_tokens(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    place = tmp_path / "model"
    shutil.copytree(tiny("qwen2"), place, ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    loaded = engine(place, "int2")
    assert loaded.tokenizer.hf is None
    assert loaded.quality is not None
    assert 0 < loaded.quality.kept < 1
