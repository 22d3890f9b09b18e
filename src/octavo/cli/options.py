"""The flags that commands share, each stated once.

An engine flag is a field of `EngineConfig`, a sampling flag one of `SamplingParams`, a server flag one of
`ServerConfig`; their defaults are read there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from octavo.config import (
    BLOCK_SIZES,
    CACHE_POLICIES,
    DEFAULT_QUALITY_FLOOR,
    DTYPES,
    KV_CACHE_DTYPES,
    LAYER_KINDS,
    STORED_BLOCK_SIZE,
    EngineConfig,
)
from octavo.params import SamplingParams
from octavo.server.config import ServerConfig


@dataclass(frozen=True)
class Flag:
    """A field and how it is written on the command line. `unset` says what a default of None means."""

    name: str
    kind: Any
    help: str
    unset: str | None = None
    metavar: str | None = None
    flag: str | None = None

    def parameter(self, default: Any) -> inspect.Parameter:
        """The parameter typer makes a flag of."""
        flag = self.flag or f"--{self.name.replace('_', '-')}"
        option = typer.Option(
            f"{flag}/--no-{flag[2:]}" if default is True else flag,
            help=self.help,
            metavar=self.metavar,
            show_default=self.unset or (default is not False and default not in (None, "", [])),
        )
        kind = self.kind if default is not None else self.kind | None
        return _keyword(self.name, Annotated[kind, option], default)


ENGINE = (
    Flag("dtype", str, f"Weights and arithmetic: {', '.join(DTYPES)}."),
    Flag("max_model_len", str, "Longest sequence, e.g. 32k.", "what the model was made for", "TOKENS"),
    Flag(
        "block_size",
        int,
        f"Positions per cache block: {', '.join(map(str, BLOCK_SIZES))}.",
        f"{EngineConfig.block_size}, or {STORED_BLOCK_SIZE} where sealed blocks are smaller",
    ),
    Flag(
        "kv_cache_dtype",
        str,
        f"Format of sealed blocks: {', '.join(dict.fromkeys(KV_CACHE_DTYPES.values()))}, or one for keys and one for "
        "values: k=int8,v=int4.",
    ),
    Flag(
        "kv_cache_dtype_overrides",
        list[str],
        f"Another format for the layers of a kind ({', '.join(LAYER_KINDS)}), e.g. sliding=bf16. May be repeated.",
    ),
    Flag(
        "kv_quality_floor",
        str,
        "Refuse a format that keeps less of a token's likelihood, measured on a short text at start: a share, or "
        f"default for {DEFAULT_QUALITY_FLOOR}.",
        "a warning below that",
        "SHARE",
    ),
    Flag(
        "kv_cache_memory",
        str,
        "Size of the cache, e.g. 256MiB.",
        "half of the memory left after loading",
        "SIZE",
    ),
    Flag("max_num_seqs", int, "Sequences that run at a time."),
    Flag("max_num_batched_tokens", str, "Tokens computed per step.", metavar="TOKENS"),
    Flag("enable_prefix_caching", bool, "Reuse what was computed for the same prefix."),
    Flag(
        "compress_under_pressure",
        str,
        "When the cache is full, fold cached blocks to these formats, step by step, before any is thrown away, e.g. "
        "int8,int4. Answers that read folded blocks are not exact, and their receipts say so.",
        "off",
        "FORMATS",
    ),
    Flag("cache_policy", str, f"Which cached block goes first: {', '.join(CACHE_POLICIES)}."),
    Flag("max_pinned", str, "Cache that requests may pin, e.g. 64MiB.", "a quarter of the cache", "SIZE"),
    Flag("num_threads", int, "Threads that compute.", "the processors there are"),
    Flag("chat_template", str, "A template, or the file of one.", "the model's own", "TEXT|FILE"),
    Flag("tenant", str, "Blocks are shared within one tenant only."),
)
SAMPLING = (
    Flag("max_tokens", int, "New tokens at most.", "the rest of the context"),
    Flag("temperature", float, "0 takes the likeliest token each time."),
    Flag("top_p", float, "Sample from the likeliest tokens that have this probability together; 1 is off."),
    Flag("top_k", int, "Sample from this many of the likeliest tokens; 0 is off."),
    Flag("min_p", float, "Leave out tokens below this share of the likeliest one's probability; 0 is off."),
    Flag(
        "seed",
        int,
        "Seed of the sampling, of every answer. Same seed, same answer; the receipt names it.",
        "drawn, but the same in every run",
    ),
    Flag("stop", list[str], "End the answer before this text. May be repeated."),
    Flag("ignore_eos", bool, "Go on after the end token."),
)

QUEUE = Flag("max_waiting", int, "Requests that wait for their turn; further ones get 503.")
SERVER = (
    Flag("host", str, "Address to listen on."),
    Flag("port", int, "Port to listen on."),
    Flag(
        "served_model_names",
        list[str],
        "What requests may call the model. May be repeated.",
        "MODEL",
        flag="--served-model-name",
    ),
    Flag(
        "admin_key", str, "Key for /cache, /metrics and /reset_prefix_cache, and for everything else.", "none"
    ),
    Flag("share_prefixes", bool, "All tenants share cached prefixes, so timing may tell what others asked."),
    Flag("max_body", str, "Longest body of a request, e.g. 16MiB.", metavar="SIZE"),
    Flag("max_bodies", str, "What the bodies of all requests may hold together.", metavar="SIZE"),
    Flag("max_messages", int, "Most messages of a conversation."),
    Flag("body_timeout", float, "Seconds for headers, and again for a body, to arrive."),
    Flag("send_timeout", float, "Seconds a client may leave what it was sent unread."),
    Flag("max_connections", int, "Open connections; further ones get 503."),
    Flag("stall_timeout", float, "Seconds without progress after which /health is 503."),
    Flag("log_json", bool, "Log JSON, an object per line."),
    Flag("log_prompts", bool, "Log prompts and answers too."),
    Flag("request_log", Path, "Append a line per answer: lengths, block hashes, times.", "none", "FILE"),
)
DEFAULT_QUEUE = 1024
"""A server should refuse what it could not get to in time; a program that brings its own queue decides itself."""

Command = Callable[..., None]


def with_flags(temperature: float) -> Callable[[Command], Command]:
    """`command(config, params, ...)` as a typer command: MODEL, what else it takes, and all shared flags.

    Unlike in the API an answer ends where the model ends it, and `temperature` is one that suits the command.
    """
    defaults = _defaults(EngineConfig) | _defaults(SamplingParams)
    defaults |= {"temperature": temperature, "max_tokens": None, "seed": SamplingParams.seed}

    def spell_out(command: Command) -> Command:
        def given(**values: Any) -> None:
            sampling, rest = _split(values, SAMPLING)
            config, rest = _engine_config(rest, ENGINE)
            command(config, SamplingParams(**sampling), **rest)

        return _spelled_out(command, given, ("config", "params"), [*SAMPLING, *ENGINE], defaults)

    return spell_out


def with_server_flags(command: Command) -> Command:
    """`command(config, server, ...)` as a typer command: MODEL, what else it takes, and the flags of both."""
    engine = (*ENGINE, QUEUE)
    defaults = _defaults(EngineConfig) | _defaults(ServerConfig) | {QUEUE.name: DEFAULT_QUEUE}

    def given(api_key: list[str], api_key_file: Path | None, **values: Any) -> None:
        server, rest = _split(values, SERVER)
        server["served_model_names"] = tuple(server["served_model_names"])
        config, rest = _engine_config(rest, engine)
        command(config, ServerConfig.create(api_key=api_key, api_key_file=api_key_file, **server), **rest)

    return _spelled_out(command, given, ("config", "server"), [*SERVER, *engine], defaults)


def _split(values: dict[str, Any], flags: Iterable[Flag]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of `flags`, and the rest."""
    names = {flag.name for flag in flags}
    return {n: v for n, v in values.items() if n in names}, {
        n: v for n, v in values.items() if n not in names
    }


