"""What would help most, each change planned for itself and compared with the plan as asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from octavo.cache.formats import FORMATS, block_format
from octavo.config import format_bytes
from octavo.errors import ConfigError
from octavo.plan.planner import Budget, Case

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
    """The same model with another number of KV heads, all else equal. `bytes_per_token` is one copy, of which the
    devices together hold `replication`."""

    name: str
    kv_heads: int
    bytes_per_token: int
    replication: float
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
        heads = "1 KV head" if variant.kv_heads == 1 else f"{variant.kv_heads} KV heads"
        yield f"a model with {heads} ({variant.name}{held(variant)})", variant.max_requests
    half = case.context // 2
    if half:
        shorter = replace(case, context=half, output=min(case.output, half))
        yield f"--context {half}, half as long", shorter.max_requests
        yield f"a shared prefix of {half} tokens, held once", _fit_with_shared_prefix(case, half)
    if case.hardware.count > 1 or case.hardware.name not in ("this", "cpu"):
        twice = replace(case.hardware, count=2 * case.hardware.count)
        yield "twice as many devices", replace(case, hardware=twice).max_requests


def _fit_with_shared_prefix(case: Case, prefix: int) -> int:
    """Sequences that fit when the full blocks of their first `prefix` tokens are the same and held once. What they
    share is what they still read of them at their full length: windows have left the rest."""
    layout = case.device_layout
    blocks, shared = prefix // layout.block_size, 0
    for g in range(len(layout.groups)):
        first = layout.first_block(g, case.context - 1)
        count = max(0, blocks - first)
        shared += count * layout.sealed_sizes_bytes[g]
        if count and not first:
            shared += layout.block_bytes(g) - layout.sealed_sizes_bytes[g]
    once = layout.sequence_bytes(blocks * layout.block_size)
    own = layout.sequence_bytes(case.context) - shared
    return max(0, (case.cache_bytes // case.hardware.count - once) // own)


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
        found.append(
            HeadVariant(name, kv_heads, other.layout.bytes_per_token, other.replication, other.max_requests)
        )
    return found


def held(variant: HeadVariant) -> str:
    """What follows its name or size where devices hold it more than once."""
    return f", held {variant.replication:.4g} times" if variant.replication > 1 else ""


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
    if least := _least_budget(case):
        found.append(least)
    if case.replication > 1:
        found.append(
            f"{hardware.count} devices hold keys and values {case.replication:.4g} times, because {_undivided(case)}"
        )
    if hardware.count > 1 and case.facts.spec.num_attention_heads % hardware.count:
        found.append(
            f"{case.facts.spec.num_attention_heads} attention heads do not divide among {hardware.count} devices; most "
            "engines refuse that"
        )
    return found


def _least_budget(case: Case) -> str | None:
    """What a budget must be that holds not even one request, though the weights would leave more."""
    budget, count = case.budget, case.hardware.count
    asked, least = case.asked_bytes, count * case.device_layout.sequence_bytes(case.context)
    if asked is None or asked > case.cache_bytes or case.max_requests:
        return None
    said = f"kv_budget={asked if budget.share is None else budget.share} holds no request of {case.context} tokens"
    if replace(case, budget=Budget(nbytes=least)).max_requests:
        return f"{said}; the least that does is kv_budget={least}"
    return f"{said}, which takes {least} bytes, more than the weights leave"


def _undivided(case: Case) -> str:
    """Why devices hold keys and values more than once."""
    layer, count = case.facts.spec.layers[0], case.hardware.count
    if layer.value_dim is not None:
        return "each needs the latent vectors whole"
    if (heads := layer.num_kv_heads) < count:
        return f"KV heads are fewer: {heads}"
    return f"{heads} KV heads do not divide among them: each has room for {-(-heads // count)}"


def prompt_notes(case: Case) -> list[str]:
    """Said of prompt-heavy work, where a larger cache does not help."""
    if not case.max_requests or case.prefill_share <= PROMPT_HEAVY:
        return []
    return [
        f"with {case.output} of {case.context} tokens generated, {case.prefill_share:.0%} of the time goes to prompts: "
        "a larger cache will not give more tokens per second; shared prefixes, or more compute, would"
    ]
