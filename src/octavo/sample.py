"""Choosing the next token: logits processing as in vLLM, counter-based random numbers, log-probabilities.

A row's result is a function of that row and its own `Choice`: not of the batch, the order or the number of
threads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch  # noqa: F401  before the native module, so that both use one OpenMP pool
from numpy.typing import NDArray

from octavo.errors import InvalidRequest, OctavoError
from octavo.grammar import Progress
from octavo.kernels import _native
from octavo.params import SamplingParams

Logits = NDArray[np.float32]
TopEntry = tuple[int, float, int]  # token id, log-probability, rank from 1

_ALL_MASKED = -1


@dataclass(eq=False)
class Choice:
    """What sampling needs to know about one sequence.

    `token_ids` is the sequence's own growing list, the prompt first; `index` says which of the `n` answers it
    is. `bad_words` are the token sequences that `bad_word_ids` makes of `params.bad_words`, `progress` is how far the
    answer has come in `params.structured_outputs`.
    """

    params: SamplingParams
    token_ids: list[int]
    prompt_len: int
    seed: int
    index: int = 0
    bad_words: Sequence[tuple[int, ...]] = ()
    progress: Progress | None = None
    _counts: Counter[int] = field(default_factory=Counter, init=False, repr=False)
    _counted: int = field(default=0, init=False, repr=False)
    _seen: NDArray[np.bool_] | None = field(default=None, init=False, repr=False)
    _seen_until: int = field(default=0, init=False, repr=False)

    @property
    def new_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def answer(self) -> list[int]:
        """The generated tokens (a copy)."""
        return self.token_ids[self.prompt_len :]

    @property
    def complete(self) -> bool:
        """Whether the answer has the form it was asked to have, and nothing may follow."""
        return self.progress is not None and self.progress.complete(self.answer)

    @property
    def position(self) -> int:
        """Position of the token to be sampled."""
        return len(self.token_ids)

    @cached_property
    def allowed(self) -> NDArray[np.intp] | None:
        """`params.allowed_token_ids` as an index."""
        ids = self.params.allowed_token_ids
        return None if ids is None else np.array(ids, np.intp)

    def seen(self, vocab_size: int) -> NDArray[np.intp]:
        """The tokens that occur in prompt or answer; only what came since the last call is looked at."""
        if self._seen is None:
            self._seen = np.zeros(vocab_size, np.bool_)
        self._seen[self.token_ids[self._seen_until :]] = True
        self._seen_until = len(self.token_ids)
        return np.flatnonzero(self._seen)

    def output_counts(self) -> Counter[int]:
        """How often each token occurs in the answer; only what came since the last call is counted."""
        self._counts.update(self.token_ids[self.prompt_len + self._counted :])
        self._counted = self.new_tokens
        return self._counts


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled token. `logprob` is that of the raw logits, before temperature, penalties and bias.

    `top` is empty unless `params.logprobs` is set; then it holds the sampled token first and the likeliest
    after it, each token once.
    """

    token_id: int
    logprob: float
    top: tuple[TopEntry, ...] = ()


class Sampler:
    """Samples one token per row. `eos_token_ids` are masked with the stop tokens until `min_tokens`."""

    def __init__(self, eos_token_ids: Collection[int] = ()) -> None:
        self._eos_token_ids = tuple(eos_token_ids)

    def sample(self, logits: Logits, choices: Sequence[Choice]) -> list[Sampled | OctavoError]:
        """The next token of `choices[i]` from row i of `logits` [S, V], which is not changed.

        Where a row leaves no token to choose, its place holds an `InvalidRequest`; where it is not finite, an
        `OctavoError`: the other rows are not concerned.
        """
        tokens = self._draw(logits, choices)
        sound = [i for i, token in enumerate(tokens) if token >= 0]
        described = _describe(logits, sound, tokens[sound], [choices[i].params.logprobs for i in sound])
        results: list[Sampled | OctavoError] = [
            _broken(int(token), choice) for token, choice in zip(tokens, choices, strict=True)
        ]
        for i, entries in zip(sound, described, strict=True):
            token_id, logprob, _ = entries[0]
            asked = choices[i].params.logprobs is not None
            results[i] = Sampled(token_id, logprob, entries if asked else ())
        return results

    def _draw(self, logits: Logits, choices: Sequence[Choice]) -> NDArray[np.int32]:
        changed = [i for i, choice in enumerate(choices) if self._changes_logits(choice)]
        plain = sorted(set(range(len(choices))) - set(changed))
        tokens = np.empty(len(choices), np.int32)
        tokens[plain] = _draw_rows(logits, plain, [choices[i] for i in plain])
        if changed:
            processed = logits[changed]
            for row, i in zip(processed, changed, strict=True):
                self._process(row, choices[i])
            tokens[changed] = _draw_rows(processed, range(len(changed)), [choices[i] for i in changed])
        return tokens

    def _end_is_masked(self, choice: Choice) -> bool:
        return choice.new_tokens < choice.params.min_tokens

    def _changes_logits(self, choice: Choice) -> bool:
        params = choice.params
        return (
            params.allowed_token_ids is not None
            or choice.progress is not None
            or bool(choice.bad_words)
            or self._end_is_masked(choice)
            or bool(params.logit_bias)
            or params.repetition_penalty != 1
            or params.presence_penalty != 0
            or params.frequency_penalty != 0
        )

    def _process(self, row: Logits, choice: Choice) -> None:
        """Masks, bias and penalties, in vLLM's order, on one row [V] in place."""
        params = choice.params
        if choice.progress is not None:
            row[~choice.progress.allowed(choice.answer)] = -np.inf
            if params.ignore_eos:  # what follows is still part of the form, as long as anything can
                row[list(self._eos_token_ids)] = -np.inf
        if choice.allowed is not None:
            kept = row[choice.allowed]
            row.fill(-np.inf)
            row[choice.allowed] = kept
        for word in choice.bad_words:
            if _ends_with(choice, word[:-1]):
                row[word[-1]] = -np.inf
        if self._end_is_masked(choice):
            row[[*self._eos_token_ids, *params.stop_token_ids]] = -np.inf
        if params.logit_bias:
            row[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), np.float32)
        _penalise(row, choice)


