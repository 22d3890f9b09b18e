"""Hardware by name, and the one that is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.config import Environment
from octavo.errors import ConfigError
from octavo.plan import machine
from octavo.plan.hardware import find_hardware, names
from octavo.plan.machine import Machine, this_machine
from octavo.ram import available_bytes, resident_bytes, total_bytes
from support.sizes import FULL

KEPT = Machine("a CPU", 2, 20e9, 400e9, 190e9, 350 << 20)


def silent(text: str) -> None:
    raise AssertionError(text)


def test_devices_are_counted_and_their_memory_is_decimal() -> None:
    eight = find_hardware("8xH100-80GB", silent)
    assert (eight.name, eight.count, eight.total_bytes) == ("8xH100-80GB", 8, 640_000_000_000)
    assert find_hardware("h100", silent) == find_hardware("1 x H100-80GB", silent)
    assert find_hardware("h100", silent).name == "H100-80GB"


def test_every_device_has_a_source_and_rates() -> None:
    for name in names()[1:]:
        device = find_hardware(name, silent)
        assert device.source
        assert device.memory_bytes > 10**10
        assert device.flops("bf16") > device.flops("f32") > device.read_bytes_per_s
        assert device.flops("fp8") >= device.flops("bf16")
        assert device.flops("int4") == device.flops("bf16")


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "0xH100-80GB",
        "-1xH100",
        "2000xH100",
        "H100-81GB",
        "A100",
        "8x",
        "8xthis",
        "2xcpu",
        "999999999999xh100",
    ],
)
def test_impossible_hardware_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="hardware=") as error:
        find_hardware(text, silent)
    assert error.value.param == "hardware"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    return Environment.read()


def test_this_is_measured_once_and_kept(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(machine, "_measure", lambda: KEPT)
    assert this_machine(environment, told.append) == KEPT
    assert len(told) == 1
    monkeypatch.setattr(machine, "_measure", lambda: silent("measured again"))
    assert this_machine(environment, silent) == KEPT
    found = find_hardware("this", silent)
    assert (found.read_bytes_per_s, found.flops("f32"), found.process_bytes) == (20e9, 190e9, 350 << 20)
    assert found.memory_bytes == total_bytes() >= found.free_bytes
    assert abs(found.free_bytes - available_bytes()) < total_bytes() / 2


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"cpu": 1}'])
def test_a_broken_record_is_measured_again(
    environment: Environment, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(machine, "_measure", lambda: KEPT)
    this_machine(environment, lambda _: None)
    (file,) = (environment.home / "machine").iterdir()
    file.write_text(text)
    assert this_machine(environment, lambda _: None) == KEPT
    assert json.loads(file.read_text())["threads"] == 2


def test_a_measurement_that_cannot_be_kept_is_used(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    (environment.home / "machine").write_text("a file where a directory should be")
    monkeypatch.setattr(machine, "_measure", lambda: KEPT)
    told: list[str] = []
    assert this_machine(environment, told.append) == KEPT
    assert "could not be kept" in told[-1]


@pytest.mark.skipif(not FULL, reason="measures for some ten seconds")
def test_a_real_measurement(environment: Environment) -> None:
    found = this_machine(environment, lambda _: None)
    assert found.read_bytes_per_s > 1e9
    assert found.bf16_flops_per_s > 1e9
    assert 100 << 20 < found.process_bytes < 1 << 30
    assert found == this_machine(environment, silent)


def test_what_this_process_holds_is_known() -> None:
    assert 1 << 20 < resident_bytes() < total_bytes()
