"""What would help most, each change planned for itself and compared with the plan as asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from octavo.cache.formats import FORMATS, block_format
from octavo.config import format_bytes
from octavo.errors import ConfigError
from octavo.plan.planner import Case

PROMPT_HEAVY = 0.5


@dataclass(frozen=True)
class Advice:
    """A change, and how many sequences fit with it."""

    change: str
    max_requests: int
    times: float | None

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {"change": self.change, "max_requests": self.max_requests, "times": self.times}


@dataclass(frozen=True)
class HeadVariant:
    """The same model with another number of KV heads, all else equal."""

    name: str
    kv_heads: int
    bytes_per_token: int
    max_requests: int


def advise(case: Case) -> list[Advice]:
    """Changes that let more sequences fit, the most helpful first."""
    found = [_advice(case, change, fits) for change, fits in _changes(case)]
    found = [advice for advice in found if advice.max_requests > case.max_requests]
    return sorted(found, key=lambda advice: -advice.max_requests)


def _advice(case: Case, change: str, fits: int) -> Advice:
    return Advice(change, fits, fits / case.max_requests if case.max_requests else None)


def _changes(case: Case) -> Iterator[tuple[str, int]]:
    own = block_format(case.format)
    for name in ("fp8", "int8", "int4", "int2"):
        if FORMATS[name].bits < max(own.keys.bits, own.values.bits):
            # Not every format stores heads of every size.
            with suppress(ConfigError):
                yield f"--kv-cache-dtype {name}", replace(case, format=name).max_requests
    for name in ("fp8", "int4"):
        if case.facts.weights.nbytes(name) < case.weights_bytes:
            yield f"--weights {name}", replace(case, weights=name).max_requests
    for variant in head_variants(case):
        yield f"a model with {variant.kv_heads} KV heads ({variant.name})", variant.max_requests
    half = case.context // 2
    if half:
        shorter = replace(case, context=half, output=min(case.output, half))
        yield f"--context {half}, half as long", shorter.max_requests
        yield f"a shared prefix of {half} tokens, held once", _fit_with_shared_prefix(case, half)
    if case.hardware.count > 1 or case.hardware.name not in ("this", "cpu"):
        twice = replace(case.hardware, count=2 * case.hardware.count)
        yield "twice as many devices", replace(case, hardware=twice).max_requests


def _fit_with_shared_prefix(case: Case, prefix: int) -> int:
    """Sequences that fit when the full blocks of their first `prefix` tokens are the same and held once."""
    layout = case.device_layout
    whole = prefix // layout.block_size * layout.block_size
    shared, each = layout.sequence_bytes(whole), layout.sequence_bytes(case.context)
    own = max(each - shared, sum(layout.block_sizes_bytes))
    return max(0, (case.cache_bytes // case.hardware.count - shared) // own)


def head_variants(case: Case) -> list[HeadVariant]:
    """As many KV heads as query heads (MHA), 8 (GQA) and 1 (MQA), and the model's own; none of latent attention."""
    spec = case.facts.spec
    if any(layer.value_dim is not None for layer in spec.layers):
        return []
    heads, own = spec.num_attention_heads, spec.layers[0].num_kv_heads
    wanted = {heads, own, 1} | ({8} if heads % 8 == 0 else set())
    found = []
    for kv_heads in sorted(wanted, reverse=True):
        layers = tuple(replace(layer, num_kv_heads=kv_heads) for layer in spec.layers)
        facts = replace(case.facts, spec=replace(spec, layers=layers))
        other = replace(case, facts=facts)
        name = "MHA" if kv_heads == heads else "MQA" if kv_heads == 1 else "GQA"
        found.append(HeadVariant(name, kv_heads, other.layout.bytes_per_token, other.max_requests))
    return found


def notes(case: Case) -> list[str]:
    """What somebody who reads the numbers must know."""
    found = []
    context, hardware = case.facts.context, case.hardware
    if context is not None and case.context > context:
        found.append(f"the model was made for {context} positions; {case.context} are planned for")
    if case.asked_bytes is not None and case.asked_bytes > case.cache_bytes:
        found.append(
            f"the cache is cut from the {format_bytes(case.asked_bytes)} of kv_budget to the "
            f"{format_bytes(case.cache_bytes)} that the weights leave"
        )
    if case.concurrency is not None and case.concurrency > case.max_requests:
        found.append(f"{case.max_requests} of the {case.concurrency} requests asked for fit at a time")
    if case.replication > 1:
        found.append(
            f"{hardware.count} devices hold keys and values {case.replication:g} times, because heads are fewer than "
            "devices"
        )
    if hardware.count > 1 and case.facts.spec.num_attention_heads % hardware.count:
        found.append(
            f"{case.facts.spec.num_attention_heads} attention heads do not divide among {hardware.count} devices; most "
            "engines refuse that"
        )
    return found


def prompt_notes(case: Case) -> list[str]:
    """Said of prompt-heavy work, where a larger cache does not help."""
    if not case.max_requests or case.prefill_share <= PROMPT_HEAVY:
        return []
    return [
        f"with {case.output} of {case.context} tokens generated, {case.prefill_share:.0%} of the time goes to prompts: "
        "a larger cache will not give more tokens per second; shared prefixes, or more compute, would"
    ]
