"""Frozen configuration of an engine. The only module that reads the environment; an unknown key is an error.

`EngineConfig` holds what the command line and `LLM(...)` accept; their defaults are read from here.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError, show

_BYTE_UNITS = {"": 1, "B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3, "TiB": 1024**4}
_TOKEN_UNITS = {"": 1, "k": 1000, "Ki": 1024, "M": 1000_000, "Mi": 1024**2}
MOST = 2**63 - 1
"""The largest whole number that is taken."""
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*", re.ASCII)

# Before torch loads the OpenMP pool: threads that wait for each other sleep after some 20 µs instead of spinning for
# milliseconds, which on a busy machine takes the time from the very thread they wait for.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

DTYPES = ("auto", "bfloat16", "float32")
BLOCK_SIZES = (4, 8, 16, 32, 64, 128, 256)
CACHE_POLICIES = ("lru", "cost")
SPAN = 256
MAX_THREADS = 1024
"""Far more than help; a pool that the system cannot give ends the process without a word."""

# The contract's names first, torch's names as synonyms.
KV_CACHE_DTYPES = {
    "auto": "auto",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "f32": "f32",
    "float32": "f32",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "float8_e4m3fn": "fp8",
    "int8": "int8",
    "int4": "int4",
    "int2": "int2",
}
DEFAULT_QUALITY_FLOOR = 0.97
"""The share of a token's likelihood (see `octavo.evaluate.probe`) below which a format is warned of: 4 bits keep it in
most models, 2 bits do not."""
STORED_BLOCK_SIZE = 32
"""Positions per block where sealed blocks are smaller than what they are filled in, unless it is said otherwise."""
LAYER_KINDS = ("full", "sliding")
"""The layer groups that may have a format of their own."""
_KEYS_AND_VALUES = re.compile(r"k=([^,]+),v=([^,]+)")
_BETWEEN_FORMATS = re.compile(r",(?!v=)")


def parse_kv_cache_dtype(value: object, param: str = "kv_cache_dtype") -> str:
    """The contract's name of a format, of torch's or of one for keys and one for values: `k=int8,v=int4`.

    Raises `ConfigError` for one that there is not.
    """
    parts: tuple[str, ...] = ()
    if isinstance(value, str):
        apart = _KEYS_AND_VALUES.fullmatch(value)
        parts = (apart[1], apart[2]) if apart else (value,)
    if not parts or any(part not in KV_CACHE_DTYPES for part in parts):
        raise ConfigError(
            f"{param}={show(value)} is not one of {', '.join(KV_CACHE_DTYPES)}, or one for keys and one for values, as "
            "in k=int8,v=int4",
            param=param,
        )
    names = [KV_CACHE_DTYPES[part] for part in parts]
    return names[0] if len(set(names)) == 1 else f"k={names[0]},v={names[1]}"


def split_formats(text: str) -> list[str]:
    """The formats in a list with commas between them: `int8,k=int8,v=int4` are two."""
    return _BETWEEN_FORMATS.split(text)


def parse_ladder(value: object) -> tuple[str, ...]:
    """Names of formats, each smaller than the one before, from a sequence or from text: `int8,int4`.

    Raises `ConfigError` for a format that there is not.
    """
    param = "compress_under_pressure"
    if isinstance(value, str):
        value = split_formats(value) if value else ()
    if not isinstance(value, Sequence):
        raise ConfigError(f"{param}={show(value)} is not a list of formats, e.g. int8,int4", param=param)
    return tuple(parse_kv_cache_dtype(name, param) for name in value)


def parse_quality_floor(value: object) -> float:
    """A share from a number, its text, or `default`. Raises `ConfigError` unless it is above 0, at most 1."""
    if value == "default":
        return DEFAULT_QUALITY_FLOOR
    try:
        floor = (
            math.nan if isinstance(value, bool) or not isinstance(value, int | float | str) else float(value)
        )
    except (ValueError, OverflowError):
        floor = math.nan
    if not 0 < floor <= 1:
        raise ConfigError(
            f"kv_quality_floor={show(value)} must be a share of the likelihood, more than 0 and at most 1, or "
            f"'default', which is {DEFAULT_QUALITY_FLOOR}",
            param="kv_quality_floor",
        )
    return floor


def _parse_size(value: int | str, units: dict[str, int], param: str, example: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{param}={show(value)} is not a size; write e.g. {example}", param=param)
    if isinstance(value, int):
        amount = value
    else:
        match = _SIZE.fullmatch(value)
        if match is None or match[2] not in units:
            known = ", ".join(u for u in units if u)
            raise ConfigError(
                f"{param}={show(value)} is not a size; write e.g. {example} (units: {known})", param=param
            )
        exact = Fraction(match[1]) * units[match[2]]
        amount = exact.numerator
        if exact.denominator != 1:
            raise ConfigError(f"{param}={show(value)} is not a whole number", param=param)
    if amount < least:
        raise ConfigError(
            f"{param}={show(value)} must be at least {least}; write e.g. {example}", param=param
        )
    if amount > MOST:
        raise ConfigError(f"{param}={show(value)} must be at most {MOST}; write e.g. {example}", param=param)
    return amount


def parse_bytes(value: int | str, param: str = "size", least: int = 1) -> int:
    """Bytes from an int or `"256MiB"` (`B`, `KiB`, `MiB`, `GiB`, `TiB`). Raises `ConfigError`, below `least` too."""
    return _parse_size(value, _BYTE_UNITS, param, '"256MiB"', least)


def parse_tokens(value: int | str, param: str = "tokens") -> int:
    """A token count from an int, `"32k"` (32,000) or `"32Ki"` (32,768). Raises `ConfigError`."""
    return _parse_size(value, _TOKEN_UNITS, param, '"32k"')


def format_bytes(count: int) -> str:
    """`count` bytes for people: `1.5 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is started with. Sizes are already bytes and tokens.

    Raises `ConfigError` on an impossible value. `kv_cache_memory=None` means half of the free memory after loading.
    `max_pinned` is the most bytes that `cache_ttl` keeps; None means a quarter of the cache, so that pins leave most
    of it to what is used now, and 0 refuses every pin.
    `cache_policy` says which cached block goes first: the least recently used, or the one that saves least.
    `kv_cache_dtype` is how sealed blocks are stored, for keys and values apart if written `k=int8,v=int4`;
    `kv_cache_dtype_overrides` has another one for the layers of a kind: `full` or `sliding`.
    `compress_under_pressure` names the formats, each smaller than the one before, that cached blocks are folded to when
    the cache is full and before any is thrown away; answers that read those are no longer exact.
    `kv_quality_floor` refuses a format that keeps less than this share of a token's likelihood; `"default"` is
    `DEFAULT_QUALITY_FLOOR`.
    """

    model: str
    dtype: str = "auto"
    kv_cache_memory: int | None = None
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    enable_prefix_caching: bool = True
    seed: int = 0
    num_threads: int | None = None
    tenant: str = ""
    chat_template: str | None = None
    max_waiting: int | None = None
    max_pinned: int | None = None
    cache_policy: str = "lru"
    kv_cache_dtype_overrides: Mapping[str, str] = field(default_factory=dict)
    compress_under_pressure: tuple[str, ...] = ()
    kv_quality_floor: float | None = None

    def __post_init__(self) -> None:
        for name, kind in (("model", str), ("tenant", str), ("enable_prefix_caching", bool)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigError(f"{name}={show(getattr(self, name))} must be a {kind.__name__}", param=name)
        if not isinstance(self.chat_template, str | None):
            raise ConfigError(
                f"chat_template={show(self.chat_template)} must be a str, or None", param="chat_template"
            )
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("block_size", self.block_size, BLOCK_SIZES)
        _one_of("cache_policy", self.cache_policy, CACHE_POLICIES)
        object.__setattr__(self, "kv_cache_dtype", parse_kv_cache_dtype(self.kv_cache_dtype))
        overrides = {}
        for layers, format in dict(self.kv_cache_dtype_overrides).items():
            _one_of("kv_cache_dtype_overrides", layers, LAYER_KINDS)
            overrides[layers] = parse_kv_cache_dtype(format, "kv_cache_dtype_overrides")
        object.__setattr__(self, "kv_cache_dtype_overrides", overrides)
        ladder = parse_ladder(self.compress_under_pressure)
        object.__setattr__(self, "compress_under_pressure", ladder)
        if ladder and not self.enable_prefix_caching:
            raise ConfigError(
                "compress_under_pressure does nothing without prefix caching: nothing is kept that could be folded",
                param="compress_under_pressure",
            )
        for name in (
            "kv_cache_memory",
            "max_model_len",
            "max_num_seqs",
            "max_num_batched_tokens",
            "num_threads",
        ):
            value = getattr(self, name)
            optional = name in ("kv_cache_memory", "max_model_len", "num_threads")
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
                raise ConfigError(f"{name}={show(value)} must be a whole number from 1 to {MOST}", param=name)
        if self.num_threads is not None and self.num_threads > MAX_THREADS:
            raise ConfigError(
                f"num_threads={self.num_threads} must be at most {MAX_THREADS}; this machine has {os.cpu_count()}",
                param="num_threads",
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise ConfigError(
                f"seed={show(self.seed)} must be a whole number from 0 to 2^64 - 1", param="seed"
            )
        for name in ("max_waiting", "max_pinned"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                raise ConfigError(f"{name}={show(value)} must be a whole number of at least 0", param=name)
        if self.kv_quality_floor is not None:
            object.__setattr__(self, "kv_quality_floor", parse_quality_floor(self.kv_quality_floor))

    @classmethod
    def create(cls, model: str | os.PathLike[str], **options: Any) -> EngineConfig:
        """Build from user input: sizes may be strings, an unknown option raises `ConfigError`.

        `block_size=None` is 16, and `STORED_BLOCK_SIZE` where sealed blocks are, or may become, smaller.
        `kv_cache_dtype_overrides` may be a list of `kind=format`, `compress_under_pressure` text: `int8,int4`.
        """
        known = {f.name for f in fields(cls)} - {"model"}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown option {name!r}; known: {', '.join(sorted(known))}", param=name)
        if options.get("kv_cache_memory") is not None:
            options["kv_cache_memory"] = parse_bytes(options["kv_cache_memory"], "kv_cache_memory")
        if options.get("max_pinned") is not None:
            options["max_pinned"] = parse_bytes(options["max_pinned"], "max_pinned", least=0)
        overrides = options.get("kv_cache_dtype_overrides")
        if overrides is not None and not isinstance(overrides, Mapping):
            options["kv_cache_dtype_overrides"] = dict(_override(item) for item in overrides)
        if "compress_under_pressure" in options:
            options["compress_under_pressure"] = parse_ladder(options["compress_under_pressure"] or ())
        if options.get("block_size") is None:
            options["block_size"] = _default_block_size(options)
        for name in ("max_model_len", "max_num_batched_tokens"):
            if options.get(name) is not None:
                options[name] = parse_tokens(options[name], name)
        return cls(model=os.fspath(model) if isinstance(model, os.PathLike) else model, **options)


def _override(item: str) -> tuple[str, str]:
    kind, sign, format = item.partition("=")
    if not sign:
        raise ConfigError(
            f"kv_cache_dtype_overrides={show(item)} is not kind=format; write e.g. sliding=bf16",
            param="kv_cache_dtype_overrides",
        )
    return kind, format


def _default_block_size(options: Mapping[str, Any]) -> int:
    formats = [
        options.get("kv_cache_dtype", "auto"),
        *(options.get("kv_cache_dtype_overrides") or {}).values(),
        *options.get("compress_under_pressure", ()),
    ]
    plain = {"auto", "bf16", "f32"}
    return (
        EngineConfig.block_size if plain.issuperset(map(parse_kv_cache_dtype, formats)) else STORED_BLOCK_SIZE
    )


def _one_of(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if type(value) is not type(allowed[0]) or value not in allowed:
        raise ConfigError(f"{name}={show(value)} is not one of {', '.join(map(str, allowed))}", param=name)


@dataclass(frozen=True)
class Environment:
    """What Octavo takes from environment variables; nothing else reads them."""

    home: Path
    isa: str | None
    poison: bool

    @classmethod
    def read(cls) -> Environment:
        """`OCTAVO_HOME` (models and probe results), `OCTAVO_ISA` (force a kernel path), `OCTAVO_POISON=1` (fill
        freed and new blocks with NaN, for debugging)."""
        cache = os.environ.get("XDG_CACHE_HOME")
        base = Path(cache) if cache else Path.home() / ".cache"
        return cls(
            home=Path(os.environ.get("OCTAVO_HOME") or base / "octavo"),
            isa=os.environ.get("OCTAVO_ISA") or None,
            poison=os.environ.get("OCTAVO_POISON", "") not in ("", "0"),
        )
