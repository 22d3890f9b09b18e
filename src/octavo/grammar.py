"""Answers of a form: which tokens may come next, by llguidance.

What may come next is a function of the answer's tokens alone, so it survives whatever happens to blocks and batches:
a `Progress` reads the tokens that were appended since it last looked.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.errors import InvalidRequest
from octavo.guard import Guard, limits
from octavo.structured import StructuredOutputs

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

    from octavo.model.tokenizer import Tokenizer

_PARAM = "structured_outputs"
_KEPT = 64  # compiled forms; clients send the same ones again
# Between two parts of JSON: models that may write white space without end do.
_JSON: JsonCompileOptions = {"whitespace_pattern": r" |\n[ \t]{0,32}"}


class Grammars:
    """Compiles forms for one model. Used by one thread at a time.

    `eos_token_ids` end an answer where its form is complete.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(eos_token_ids)
        self._kept: OrderedDict[str, Grammar] = OrderedDict()

    @cached_property
    def _guard(self) -> Guard:
        return Guard([] if self._tokenizer.hf is None else self._tokenizer.hf.all_special_tokens)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        """Made when first needed: it reads the whole vocabulary."""
        from llguidance.hf import from_tokenizer

        if self._tokenizer.hf is None:
            raise _lacks("a tokenizer")
        known = self._tokenizer.vocab_size
        eos = [token for token in self._eos if token < known]
        if not eos:
            raise _lacks("an end token")
        try:
            return from_tokenizer(self._tokenizer.hf, n_vocab=max(self._vocab_size, known), eos_token=eos)
        except Exception as error:  # of tokenizers there are many kinds
            raise InvalidRequest(
                f"{_PARAM} does not work with this model's tokenizer: {error}", param=_PARAM
            ) from error

    def compile(self, wanted: StructuredOutputs) -> Grammar:
        """Raises `InvalidRequest` where the form is none, or too complex, or the model has no tokenizer."""
        from llguidance import LLMatcher

        source = _source(wanted)
        if source not in self._kept:
            tokens = self._tokens
            if not self._guard.survives(source):
                raise InvalidRequest(
                    f"{_PARAM} takes too much time or memory to compile; make it smaller", param=_PARAM
                )
            matcher = LLMatcher(tokens, source, log_level=0, limits=limits())
            if not matcher.is_error():
                matcher.compute_bitmask()  # the first is the slowest, and every answer needs it
            if matcher.is_error():
                raise InvalidRequest(f"{_PARAM} cannot be compiled: {_reason(matcher)}", param=_PARAM)
            self._kept[source] = Grammar(matcher, self._vocab_size, tokens.vocab_size)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(source)
        return self._kept[source]


class Grammar:
    """A compiled form."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, known: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = -(-known // 32)

    def begin(self) -> Progress:
        """The state of one answer that has no tokens yet."""
        return Progress(self._matcher.deep_copy(), self._vocab_size, self._words)


class Progress:
    """How far one answer has come. `error` is set once it cannot be followed any more (too complex)."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, words: int) -> None:
        self.error: InvalidRequest | None = None
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._words = words
        self._read = 0

    def allowed(self, answer: Sequence[int]) -> NDArray[np.bool_]:
        """Which tokens [V] may follow `answer`, the end tokens among them where it may end; none after an error."""
        self._follow(answer)
        bits = np.zeros(self._words, np.int32)
        if self.error is None:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            self._note_error()
        if self.error is not None:
            bits[:] = 0
        return np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little").view(np.bool_)

    def complete(self, answer: Sequence[int]) -> bool:
        """Whether nothing may follow `answer`."""
        self._follow(answer)
        return self.error is None and self._matcher.is_stopped()

    def _follow(self, answer: Sequence[int]) -> None:
        new = answer[self._read :]
        self._read = len(answer)
        if new and self.error is None:
            self._matcher.consume_tokens(list(new))
            self._note_error()

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self.error = InvalidRequest(
                f"{_PARAM} cannot be followed any further: {_reason(self._matcher)}", param=_PARAM
            )


def _lacks(what: str) -> InvalidRequest:
    return InvalidRequest(
        f"{_PARAM} needs {what}, which this model does not have; leave it out", param=_PARAM
    )


def _source(wanted: StructuredOutputs) -> str:
    from llguidance import LLMatcher

    if wanted.json_schema is not None:
        return LLMatcher.grammar_from_json_schema(str(wanted.json_schema), defaults=_JSON)
    if wanted.json_object:
        return LLMatcher.grammar_from_json_schema('{"type": "object"}', defaults=_JSON)
    if wanted.grammar is not None:
        return LLMatcher.grammar_from_lark(wanted.grammar)
    if wanted.regex is not None:
        return LLMatcher.grammar_from_regex(wanted.regex)
    assert wanted.choice is not None
    return LLMatcher.grammar_from_regex("|".join(map(_literal, wanted.choice)))


def _literal(text: str) -> str:
    """A regular expression that matches `text` only."""
    return re.sub(r"[^a-zA-Z0-9]", lambda found: f"\\x{{{ord(found[0]):X}}}", text)


def _reason(matcher: LLMatcher) -> str:
    """The first lines of the library's message."""
    lines = [line.strip() for line in matcher.get_error().splitlines() if line.strip()]
    text = " ".join(lines) or "unknown error"
    return text if len(text) <= 400 else text[:397] + "..."
