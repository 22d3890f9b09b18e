"""The offline API. Names follow vLLM's `LLM`."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from octavo.cache.events import Event
from octavo.config import EngineConfig
from octavo.door import BYTES, Prompt
from octavo.engine import Engine, EngineStats
from octavo.errors import InvalidRequest, OctavoError, show
from octavo.interrupt import interruptible
from octavo.live import LiveRequest
from octavo.outputs import RequestOutput
from octavo.params import SamplingParams

Messages = Sequence[Mapping[str, Any]]


class LLM:
    """A model, loaded and ready.

    Options are those of `EngineConfig`; sizes may be strings (`kv_cache_memory="256MiB"`). Raises `ConfigError`,
    `ModelNotFound` or `ModelRefused`. A context manager; calls from several threads take turns.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self._engine: Engine | None = Engine(EngineConfig.create(model, **options))
        self._turns = self._engine.turns()
        self._turn = threading.Lock()
        self._requests = 0

    @property
    def engine(self) -> Engine:
        """The engine underneath. Raises `OctavoError` after `close`."""
        if self._engine is None:
            raise OctavoError("this LLM is closed; make a new one")
        return self._engine

    @property
    def model_path(self) -> Path:
        """Directory of the model in use, converted where it was a GGUF file."""
        return self.engine.loaded.path

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer `prompts` (strings or lists of token ids), in order.

        One `SamplingParams` for all or one each. Every prompt is checked before any is computed: raises
        `InvalidRequest` naming field and value. If a request fails while it runs, the others finish first. `use_tqdm`
        shows progress (default: on a terminal). Ctrl-C frees all blocks.
        """
        batch = _as_prompts(prompts)
        each = _one_each(SamplingParams() if params is None else params, len(batch))
        with self._turn:
            engine = self.engine
            lives = []
            for prompt, own in zip(batch, each, strict=True):
                lives.append(engine.prepare(str(self._requests), prompt, own))
                self._requests += 1
            return self._run(engine, lives, sys.stderr.isatty() if use_tqdm is None else use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, with the model's chat template.

        Without `params` an answer may take the rest of the context. Answers that come back in a later turn keep the
        token ids they were generated with, so that their blocks are found in the cache; with `exact` they do not.
        """
        given: object = messages
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise InvalidRequest(
                f"messages is a {type(messages).__name__}; give a list of messages, or a list of conversations",
                param="messages",
            )
        many = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if many else [messages]
        texts = [self.engine.tokenizer.render_chat(conversation) for conversation in conversations]
        each = _one_each(SamplingParams(max_tokens=None) if params is None else params, len(texts))
        prompts = [
            self._turns.encode(text, own.cache_salt, own.exact) for text, own in zip(texts, each, strict=True)
        ]
        outputs = self.generate(prompts, each, use_tqdm=use_tqdm)
        for text, own, output in zip(texts, each, outputs, strict=True):
            for answer in output.outputs:
                self._turns.remember(text, output.prompt_token_ids + answer.token_ids, own.cache_salt)
        return outputs

    def _run(self, engine: Engine, lives: list[LiveRequest], progress: bool) -> list[RequestOutput]:
        try:
            for live in lives:
                engine.submit(live)
            with Progress(len(lives), progress) as bar:
                while engine.has_work:
                    bar.advance(engine.step())
        except BaseException:
            with interruptible():
                for live in lives:
                    engine.abort(live.request.request_id)
            raise
        for live in lives:
            if live.error is not None:
                raise live.error
        return [live.output() for live in lives]

    def stats(self) -> EngineStats:
        """The account of the cache."""
        return self.engine.stats()

    def events(self) -> list[Event]:
        """What happened to blocks and sequences since the last call."""
        return self.engine.events()

    def check(self) -> None:
        """Raises `BooksDoNotBalance` if the conservation law of the cache does not hold."""
        self.engine.check()

    def close(self) -> None:
        """Give weights and arena back. Idempotent."""
        self._engine = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Progress:
    """A bar on stderr that counts finished requests; nothing where `shown` is false."""

    def __init__(self, total: int, shown: bool) -> None:
        self._bar = None
        self._tokens = 0
        if shown:
            from tqdm import tqdm

            self._bar = tqdm(total=total, desc="Requests", unit="req", dynamic_ncols=True)

    def advance(self, touched: Sequence[LiveRequest]) -> None:
        """A step has `touched` these requests."""
        done = [live for live in touched if live.finished]
        if self._bar is not None and done:
            self._tokens += sum(live.request.receipt.completion_tokens for live in done)
            rate = self._tokens / max(self._bar.format_dict["elapsed"], 1e-9)
            self._bar.set_postfix_str(f"{rate:.1f} tokens/s", refresh=False)
            self._bar.update(len(done))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, BYTES) or not isinstance(prompts, Sequence):
        raise InvalidRequest(
            f"prompts is a {type(prompts).__name__}; give a string, a list of token ids, or a list of these",
            param="prompts",
        )
    if prompts and all(isinstance(p, Integral) for p in prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or len(params) != count:
        raise InvalidRequest(
            f"params must be one SamplingParams or a list of {count}, one per prompt; got {show(params)}",
            param="params",
        )
    return list(params)
