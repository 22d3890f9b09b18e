"""The flags that commands share, each stated once.

An engine flag is a field of `EngineConfig`, a sampling flag one of `SamplingParams`; their defaults are read there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Annotated, Any

import typer

from octavo.config import BLOCK_SIZES, CACHE_POLICIES, DTYPES, KV_CACHE_DTYPES, EngineConfig
from octavo.params import SamplingParams


@dataclass(frozen=True)
class Flag:
    """A field and how it is written on the command line. `unset` says what a default of None means."""

    name: str
    kind: Any
    help: str
    unset: str | None = None
    metavar: str | None = None

    def parameter(self, default: Any) -> inspect.Parameter:
        """The parameter typer makes a flag of."""
        flag = f"--{self.name.replace('_', '-')}"
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
    Flag("block_size", int, f"Positions per cache block: {', '.join(map(str, BLOCK_SIZES))}."),
    Flag(
        "kv_cache_dtype",
        str,
        f"Format of sealed blocks: {', '.join(dict.fromkeys(KV_CACHE_DTYPES.values()))}.",
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

Command = Callable[..., None]


def with_flags(temperature: float) -> Callable[[Command], Command]:
    """`command(config, params, ...)` as a typer command: MODEL, what else it takes, and all shared flags.

    Unlike in the API an answer ends where the model ends it, and `temperature` is one that suits the command.
    """
    defaults = _defaults(EngineConfig) | _defaults(SamplingParams)
    defaults |= {"temperature": temperature, "max_tokens": None, "seed": SamplingParams.seed}
    shared = [
        *(flag.parameter(defaults[flag.name]) for flag in SAMPLING),
        *(flag.parameter(defaults[flag.name]) for flag in ENGINE),
    ]
    return lambda command: _spell_out(command, shared)


def _spell_out(command: Command, shared: list[inspect.Parameter]) -> Command:
    own = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in inspect.signature(command, eval_str=True).parameters.values()
        if parameter.name not in ("config", "params")
    ]
    model = Annotated[str, typer.Argument(metavar="MODEL", help="Alias, directory, .gguf file or hub id.")]

    def visible(**given: Any) -> None:
        engine = {flag.name: given.pop(flag.name) for flag in ENGINE}
        sampling = {flag.name: given.pop(flag.name) for flag in SAMPLING}
        config = EngineConfig.create(given.pop("model"), **engine)
        command(config, SamplingParams(**sampling), **given)

    visible.__name__, visible.__doc__ = command.__name__, command.__doc__
    visible.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            _keyword("model", model, inspect.Parameter.empty),
            *own,
            *shared,
        ]
    )
    visible.__annotations__ = {}
    return visible


def _defaults(home: Any) -> dict[str, Any]:
    """Field → default, lists where the field holds a tuple."""
    return {f.name: [] if f.default == () else f.default for f in fields(home)}


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
