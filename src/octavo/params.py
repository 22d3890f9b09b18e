"""`SamplingParams`: what one request may ask for. Names, defaults and ranges follow vLLM.

A value is accepted and honoured, or refused with `InvalidRequest`; nothing is clamped, converted or ignored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import NoReturn

from octavo.errors import InvalidRequest, show
from octavo.structured import StructuredOutputs as StructuredOutputs

MAX_CHOICES = 1024
# Strings, and characters in all: each token of each answer is compared with them between two steps of everybody's.
MAX_STRINGS = {"stop": (128, 4096), "bad_words": (4096, 65_536)}


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Parameters of one request, checked on construction; raises `InvalidRequest` with the field as `param`.

    | field | meaning |
    |---|---|
    | n | independent answers; answer 0 equals the one of `n=1` |
    | temperature | 0 is greedy: the likeliest token, the lowest id among equals |
    | top_k, top_p, min_p | off at 0 or -1, 1.0, 0.0; after the temperature: min_p, then top_k, then top_p |
    | seed | None draws one; the receipt names it |
    | max_tokens | new tokens at most; None is the rest of the context (not with context_policy) |
    | min_tokens | end and stop tokens are masked, and stop strings do not count, until then |
    | stop | strings that end the answer (a str is a list of one), cut off unless include_stop_str_in_output |
    | stop_token_ids | tokens that end the answer |
    | ignore_eos | the end token may be emitted and generation goes on |
    | bad_words | strings whose last token is masked where the tokens before it are there |
    | allowed_token_ids | every other token is masked |
    | repetition_penalty | over prompt and answer: divides positive logits, multiplies others; 1.0 is off |
    | presence_penalty, frequency_penalty | over the answer: subtracted once, and once per occurrence |
    | logit_bias | token id → what is added to its logit |
    | logprobs, prompt_logprobs | how many alternatives to report per token; -1 is the whole vocabulary |
    | structured_outputs | the form the answer must have (`StructuredOutputs`); it ends when the form is complete |
    | skip_special_tokens | leave special tokens out of the text |
    | priority | a smaller number is more important |
    | cache_salt | requests share cached blocks only under the same salt; None is none, `""` is one |
    | cache_ttl | seconds for which the blocks of this request stay pinned after it |
    | cache_ttl_tokens | pin the full blocks of that many first prompt tokens only, once they are computed |
    | exact | never match or hold blocks that are not bit-exact |
    | context_policy, sinks, window | "window": beyond sinks + window the oldest after the sinks are dropped |
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    bad_words: Sequence[str] = ()
    allowed_token_ids: Sequence[int] | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    cache_ttl: float | None = None
    cache_ttl_tokens: int | None = None
    exact: bool = False
    context_policy: str | None = None
    sinks: int | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}", self.max_tokens)
        if self.cache_ttl is None and self.cache_ttl_tokens is not None:
            _refuse("cache_ttl_tokens", self.cache_ttl_tokens, "used together with cache_ttl", None)
        self._check_context_policy()

    def _check_context_policy(self) -> None:
        if self.context_policy is None:
            for name in ("sinks", "window"):
                if getattr(self, name) is not None:
                    _refuse(name, getattr(self, name), 'used together with context_policy="window"', None)
            return
        for name in ("sinks", "window"):
            if getattr(self, name) is None:
                raise InvalidRequest(
                    f'{name} is missing: context_policy="window" needs sinks and window, '
                    "both multiples of the block size",
                    param=name,
                )
        if self.max_tokens is None:
            raise InvalidRequest(
                'max_tokens=None has no end with context_policy="window", where the context never fills; '
                "max_tokens=1024 works",
                param="max_tokens",
            )
        if self.exact:
            _refuse("exact", True, 'False with context_policy="window", which drops context', False)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `InvalidRequest` if a token id or a number of log-probs does not fit a vocabulary."""
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(self, name) or ():
                if token >= vocab_size:
                    raise InvalidRequest(
                        f"{name} holds token id {show(token)}, which is outside the vocabulary; "
                        f"ids from 0 to {vocab_size - 1} work",
                        param=name,
                    )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and value > vocab_size:
                _refuse(name, value, f"at most the vocabulary size {vocab_size}", vocab_size)


def _refuse(name: str, value: object, rule: str, works: object) -> NoReturn:
    raise InvalidRequest(f"{name}={show(value)} must be {rule}; {name}={works!r} works", param=name)


Check = Callable[[str, object], object]


def _whole(low: int, high: int | None = None, *, optional: bool = False) -> Check:
    rule = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
    if optional:
        rule += ", or None"

    def check(name: str, value: object) -> int | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Integral):
            _refuse(name, value, rule, _default(name))
        number = int(value)
        if number < low:
            _refuse(name, value, rule, low)
        if high is not None and number > high:
            _refuse(name, value, rule, high)
        return number

    return check


