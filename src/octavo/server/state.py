"""What the routes share: the engine, how it is served, and facts of the model that never change while it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from fastapi import Request

from octavo import __version__
from octavo.aio import AsyncEngine
from octavo.engine import Engine
from octavo.errors import ModelNotFound, show
from octavo.live import LiveRequest
from octavo.model.tokenizer import Tokenizer
from octavo.server.config import ServerConfig
from octavo.server.metrics import Latencies, Metrics
from octavo.server.requestlog import RequestLog
from octavo.server.witness import Witness
from octavo.turns import Turns
from octavo.watch import Observer


@dataclass(frozen=True)
class ModelFacts:
    """The loaded model and its cache. `max_model_len` is the most tokens of a sequence, `cache_tokens` what the whole
    cache holds, `dtype` that of the arithmetic."""

    tokenizer: Tokenizer
    turns: Turns
    max_model_len: int
    vocab_size: int
    digest: str
    dtype: str
    kv_cache_dtype: str
    block_size: int
    cache_tokens: int
    bytes_total: int
    exact: bool

    @classmethod
    def of(cls, engine: Engine) -> ModelFacts:
        """Those of `engine`, which must be asked in its own thread."""
        layout, total = engine.layout, engine.stats().bytes_total
        return cls(
            tokenizer=engine.tokenizer,
            turns=engine.turns(),
            max_model_len=engine.scheduler.limit,
            vocab_size=engine.loaded.spec.vocab_size,
            digest=engine.loaded.digest,
            dtype=str(engine.loaded.torch_dtype).removeprefix("torch."),
            kv_cache_dtype=layout.format,
            block_size=engine.config.block_size,
            cache_tokens=engine.scheduler.limits.arena,
            bytes_total=total,
            exact=engine.runner.exact,
        )


@dataclass
class ServerState:
    """One per app, at `request.app.state.octavo`. Its construction asks the engine and blocks until it answers.

    `draining` is set once no new requests are wanted.
    """

    engine: AsyncEngine
    config: ServerConfig
    facts: ModelFacts = field(init=False)
    metrics: Metrics = field(init=False)
    witness: Witness = field(init=False, default_factory=Witness)
    draining: bool = False
    started_at: float = field(init=False, default_factory=time.time)

    def __post_init__(self) -> None:
        self.facts = self.engine.ask(ModelFacts.of).result()
        info = {"version": __version__, "digest": self.facts.digest, "dtype": self.facts.dtype}
        self.metrics = Metrics(self.model_names[0], info)
        path = self.config.request_log
        self._request_log = None if path is None else RequestLog(path, self.facts.block_size)
        self.engine.observe(_Tap(self.metrics.latencies, self.witness, self._request_log))

    def drain(self) -> None:
        """Let running requests finish; `/health` says that no others are wanted."""
        self.draining = True

    def abort_all(self) -> None:
        """End every request; their clients are told."""

        def abort(names: Future[list[str]]) -> None:
            for name in names.result():
                self.engine.abort(name)

        self.engine.ask(lambda engine: list(engine.scheduler.requests)).add_done_callback(abort)

    def close(self) -> None:
        """Finish the request log. Idempotent."""
        self.engine.observe(Observer())
        if self._request_log is not None:
            self._request_log.close()

    @property
    def turns(self) -> Turns:
        """Conversations and the token ids of their answers; the owner is (tenant, cache_salt)."""
        return self.facts.turns

    @property
    def tokenizer(self) -> Tokenizer:
        return self.facts.tokenizer

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may call the model, the name it gives itself first."""
        return self.config.served_model_names or (self.engine.config.model,)

    def check_model(self, name: str | None) -> str:
        """The name of the model that answers a request for `name`. Raises `ModelNotFound`; None is any."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(map(show, self.model_names))
            raise ModelNotFound(
                f"the model {show(name)} does not exist; this server has {known}", param="model"
            )
        return name


class _Tap(Observer):
    """One observer for all who want to know."""

    def __init__(self, latencies: Latencies, witness: Witness, request_log: RequestLog | None) -> None:
        self._observers = (latencies, witness)
        self._request_log = request_log

    def first_token(self, live: LiveRequest) -> None:
        for observer in self._observers:
            observer.first_token(live)

    def token_gaps(self, seconds: Sequence[float]) -> None:
        for observer in self._observers:
            observer.token_gaps(seconds)

    def ended(self, live: LiveRequest, reason: str) -> None:
        for observer in self._observers:
            observer.ended(live, reason)
        if self._request_log is not None:
            self._request_log.add(live, reason)


def state_of(request: Request) -> ServerState:
    """The state of the app that serves `request`; usable as a dependency."""
    state: ServerState = request.app.state.octavo
    return state
