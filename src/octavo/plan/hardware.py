"""HARDWARE, as the user wrote it, to memory and rates: a table of public figures, and `this`, which is measured."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from octavo.config import Environment
from octavo.errors import ConfigError, show
from octavo.plan.machine import Machine, this_machine
from octavo.ram import available_bytes, total_bytes

MOST_DEVICES = 1024
_COUNTED = re.compile(r"\s*(?:([0-9]{1,9})\s*x\s*)?(\S+)\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Hardware:
    """`count` equal devices that share a model by tensor parallelism. Sizes and rates are those of one device.

    `free_bytes` is what a process may take. If nobody says how large the cache is, weights and cache use `usable_share`
    of it, and the cache `cache_share` of what weights leave. `slowest` is the part of the peak rates that sound kernels
    reach at the least, by resource. `process_bytes` is what a process takes that holds neither weights nor cache.
    """

    name: str
    count: int
    memory_bytes: int
    free_bytes: int
    usable_share: float
    cache_share: float
    read_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    slowest: Mapping[str, float]
    source: str
    process_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """Memory of all devices."""
        return self.count * self.memory_bytes

    def flops(self, format: str) -> float:
        """Operations per second of one device on weights of a format; those it has no units for run as bf16."""
        return self.flops_per_s.get(format, self.flops_per_s["bf16"])


# What vLLM lets a process take of an accelerator by default (gpu_memory_utilization).
_ACCELERATOR_SHARE = 0.9
# Peak figures of data sheets against what serving reaches: about half of the products' rate in long prefills, and
# about 60 % of the bandwidth in decode. A measured machine's rates have been reached by some kernel already.
_SLOWEST_OF_PEAK = {"compute": 0.4, "read": 0.5}
_SLOWEST_OF_MEASURED = {"compute": 0.5, "read": 0.5}


@cache
def _table() -> dict[str, dict[str, object]]:
    text = files("octavo.plan").joinpath("hardware.json").read_text()
    return {name.lower(): {"name": name, **facts} for name, facts in json.loads(text).items()}


def names() -> list[str]:
    """What `find_hardware` knows, `this` first."""
    return ["this", *(str(facts["name"]) for facts in _table().values())]


def find_hardware(text: str, notice: Callable[[str], None]) -> Hardware:
    """`this`, a name of the table, or a number of such devices, as in `8xH100-80GB`.

    `notice` is told when a measurement begins. Raises `ConfigError` (param `hardware`) for what there is not.
    """
    match = _COUNTED.fullmatch(text)
    count, name = (int(match[1] or 1), match[2].lower()) if match else (1, "")
    if match and name not in _table() and name != "this":
        ahead = [key for key in _table() if key.startswith(name + "-")]
        name = ahead[0] if len(ahead) == 1 else name
    if name != "this" and name not in _table():
        raise ConfigError(
            f"hardware={show(text)} is not known; known: {', '.join(names())}, and several of one kind as in "
            "8xH100-80GB",
            param="hardware",
        )
    most = 1 if name in ("this", "cpu") else MOST_DEVICES
    if not 1 <= count <= most:
        raise ConfigError(
            f"hardware={show(text)}: {count} devices are impossible; from 1 to {most} of them can be planned",
            param="hardware",
        )
    if name == "this":
        return _this(this_machine(Environment.read(), notice))
    return _from_table(_table()[name], count)


def _from_table(facts: Mapping[str, object], count: int) -> Hardware:
    name, memory, rates = str(facts["name"]), facts["memory_bytes"], facts["flops_per_s"]
    read = facts["read_bytes_per_s"]
    assert isinstance(memory, float)
    assert isinstance(read, float)
    assert isinstance(rates, dict)
    is_cpu = name == "cpu"
    return Hardware(
        name=name if count == 1 else f"{count}x{name}",
        count=count,
        memory_bytes=int(memory),
        free_bytes=int(memory),
        usable_share=1.0 if is_cpu else _ACCELERATOR_SHARE,
        cache_share=0.5 if is_cpu else 1.0,
        read_bytes_per_s=read,
        flops_per_s=rates,
        slowest=_SLOWEST_OF_PEAK,
        source=str(facts["source"]),
    )


def _this(machine: Machine) -> Hardware:
    return Hardware(
        name="this",
        count=1,
        memory_bytes=total_bytes(),
        free_bytes=available_bytes(),
        usable_share=1.0,
        cache_share=0.5,  # as an engine takes it: see sizing.cache_budget
        read_bytes_per_s=machine.read_bytes_per_s,
        flops_per_s={"bf16": machine.bf16_flops_per_s, "f32": machine.f32_flops_per_s},
        slowest=_SLOWEST_OF_MEASURED,
        source=f"measured: {machine.cpu}, {machine.threads} threads",
        process_bytes=machine.process_bytes,
    )