def _engine_config(values: dict[str, Any], flags: Iterable[Flag]) -> tuple[EngineConfig, dict[str, Any]]:
    engine, rest = _split(values, flags)
    return EngineConfig.create(rest.pop("model"), **engine), rest


def _spelled_out(
    command: Command, given: Command, own: tuple[str, ...], flags: Iterable[Flag], defaults: dict[str, Any]
) -> Command:
    """`given`, with the parameters of `command` but for `own`, MODEL and `flags` as its signature."""
    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name not in own
    ]
    model = Annotated[str, typer.Argument(metavar="MODEL", help="Alias, directory, .gguf file or hub id.")]
    given.__name__, given.__doc__ = command.__name__, command.__doc__
    given.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            _keyword("model", model, inspect.Parameter.empty),
            *parameters,
            *(flag.parameter(defaults[flag.name]) for flag in flags),
        ]
    )
    given.__annotations__ = {}
    return given


def _defaults(home: Any) -> dict[str, Any]:
    """Field → default, lists where the field holds several; None where another field decides."""
    several: dict[str, Any] = {
        f.name: [] for f in fields(home) if f.default == () or f.default_factory is dict
    }
    return (
        {f.name: f.default for f in fields(home)}
        | several
        | {"block_size": None, "compress_under_pressure": None}
    )


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
