"""The door: what a request must be before it may wait. Needs no engine thread."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from threading import Lock

from octavo.cache.dropping import DropRule
from octavo.cache.hashing import Namespace
from octavo.cache.layout import CacheLayout
from octavo.config import EngineConfig
from octavo.errors import InvalidRequest, OctavoError, show
from octavo.grammar import Grammar, Grammars
from octavo.live import LiveRequest
from octavo.model.load import LoadedModel
from octavo.model.runner import Runner
from octavo.params import SamplingParams
from octavo.sample import bad_word_ids
from octavo.schedule.request import Request
from octavo.schedule.scheduler import Scheduler
from octavo.structured import StructuredOutputs

Prompt = str | Sequence[int]
BYTES = (bytes, bytearray, memoryview)  # text that was not decoded, although sequences of ints
_MAX_POSITIONS = 1 << 24  # the angles of a rotation are computed from float32 positions


class Door:
    """Checks and encodes requests, one at a time, and beside that compiles a form. `refused` counts those that it did
    not let in."""

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        layout: CacheLayout,
        runner: Runner,
        scheduler: Scheduler,
        grammars: Grammars,
    ) -> None:
        self.refused = 0
        self._counting = Lock()
        self._config = config
        self._tokenizer = loaded.tokenizer
        self._vocab_size = loaded.spec.vocab_size
        self._layout = layout
        self._runner = runner
        self._scheduler = scheduler
        self._grammars = grammars
        # K and V follow from the weights and from the type they are computed in.
        self._model_key = f"{loaded.digest}:{layout.name}"
        self._arrivals = 0

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        tenant: str | None,
        label: str | None,
        grammar: Grammar | None,
    ) -> LiveRequest:
        """See `Engine.prepare`."""
        arrived = time.monotonic()
        with self._refusing():
            self._check(params, tenant, label)
            token_ids = self._encode(request_id, prompt)
            request = self._request(request_id, token_ids, params, tenant, label)
            live = LiveRequest(request, prompt if isinstance(prompt, str) else None, params, arrived)
            words = bad_word_ids(params.bad_words, lambda text: self._tokenizer.encode(text, False))
            live.bad_words = tuple(
                word for word in words if max(word) < self._vocab_size
            )  # others cannot come
            if params.structured_outputs is not None:
                live.grammar = grammar or self._grammars.compile(params.structured_outputs)
            return live

    def compile(self, form: StructuredOutputs) -> Grammar:
        """The grammar of `form`, which may take seconds: in a thread of its own it delays nobody else at the door.

        Raises `InvalidRequest`, which counts as a request refused.
        """
        with self._refusing():
            return self._grammars.compile(form)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OctavoError:
            with self._counting:
                self.refused += 1
            raise

    def check_text(self, text: str, request_id: str | None = None) -> None:
        """Raises `ContextLengthExceeded` or `KVCacheTooSmall` if `text` is longer than its tokens could be.

        Much faster than to encode it; a text that passes may still be too long.
        """
        self._scheduler.limits.check(self._tokenizer.fewest_tokens(text), request_id, at_least=True)

    def _check(self, params: SamplingParams, tenant: str | None, label: str | None) -> None:
        if not isinstance(params, SamplingParams):
            raise InvalidRequest(f"params={params!r} is not a SamplingParams", param="params")
        for field, value in (("tenant", tenant), ("label", label)):
            if not isinstance(value, str | None):
                raise InvalidRequest(f"{field}={show(value)} is not a string", param=field)
        if params.exact and not self._runner.exact:
            raise InvalidRequest(
                "exact=True cannot be promised for this model on this machine: the start-up probe found rows that "
                "depend on their company; leave it out",
                param="exact",
            )
        params.check_vocabulary(self._vocab_size)
        for field in ("stop", "bad_words"):
            if getattr(params, field) and self._tokenizer.hf is None:
                raise InvalidRequest(
                    f"{field} needs a tokenizer, which this model does not have; leave it out", param=field
                )

    def _request(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        tenant: str | None,
        label: str | None,
    ) -> Request:
        _check_pin(params.cache_ttl_tokens, len(token_ids))
        arrival = self._arrivals
        self._arrivals += 1
        request = Request(
            request_id=request_id,
            arrival=arrival,
            prompt_token_ids=token_ids,
            n=params.n,
            priority=params.priority,
            namespace=Namespace(
                self._model_key, self._config.tenant if tenant is None else tenant, params.cache_salt
            ),
            cache_ttl=params.cache_ttl,
            cache_ttl_tokens=params.cache_ttl_tokens,
            exact=params.exact,
            reuse=params.prompt_logprobs is None,
            drops=self._drop_rule(params, len(token_ids)),
            seed=drawn_seed(self._config.seed, arrival) if params.seed is None else params.seed,
            params=params,
            label=label,
        )
        self._scheduler.check(request)
        return request

    def _drop_rule(self, params: SamplingParams, prompt_len: int) -> DropRule | None:
        if params.context_policy is None:
            return None
        assert params.sinks is not None
        assert params.window is not None
        assert params.max_tokens is not None
        reason = None
        if not self._runner.fused:
            reason = "runs through transformers, whose attention rotates no query a second time"
        elif any(group.window is not None for group in self._layout.groups):
            reason = "has layers with a sliding window of their own"
        if reason is not None:
            raise InvalidRequest(
                f"context_policy={params.context_policy!r} does not work with this model, which {reason}; leave it out",
                param="context_policy",
            )
        if prompt_len + params.max_tokens > _MAX_POSITIONS:
            raise InvalidRequest(
                f"max_tokens={params.max_tokens} after a prompt of {prompt_len} is more than the {_MAX_POSITIONS} "
                f"positions that can be told apart; max_tokens={_MAX_POSITIONS - prompt_len} works",
                param="max_tokens",
            )
        return DropRule(params.sinks, params.window, self._config.block_size)

    def _encode(self, request_id: str, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            self.check_text(prompt, request_id)
            token_ids = self._tokenizer.encode(prompt)
            if token_ids and max(token_ids) >= self._vocab_size:
                raise InvalidRequest(
                    f"the tokenizer makes token id {max(token_ids)} of this text, and the model knows ids from 0 to "
                    f"{self._vocab_size - 1}; use the tokenizer that the model was made with",
                    param="prompt",
                )
            return token_ids
        if isinstance(prompt, BYTES) or not isinstance(prompt, Sequence):
            raise InvalidRequest(
                f"prompt is a {type(prompt).__name__}; give a string or a list of token ids", param="prompt"
            )
        self._scheduler.limits.check(len(prompt), request_id)  # before millions of ids are looked at
        token_ids = []
        for at, token in enumerate(prompt):
            if (
                isinstance(token, bool)
                or not isinstance(token, Integral)
                or not 0 <= int(token) < self._vocab_size
            ):
                raise InvalidRequest(
                    f"prompt[{at}]={show(token)} is not a token id from 0 to {self._vocab_size - 1}",
                    param="prompt",
                )
            token_ids.append(int(token))
        return token_ids


def _check_pin(tokens: int | None, prompt_len: int) -> None:
    if tokens is not None and tokens > prompt_len:
        raise InvalidRequest(
            f"cache_ttl_tokens={tokens} is more than the prompt has; cache_ttl_tokens={prompt_len} works",
            param="cache_ttl_tokens",
        )


def drawn_seed(engine_seed: int, arrival: int) -> int:
    """The seed of a request that named none, from the engine's seed and its arrival number."""
    digest = hashlib.sha256(engine_seed.to_bytes(8, "little") + arrival.to_bytes(8, "little")).digest()
    return int.from_bytes(digest[:8], "little") >> 1