def _ends_with(choice: Choice, tokens: Sequence[int]) -> bool:
    """Whether the answer so far ends with `tokens`."""
    begin = len(choice.token_ids) - len(tokens)
    return begin >= choice.prompt_len and choice.token_ids[begin:] == list(tokens)


def _penalise(row: Logits, choice: Choice) -> None:
    params = choice.params
    if params.repetition_penalty != 1:
        seen = choice.seen(len(row))
        penalty = np.float32(params.repetition_penalty)
        values = row[seen]
        row[seen] = np.where(values > 0, values / penalty, values * penalty)
    if params.presence_penalty != 0 or params.frequency_penalty != 0:
        counts = choice.output_counts()
        occurrences = np.array(list(counts.values()), np.float32)
        penalty_by_token = np.float32(params.frequency_penalty) * occurrences + np.float32(
            params.presence_penalty
        )
        row[list(counts)] -= penalty_by_token


def _draw_rows(logits: Logits, rows: Sequence[int], choices: Sequence[Choice]) -> NDArray[np.int32]:
    draws = np.empty((len(rows), 5), np.float64)
    for draw, choice in zip(draws, choices, strict=True):
        params = choice.params
        uniform = 0.0 if params.greedy else _native.uniform(choice.seed, choice.index, choice.position)
        draw[:] = params.temperature, params.top_k, params.top_p, params.min_p, uniform
    tokens = np.empty(len(rows), np.int32)
    _native.sample_rows(logits, np.array(rows, np.int32), draws, tokens)
    return tokens


def _broken(code: int, choice: Choice) -> OctavoError:
    if choice.progress is not None and choice.progress.error is not None:
        return choice.progress.error
    if code == _ALL_MASKED:
        fields = ["allowed_token_ids", "bad_words", "logit_bias", "min_tokens"]
        if choice.progress is not None:
            fields.insert(0, "structured_outputs")
        return InvalidRequest(
            f"{', '.join(fields[:-1])} and {fields[-1]} together leave no token to choose; "
            "allow at least one more token",
            param=fields[0],
        )
    return OctavoError("the model's logits hold a NaN or +inf for this request")


def _describe(
    logits: Logits, rows: Sequence[int], tokens: NDArray[np.int32], asked: Sequence[int | None]
) -> list[tuple[TopEntry, ...]]:
    """Per row the entry of its token, then the `asked` likeliest (-1: all), each token once."""
    vocab_size = logits.shape[1]
    widths = [vocab_size if k == -1 else k or 0 for k in asked]
    described: list[tuple[TopEntry, ...]] = [()] * len(rows)
    # Grouped by width, so that one request for the whole vocabulary costs its neighbours nothing.
    for k in set(widths):
        members = [i for i, width in enumerate(widths) if width == k]
        own = np.ascontiguousarray(tokens[members])
        logprob, rank = np.empty(len(members)), np.empty(len(members), np.int32)
        top_ids, top_logprob = np.empty((len(members), k), np.int32), np.empty((len(members), k))
        where = np.array([rows[i] for i in members], np.int32)
        _native.describe_rows(logits, where, own, logprob, rank, top_ids, top_logprob)
        firsts = zip(own.tolist(), logprob.tolist(), rank.tolist(), strict=True)
        for i, first, ids, values in zip(
            members, firsts, top_ids.tolist(), top_logprob.tolist(), strict=True
        ):
            ranked = zip(ids, values, range(1, k + 1), strict=True)
            described[i] = (first, *(entry for entry in ranked if entry[0] != first[0]))
    return described


def prompt_logprobs(logits: Logits, next_ids: Sequence[int], k: int) -> list[tuple[TopEntry, ...]]:
    """Log-probs of given tokens: row i of `logits` [P, V] predicts `next_ids[i]`.

    Per row the entry of that token first, then the `k` likeliest, each token once; -1 is all of them.
    """
    return _describe(logits, range(len(next_ids)), np.array(next_ids, np.int32), [k] * len(next_ids))


def bad_word_ids(
    bad_words: Sequence[str], encode: Callable[[str], Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """The token sequences that must not be completed. `encode` adds no special tokens.

    As in vLLM each word is taken as it begins a text and, where that has as many tokens and another first
    one, as it follows a space. A word that makes no token cannot be completed.
    """
    sequences: list[tuple[int, ...]] = []
    for word in bad_words:
        plain = tuple(encode(word.lstrip()))
        spaced = tuple(encode(" " + word.lstrip()))
        if plain:
            sequences.append(plain)
        if plain and len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(spaced)
    return tuple(sequences)
