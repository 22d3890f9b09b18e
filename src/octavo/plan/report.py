"""A whole plan: one row per format and context, for programs as a dictionary."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from octavo.config import BLOCK_SIZES, parse_bytes, parse_kv_cache_dtype, parse_tokens, split_formats
from octavo.errors import ConfigError, show
from octavo.plan.advice import advise, head_variants, notes, prompt_notes
from octavo.plan.facts import ModelFacts, find_model
from octavo.plan.hardware import Hardware, find_hardware
from octavo.plan.planner import Budget, Case
from octavo.plan.roofline import Bounds
from octavo.plan.weights import WEIGHT_FORMATS

DEFAULT_CONTEXT = 32_000
DEFAULT_OUTPUT = 256


@dataclass(frozen=True)
class Plan:
    """The answer to one command: the cases in the order of their rows, at least one."""

    facts: ModelFacts
    hardware: Hardware
    cases: tuple[Case, ...]

    @property
    def first(self) -> Case:
        """The case that advice is given for."""
        return self.cases[0]

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Sizes are bytes, times seconds; what would take time is None where no request fits."""
        weights, first = self.facts.weights, self.first
        return {
            "model": self.facts.name,
            "hardware": self.hardware.name,
            "rows": [_row(case) for case in self.cases],
            "weights": first.weights,
            "parameters": weights.total,
            "active_parameters": weights.active,
            "model_context": self.facts.context,
            "memory_bytes": self.hardware.total_bytes,
            "process_bytes": self.hardware.count * self.hardware.process_bytes,
            "help": [advice.to_dict() for advice in advise(first)],
            "kv_head_variants": [asdict(variant) for variant in head_variants(first)],
            "sources": {"model": self.facts.source, "hardware": self.hardware.source},
        }


def _row(case: Case) -> dict[str, Any]:
    requests = case.concurrency or case.max_requests
    fits = case.max_requests > 0  # where not one does, nothing runs and nothing takes time
    return {
        "kv_cache_dtype": case.format,
        "context": case.context,
        "weights_bytes": case.weights_bytes,
        "bytes_per_token": case.layout.bytes_per_token,
        "bytes_per_request": case.bytes_per_request,
        "max_requests": case.max_requests,
        "max_context": case.facts.context if case.max_context is None else case.max_context,
        "binding": case.binding,
        "block_size": case.layout.block_size,
        "cache_bytes": case.cache_bytes,
        "requests": requests,
        "bytes_for_requests": requests * case.bytes_per_request,
        "replication": case.replication,
        "prompt": case.prompt,
        "prefill_s": _bounds(case.prefill) if fits else None,
        "decode_batch": case.batch if fits else None,
        "decode_step_s": _bounds(case.decode) if fits else None,
        "compute_bound_batch": case.roofline.compute_bound_batch(case.context) if fits else None,
        "prefill_share": case.prefill_share if fits else None,
        "notes": notes(case) + prompt_notes(case),
    }


def _bounds(bounds: Bounds) -> dict[str, Any]:
    return {"low": bounds.low, "high": bounds.high, "bound": bounds.bound}


def make_plan(
    model: str,
    hardware: str = "this",
    *,
    context: str | None = None,
    kv_cache_dtype: str = "bf16",
    weights: str | None = None,
    kv_budget: str | None = None,
    concurrency: int | None = None,
    output: str | None = None,
    block_size: int | None = None,
    notice: Callable[[str], None] = lambda _: None,
) -> Plan:
    """Plan from what a user writes. `context` and `kv_cache_dtype` may list several, with commas; their rows come
    format by format. `weights=None` takes the format that the model is published in.

    Raises `ConfigError` or `ModelNotFound` naming the field.
    """
    formats = _formats(kv_cache_dtype, "f32" if weights == "f32" else "bf16")
    budget = _budget(kv_budget)
    if weights is not None and weights not in WEIGHT_FORMATS:
        known = ", ".join(WEIGHT_FORMATS)
        raise ConfigError(f"weights={show(weights)} is not one of {known}", param="weights")
    if concurrency is not None and concurrency < 1:
        raise ConfigError(
            f"concurrency={concurrency} must be at least 1",
            param="concurrency",
        )
    if block_size is not None and block_size not in BLOCK_SIZES:
        known = ", ".join(map(str, BLOCK_SIZES))
        raise ConfigError(f"block_size={block_size} is not one of {known}", param="block_size")
    contexts = None if context is None else [parse_tokens(c, "context") for c in _listed("context", context)]
    generated = None if output is None else parse_tokens(output, "output")
    facts = find_model(model)
    machine = find_hardware(hardware, notice)
    if contexts is None:
        contexts = [min(DEFAULT_CONTEXT, facts.context or DEFAULT_CONTEXT)]
    for length in contexts:
        if generated is not None and generated >= length:
            most = f"at most {length - 1}, or " if length > 1 else ""
            raise ConfigError(
                f"output={generated} leaves no prompt in a context of {length}; {most}context={generated + 1} works",
                param="output",
            )
    cases = [
        Case(
            facts,
            machine,
            weights or facts.published,
            format,
            length,
            min(DEFAULT_OUTPUT, length // 2) if generated is None else generated,
            block_size,
            budget,
            concurrency,
        )
        for format in formats
        for length in contexts
    ]
    return Plan(facts, machine, tuple(cases))


def _formats(text: str, own: str) -> list[str]:
    """The formats in a list; `auto` is the compute type."""
    names = [parse_kv_cache_dtype(part.strip()) for part in split_formats(text)]
    return [re.sub(r"\bauto\b", own, name) for name in names]


def _listed(param: str, text: str) -> Sequence[str]:
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{param}={show(text)} has an empty entry", param=param)
    return parts


def _budget(text: str | None) -> Budget:
    """`0.5` is a share of all memory, `1` all of it; anything else is a size in bytes."""
    if text is None:
        return Budget()
    try:
        share = float(text)
    except ValueError:
        return Budget(nbytes=parse_bytes(text, "kv_budget"))
    if 0 < share <= 1:
        return Budget(share=share)
    if share > 1 and share.is_integer():
        return Budget(nbytes=parse_bytes(int(share), "kv_budget"))
    raise ConfigError(
        f"kv_budget={show(text)} must be a share of all memory above 0 up to 1, such as 0.5, or a size such as 100GiB",
        param="kv_budget",
    )
