"""The engine: one model, one cache, one scheduler, and the loop body that joins them.

    prepare ─ submit ─▶ Scheduler.plan ─ Runner.forward ─ Sampler ─ Scheduler.commit ─ Answer.push ─▶ outputs
                            ▲                                                             │
                            └──────────────────────── step ───────────────────────────────┘

`Engine` belongs to one thread at a time; `LLM` and `AsyncEngine` are its faces.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np

from octavo.answer import Answer, logprob_dict
from octavo.cache.events import Event
from octavo.cache.manager import CacheManager, CacheStats
from octavo.config import EngineConfig, Environment, format_bytes
from octavo.detokenize import find_fallback_byte
from octavo.door import Door, Prompt
from octavo.errors import OctavoError
from octavo.evaluate.probe import QualityProbe, check_quality
from octavo.grammar import Grammar, Grammars
from octavo.interrupt import uninterrupted
from octavo.kernels import native
from octavo.live import LiveRequest
from octavo.memory import ArenaMemory
from octavo.model import attention
from octavo.model.batch import Piece
from octavo.model.load import LoadedModel, load_model
from octavo.model.pull import Notice
from octavo.model.runner import Runner
from octavo.params import SamplingParams
from octavo.sample import Choice, Logits, Sampled, Sampler, prompt_logprobs
from octavo.schedule.request import Status
from octavo.schedule.scheduler import Chunk, Scheduler, StepPlan
from octavo.sizing import cache_budget, cache_layout, context_limit
from octavo.turns import Turns
from octavo.watch import EngineTotals, Observer

logger = logging.getLogger("octavo")


@dataclass(frozen=True)
class EngineStats(CacheStats):
    """The account of the cache, and the sequences that run and wait."""

    running: int
    waiting: int


class Engine:
    """Loads `config.model` and serves requests. Raises `ConfigError`, `ModelNotFound` or `ModelRefused`.

    `notice` receives a line per slow phase of loading. `poison` fills freed and new blocks with NaN.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        notice: Notice | None = None,
        fuse: bool = True,
        poison: bool | None = None,
    ) -> None:
        self.config = config
        self.num_threads = config.num_threads or native.DEFAULT_THREADS
        native.set_num_threads(self.num_threads)
        attention.register()
        self.loaded: LoadedModel = load_model(
            config.model,
            dtype=config.dtype,
            attn_implementation=attention.NAME,
            chat_template=config.chat_template,
            progress=notice,
        )
        self.tokenizer = self.loaded.tokenizer
        spec = self.loaded.spec
        self.layout = cache_layout(config, spec, self.loaded.torch_dtype)
        max_model_len = context_limit(config, spec)
        bound = max_model_len
        if config.kv_cache_memory is not None:
            bound = min(bound, self.layout.longest_sequence(config.kv_cache_memory))
        self.runner = Runner(
            self.loaded, self.layout, max_rows=config.max_num_batched_tokens, max_len=bound, fuse=fuse
        )
        probe = QualityProbe(self.loaded, self.runner, max_rows=config.max_num_batched_tokens, longest=bound)
        self.quality = check_quality(config, self.layout, probe)
        budget = cache_budget(config, self.layout)
        self._memory = ArenaMemory(budget, self.layout)
        self.cache = CacheManager(
            self.layout,
            budget,
            enable_prefix_caching=config.enable_prefix_caching,
            policy=config.cache_policy,
            max_pinned=budget // 4 if config.max_pinned is None else config.max_pinned,
            memory=self._memory,
            poison=Environment.read().poison if poison is None else poison,
        )
        self.runner.attach(self._memory.address)
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_waiting=config.max_waiting,
        )
        if self.scheduler.limit < max_model_len:
            logger.warning(
                "max_model_len=%d is more than the KV cache of %s holds; the real limit is %d tokens",
                max_model_len,
                format_bytes(budget),
                self.scheduler.limit,
            )
        self._eos = frozenset(i for i in self.tokenizer.eos_token_ids if i < self.loaded.spec.vocab_size)
        grammars = Grammars(self.tokenizer, self.loaded.spec.vocab_size, self._eos)
        self.door = Door(config, self.loaded, self.layout, self.runner, self.scheduler, grammars)
        self._sampler = Sampler(sorted(self._eos))
        backend = None if self.tokenizer.hf is None else self.tokenizer.hf.backend_tokenizer
        self._decoder = None if backend is None else self.tokenizer
        self._fallback_byte = None if backend is None else find_fallback_byte(backend)
        self._live: dict[str, LiveRequest] = {}
        self._observer = Observer()
        self.steps = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would compute anything."""
        return self.scheduler.has_work

    def prepare(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        *,
        tenant: str | None = None,
        label: str | None = None,
        grammar: Grammar | None = None,
    ) -> LiveRequest:
        """Check a request against model and cache; nothing is queued yet.

        It finds blocks of its own `tenant` only (None: the engine's). `label` is shown to those who look on.
        `grammar` is what `door.compile` made of its form; without it the form is compiled here.
        Raises `InvalidRequest` (also `ContextLengthExceeded`, `KVCacheTooSmall`) naming field and value.
        """
        return self.door.prepare(request_id, prompt, params, tenant, label, grammar)

    def submit(self, live: LiveRequest) -> None:
        """Queue a prepared request. Raises `Overloaded` if the queue is full."""
        with uninterrupted():
            self.scheduler.add(live.request)
            live.request.receipt.exact &= self.runner.exact
            self._live[live.request.request_id] = live

    def abort(self, request_id: str) -> LiveRequest | None:
        """End a request now; its blocks are free when this returns. None if there is no such request."""
        with uninterrupted():
            return self._stop(request_id, "abort")

    def _stop(self, request_id: str, reason: str) -> LiveRequest | None:
        live = self._live.get(request_id)
        if live is not None:
            for answer in live.answers:
                answer.abort()
            self.scheduler.abort(request_id, reason)
            self._end(live, reason)
        return live

    def _end(self, live: LiveRequest, reason: str) -> None:
        del self._live[live.request.request_id]
        live.ended = self.cache.clock()
        self._observer.ended(live, reason)

    def observe(self, observer: Observer) -> None:
        """Tell `observer` from now on, and nobody else."""
        self._observer = observer

    def step(self) -> list[LiveRequest]:
        """Compute one step. Returns the requests that have something new, finished ones for the last time.

        Ctrl-C waits for its end, so that the books are never half written.
        """
        with uninterrupted():
            return self._step()

    def _step(self) -> list[LiveRequest]:
        plan = self.scheduler.plan()
        if not plan.chunks:
            return []
        if self.num_threads > 1:
            native.check_pool()
        if native.num_threads() != self.num_threads:  # another engine of this process ran in between
            native.set_num_threads(self.num_threads)
        try:
            logits, rows = self._forward(plan)
            sampled = self._sample(plan, logits, rows)
        except BaseException:
            self.scheduler.drop()
            raise
        touched = self._fail(plan, sampled)
        tokens = [[s.token_id for s in choices if isinstance(s, Sampled)] for choices in sampled]
        self.scheduler.commit(plan, tokens)
        self.steps += 1
        return touched + self._deliver(plan, sampled)

    def _forward(self, plan: StepPlan) -> tuple[Logits, list[range]]:
        """Logits of all wanted rows; `rows[i]` are the logit rows of chunk i, the one to sample last."""
        pieces: list[Piece] = []
        wanted: list[int] = []
        rows: list[range] = []
        first = 0
        for chunk in plan.chunks:
            sequence, count = chunk.sequence, chunk.stop - chunk.start
            token_ids = sequence.token_ids[chunk.start : chunk.stop]
            pieces.append(Piece.of(sequence.lease, token_ids, chunk.start, self.layout))
            inside = self._wanted_rows(chunk)
            rows.append(range(len(wanted), len(wanted) + len(inside)))
            wanted += [first + r for r in inside]
            first += count
        return self.runner.forward(pieces, wanted).numpy(), rows

    def _wanted_rows(self, chunk: Chunk) -> range:
        count = chunk.stop - chunk.start
        live = self._live[chunk.sequence.request.request_id]
        if live.prompt_logprobs is not None and chunk.start < len(live.prompt_logprobs) - 1:
            return range(
                min(count, len(live.prompt_logprobs) - 1 - chunk.start) if not chunk.sample else count
            )
        return range(count - 1, count) if chunk.sample else range(0)

    def _sample(self, plan: StepPlan, logits: Logits, rows: list[range]) -> list[list[Sampled | OctavoError]]:
        """What every chunk sampled: nothing, one token, or one per choice where the prompt ends."""
        choices: list[Choice] = []
        sources: list[int] = []
        counts = []
        for chunk, own in zip(plan.chunks, rows, strict=True):
            live = self._live[chunk.sequence.request.request_id]
            if live.prompt_logprobs is not None and own:
                self._read_prompt_logprobs(live, chunk, logits[own.start : own.stop])
            wanted = self._choices(live, chunk) if chunk.sample else []
            choices += wanted
            sources += [own.stop - 1] * len(wanted)
            counts.append(len(wanted))
        if not choices:
            return [[] for _ in counts]
        whole = sources == list(range(len(logits)))
        drawn = self._sampler.sample(logits if whole else logits[sources], choices)
        ends = np.cumsum(counts)
        return [drawn[end - count : end] for end, count in zip(ends, counts, strict=True)]

    def _choices(self, live: LiveRequest, chunk: Chunk) -> list[Choice]:
        """The sampling state of a chunk's sequence; at the end of a prompt that of all its answers to be."""
        request, params = live.request, live.params
        prompt_len = len(request.prompt_token_ids)
        if len(chunk.sequence.token_ids) > prompt_len:
            return [live.answers[chunk.sequence.index].choice]
        assert request.seed is not None
        live.answers.clear()  # a step that failed may have got this far before
        for index in range(request.n):
            # Answer 0 reads the sequence's own list; the others get theirs when the sequence is forked.
            token_ids = chunk.sequence.token_ids if index == 0 else list(chunk.sequence.token_ids)
            progress = None if live.grammar is None else live.grammar.begin()
            choice = Choice(params, token_ids, prompt_len, request.seed, index, live.bad_words, progress)
            live.answers.append(self._answer(choice, self.scheduler.limit_of(request)))
        return [answer.choice for answer in live.answers]

    def _answer(self, choice: Choice, limit: int) -> Answer:
        return Answer(
            choice,
            limit=limit,
            eos_token_ids=self._eos,
            decoder=self._decoder,
            fallback_byte=self._fallback_byte,
            token_text=self.tokenizer.decoded_token if self._decoder is not None else str,
        )

    def _read_prompt_logprobs(self, live: LiveRequest, chunk: Chunk, logits: Logits) -> None:
        assert live.prompt_logprobs is not None
        assert live.params.prompt_logprobs is not None
        prompt = live.request.prompt_token_ids
        following = prompt[chunk.start + 1 : chunk.start + 1 + len(logits)]
        found = prompt_logprobs(logits[: len(following)], following, live.params.prompt_logprobs)
        text = self.tokenizer.decoded_token if self._decoder is not None else str
        for position, entries in enumerate(found, start=chunk.start + 1):
            live.prompt_logprobs[position] = logprob_dict(entries, text)

    def _fail(self, plan: StepPlan, sampled: list[list[Sampled | OctavoError]]) -> list[LiveRequest]:
        """End the requests whose logits left nothing to sample, all choices of each; others are not concerned."""
        errors: dict[str, OctavoError] = {}
        for chunk, choices in zip(plan.chunks, sampled, strict=True):
            for error in (s for s in choices if isinstance(s, OctavoError)):
                errors.setdefault(chunk.sequence.request.request_id, error)
        for chunk, choices in zip(plan.chunks, sampled, strict=True):
            if chunk.sequence.request.request_id in errors:
                choices.clear()
        failed = []
        for name, error in errors.items():
            live = self._live[name]
            live.error = error
            self._stop(name, "error")
            failed.append(live)
        return failed

    def _deliver(self, plan: StepPlan, sampled: list[list[Sampled | OctavoError]]) -> list[LiveRequest]:
        """Hand the sampled tokens to their answers and end those that are complete."""
        touched: dict[str, LiveRequest] = {}
        now, gaps = self.cache.clock(), []
        for chunk, choices in zip(plan.chunks, sampled, strict=True):
            request = chunk.sequence.request
            if not choices:
                continue
            live = self._live[request.request_id]
            touched[request.request_id] = live
            sequences = request.sequences if len(choices) > 1 else [chunk.sequence]
            for sequence, token in zip(sequences, choices, strict=True):
                assert isinstance(token, Sampled)
                answer = live.answers[sequence.index]
                answer.choice.token_ids = sequence.token_ids
                if answer.last_token is not None:
                    gaps.append(now - answer.last_token)
                answer.last_token = now
                reason = answer.push(token)
                if reason is not None:
                    self.scheduler.finish(sequence, reason)
        self._observer.token_gaps(gaps)
        for live in touched.values():
            live.last_token = now
            if live.first_token is None:
                live.first_token = now
                self._observer.first_token(live)
            if (why := live.request.finish_reason) is not None:
                self._end(live, why)
        return list(touched.values())

    def turns(self) -> Turns:
        """A memory of conversations for this model's tokenizer."""
        return Turns.of(self.tokenizer)

    def stats(self) -> EngineStats:
        """The account of the cache now."""
        running, waiting = len(self.scheduler.running), len(self.scheduler.waiting)
        return EngineStats(**vars(self.cache.stats()), running=running, waiting=waiting)

    def totals(self) -> EngineTotals:
        """What has been done since the engine began."""
        totals, refused = self.scheduler.totals, self.door.refused
        requests = self.scheduler.requests.values()
        running = sum(any(s.status is Status.RUNNING for s in r.sequences) for r in requests)
        return EngineTotals(
            started=totals.started + refused,
            finished=dict(totals.finished),
            cancelled=totals.cancelled,
            rejected=totals.rejected + refused,
            running=running,
            waiting=len(requests) - running,
            prompt_tokens=totals.prompt_tokens,
            generated_tokens=totals.completion_tokens,
            queried_tokens=totals.queried_tokens,
            reused_tokens=totals.reused_tokens,
            computed_tokens=totals.computed_tokens,
            recomputed_tokens=totals.recomputed_tokens,
            dropped_positions=totals.dropped_positions,
            written_blocks=totals.written_blocks,
            reclaimed_blocks=dict(self.cache.pool.reclaimed),
            folded_blocks=dict(self.cache.pool.folding.folded),
            preemptions=totals.preemptions,
            steps=self.steps,
        )

    def reset_prefix_cache(self) -> int:
        """Forget every published block, while requests run too: they keep theirs. Returns how many were forgotten."""
        with uninterrupted():
            return self.cache.reset()

    def check(self) -> None:
        """Raises `BooksDoNotBalance` if the conservation law of the cache does not hold."""
        self.cache.check()

    def events(self) -> list[Event]:
        """What happened to blocks and sequences since the last call."""
        return self.cache.events()