def _real(
    low: float = -math.inf, high: float = math.inf, *, above: bool = False, optional: bool = False
) -> Check:
    """A finite number from `low` to `high`; with `above`, greater than `low`."""
    rule = f"a number greater than {low:g}" if above else f"a number of at least {low:g}"
    if high < math.inf:
        rule += f" and at most {high:g}"
    if optional:
        rule += ", or None"

    def check(name: str, value: object) -> float | None:
        if value is None and optional:
            return None
        if isinstance(value, bool) or not isinstance(value, Real):
            _refuse(name, value, rule, _default(name))
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number) or (above and number <= low):
            _refuse(name, value, "finite and " + rule, _default(name))
        if number < low:
            _refuse(name, value, rule, low)
        if number > high:
            _refuse(name, value, rule, high)
        return number

    return check


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        _refuse(name, value, "True or False", _default(name))
    return value


def _text(name: str, value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _encodable(value):
        _refuse(name, value, "a string of valid characters, or None", None)
    return value


def _encodable(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _strings(name: str, value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    items = (value,) if isinstance(value, str) and name == "stop" else value
    if not isinstance(items, list | tuple):
        _refuse(name, value, "a list of strings", [])
    for item in items:
        if not isinstance(item, str) or not _encodable(item):
            _refuse(name, value, "a list of strings of valid characters", [])
        if not item or (name == "bad_words" and item.isspace()):
            _refuse(name, value, "a list without empty strings", [s for s in items if s and s != item])
    count, characters = MAX_STRINGS[name]
    for what, has, most in (("strings", len(items), count), ("characters", sum(map(len, items)), characters)):
        if has > most:
            raise InvalidRequest(f"{name} has {has} {what}; at most {most} work", param=name)
    return tuple(items)


def _is_token_id(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= 0


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list | tuple | set | frozenset):
        _refuse(name, value, "a list of token ids", [])
    for token in value:
        if not _is_token_id(token):
            _refuse(name, value, f"a list of token ids of at least 0, and {show(token)} is none", [])
    return tuple(sorted({int(token) for token in value}))


def _stop_token_ids(name: str, value: object) -> tuple[int, ...]:
    return () if value is None else _token_ids(name, value)


def _allowed_token_ids(name: str, value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    tokens = _token_ids(name, value)
    if not tokens:
        _refuse(name, value, "a list of at least one token id, or None", None)
    return tokens


def _logit_bias(name: str, value: object) -> dict[int, float] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        _refuse(name, value, "a mapping of token ids to numbers from -100 to 100, or None", None)
    number = _real(-100, 100)
    for token, bias in value.items():
        if not _is_token_id(token):
            _refuse(name, value, f"keyed by token ids of at least 0, and {show(token)} is none", None)
        try:
            number(name, bias)
        except InvalidRequest:
            _refuse(name, value, f"of numbers from -100 to 100, and that of {token} is {show(bias)}", None)
    return {int(token): float(bias) for token, bias in value.items()}


def _context_policy(name: str, value: object) -> str | None:
    if value is None:
        return None
    if value == "window":
        return "window"
    _refuse(name, value, 'None or "window"', None)


def _structured(name: str, value: object) -> StructuredOutputs | None:
    if value is not None and not isinstance(value, StructuredOutputs):
        _refuse(name, value, "a StructuredOutputs, or None", None)
    return value


_CHECKS: dict[str, Check] = {
    "n": _whole(1, MAX_CHOICES),
    "temperature": _real(0),
    "top_p": _real(0, 1, above=True),
    "top_k": _whole(-1),
    "min_p": _real(0, 1),
    "seed": _whole(0, 2**64 - 1, optional=True),
    "max_tokens": _whole(1, optional=True),
    "min_tokens": _whole(0),
    "stop": _strings,
    "include_stop_str_in_output": _flag,
    "stop_token_ids": _stop_token_ids,
    "ignore_eos": _flag,
    "bad_words": _strings,
    "allowed_token_ids": _allowed_token_ids,
    # Beyond these bounds a penalised logit would no longer be a float32.
    "repetition_penalty": _real(1e-9, 1e9),
    "presence_penalty": _real(-2, 2),
    "frequency_penalty": _real(-2, 2),
    "logit_bias": _logit_bias,
    "logprobs": _whole(-1, optional=True),
    "prompt_logprobs": _whole(-1, optional=True),
    "structured_outputs": _structured,
    "skip_special_tokens": _flag,
    "priority": _whole(-(2**63), 2**63 - 1),
    "cache_salt": _text,
    "cache_ttl": _real(0, above=True, optional=True),
    "cache_ttl_tokens": _whole(1, optional=True),
    "exact": _flag,
    "context_policy": _context_policy,
    "sinks": _whole(0, optional=True),
    "window": _whole(1, optional=True),
}
_DEFAULTS = {field.name: field.default for field in fields(SamplingParams)}


def _default(name: str) -> object:
    return _DEFAULTS[name]
