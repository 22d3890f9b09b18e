"""`this`: what the machine at hand can do, measured once and kept."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.config import Environment
from octavo.errors import ConfigError
from octavo.kept import Kept


@dataclass(frozen=True)
class Machine:
    """Best rates seen on all threads, and what a process of Octavo takes before it has a model."""

    cpu: str
    threads: int
    read_bytes_per_s: float
    bf16_flops_per_s: float
    f32_flops_per_s: float
    process_bytes: int


def this_machine(environment: Environment, notice: Callable[[str], None]) -> Machine:
    """The kept measurement of this machine, or one made now, which takes some ten seconds.

    `notice` is told before that. Raises `ConfigError` if it cannot be made.
    """
    kept = Kept(environment.home, "machine", machine_facts())
    try:
        return Machine(**kept.load())
    except TypeError:
        notice("Measuring this machine once: reads, products, and the size of a process ...")
    machine = _measure()
    if not kept.save(asdict(machine)):
        notice(f"The measurement could not be kept as {kept.file}; it will be made again next time.")
    return machine


def _measure() -> Machine:
    # Here and not above: a plan for other hardware, or from a kept measurement, needs no torch.
    from octavo.bench.limits import measure_limits

    limits = measure_limits()
    command = [sys.executable, "-m", "octavo.plan.process"]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode or not child.stdout.strip().isdigit():
        lines = child.stderr.strip().splitlines() or ["it said nothing"]
        raise ConfigError(
            f"hardware='this': the size of a process cannot be measured: {lines[-1]}", param="hardware"
        )
    return Machine(
        cpu=_cpu_model(),
        threads=limits.threads,
        read_bytes_per_s=limits.read_bytes_per_s,
        bf16_flops_per_s=limits.bf16_flops_per_s,
        f32_flops_per_s=limits.f32_flops_per_s,
        process_bytes=int(child.stdout),
    )


def machine_facts() -> list[object]:
    """What a measurement depends on: CPU, threads, kernel path and Python."""
    threads = len(os.sched_getaffinity(0))
    return [platform.machine(), _cpu_model(), threads, Environment.read().isa, sys.version_info[:2]]


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("model name")), "")
