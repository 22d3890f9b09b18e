"""The scheduler: each step, which tokens of which sequences are computed.

It schedules tokens, not phases. A running sequence wants its uncomputed tokens (one when it decodes, many
when it prefills or resumes) and gets what the step's budget has left, most important first. Nothing is
reserved: when blocks run out, the least important running sequence is preempted and computed again later.

    add -> waiting -> plan -> running -> commit ... -> finish
              ^-------- preempt --|
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from octavo.cache.blocks import Lease, Owner
from octavo.cache.manager import CacheManager
from octavo.cache.prefix import Match
from octavo.errors import BooksDoNotBalance, InvalidRequest, OctavoError
from octavo.schedule.books import Books
from octavo.schedule.filling import Filling
from octavo.schedule.full import FullQueue, Pace
from octavo.schedule.limits import Limits
from octavo.schedule.request import Request, Sequence, Status
from octavo.schedule.totals import Totals


@dataclass(frozen=True, slots=True)
class Chunk:
    """Compute positions `start .. stop - 1` of `sequence`; with `sample`, the last row's logits are
    wanted."""

    sequence: Sequence
    start: int
    stop: int
    sample: bool


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step, most important sequence first. Empty when there is nothing to do."""

    chunks: tuple[Chunk, ...]


def _order(sequence: Sequence) -> tuple[int, int, str, int]:
    return sequence.order


class Scheduler:
    """Runs requests over one cache.

    `max_num_seqs` sequences run at a time and compute up to `max_num_batched_tokens` tokens per step.
    `max_waiting` bounds the queue behind them (None: no bound).
    """

    def __init__(
        self,
        cache: CacheManager,
        *,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 512,
        max_model_len: int | None = None,
        max_waiting: int | None = None,
    ) -> None:
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_waiting = max_waiting
        self.limits = Limits(cache.layout, cache.arena.bytes_total, max_model_len)
        self.limit = self.limits.tokens
        self.requests: dict[str, Request] = {}
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._books = Books(cache)
        self._filling = Filling()
        self._in_flight: StepPlan | None = None
        self._pace = Pace()
        self._release_late: list[Sequence] = []

    @property
    def totals(self) -> Totals:
        """The sum of all receipts, and what became of the requests."""
        return self._books.totals

    @property
    def has_work(self) -> bool:
        """Whether a plan would ever hold anything."""
        return bool(self.running or self.waiting)

    def add(self, request: Request) -> None:
        """Queue `request`.

        Raises `ContextLengthExceeded` or `KVCacheTooSmall` if it can never run, `Overloaded` if the queue is
        full, `InvalidRequest` if its id is taken or its prompt empty. After an error nothing of it remains but
        its count among the rejected.
        """
        self._books.handed_in()
        try:
            self._admissible(request)
        except OctavoError:
            self._books.refused()
            raise
        first = Sequence(request, 0, request.prompt_token_ids, self._lease(request))
        request.sequences.append(first)
        request.arrived_at, request.place = self.cache.clock(), len(self.waiting)
        self.requests[request.request_id] = request
        self._books.added(request)
        insort(self.waiting, first, key=_order)

    def _admissible(self, request: Request) -> None:
        self.check(request)
        if request.request_id in self.requests:
            raise InvalidRequest(f"request_id={request.request_id!r} is already in use", param="request_id")
        if (full := self.full()) is not None:
            self._pace.told(self.cache.clock(), full.interval_s)
            raise full.refusal()

    def full(self) -> FullQueue | None:
        """The queue, if it has no room for a request that came now."""
        if self.max_waiting is None:
            return None
        room = self.max_waiting + max(0, self.max_num_seqs - len(self.running))
        if len(self.waiting) < room:
            return None
        first = [s.request for s in self.waiting if s.index == 0]  # choices wait for their own request
        if len(first) < room:
            return None
        now = self.cache.clock()
        oldest = max((now - r.arrived_at for r in first if r.admitted_at is None), default=0.0)
        return self._pace.full(now, len(first), self.max_waiting, oldest)

    def turn_away(self, count: int, seconds: float) -> None:
        """Count requests that a `FullQueue` refused without their being handed in, its intervals summed up."""
        self._books.handed_in(count)
        self._books.refused(count)
        self._pace.told(self.cache.clock(), seconds)

    def check(self, request: Request) -> None:
        """Raise what `add` would raise about `request` whatever else there is; changes nothing."""
        name, prompt = request.request_id, len(request.prompt_token_ids)
        if not prompt:
            raise InvalidRequest(
                f"request {name!r}: the prompt is empty; give at least 1 token", param="prompt"
            )
        self.limits.check(prompt, name)
        if request.drops is not None:
            request.drops.check(self.limit)

    def limit_of(self, request: Request) -> int:
        """The most tokens of one of its sequences, the prompt included."""
        return self.limit if request.drops is None else sys.maxsize

    def plan(self) -> StepPlan:
        """The next step. Blocks for every chunk exist when it returns; block offsets stay put until the next
        call."""
        if self._in_flight is not None:
            raise RuntimeError("the last plan was neither committed nor dropped")
        self.cache.expire()
        chunks: list[Chunk] = []
        budget = self.max_num_batched_tokens
        preempted = False
        while len(chunks) < len(self.running) and budget:
            sequence, before = self.running[len(chunks)], len(self.running)
            count = min(len(sequence.token_ids) - sequence.num_computed, budget)
            if count > 1 and (sequence.lease.drops is not None or self.cache.layout.is_stored):
                count = self._bounded(sequence, count, self._owed(but=sequence))
            count = self._make_room(sequence, count)
            preempted |= len(self.running) < before
            if count:
                chunks.append(_chunk(sequence, count))
                budget -= count
        if budget and self.waiting and len(self.running) < self.max_num_seqs and not preempted:
            self._admit(chunks, budget)
        plan = StepPlan(tuple(chunks))
        self._in_flight = plan if chunks else None
        return plan

    def commit(self, plan: StepPlan, tokens: Tokens[Tokens[int]]) -> None:
        """The step is computed: seal, publish and free, then append the sampled `tokens[i]` of chunk i.

        Empty if nothing was sampled, one id normally, `n` ids at the end of the prompt of a request with `n >
        1`: the sequence is then forked into its choices.
        """
        self._in_flight = None
        sampled = []
        for chunk, ids in zip(plan.chunks, tokens, strict=True):
            sequence = chunk.sequence
            if sequence.status is not Status.RUNNING:
                continue
            if chunk.sample != bool(ids):
                raise ValueError(f"{len(ids)} tokens for a chunk of {sequence} with sample={chunk.sample}")
            blocks = self.cache.commit(sequence.lease, sequence.token_ids, chunk.stop)
            self._filling.sealed(sequence)
            self._books.computed(sequence, chunk.start, chunk.stop, blocks, len(ids))
            self._pin_prompt(sequence)
            sampled.append((sequence, ids))
        for sequence, ids in sampled:
            if len(ids) > 1:
                self._fork(sequence, ids)
            else:
                sequence.token_ids.extend(ids)
        self._let_go_late()

    def _pin_prompt(self, sequence: Sequence) -> None:
        request = sequence.request
        pinned, tokens = request.receipt.pinned, request.cache_ttl_tokens
        if tokens is not None and not pinned and sequence.num_computed >= tokens:
            self._pin(sequence)

    def _pin(self, sequence: Sequence) -> None:
        request = sequence.request
        if request.cache_ttl is not None:
            outcome = self.cache.pin(
                sequence.lease, request.cache_ttl, request.request_id, request.cache_ttl_tokens
            )
            request.receipt.pinned.append(outcome)

    def drop(self) -> None:
        """The planned step failed: nothing of it counts, its positions are computed again."""
        self._in_flight = None
        self._let_go_late()

    def finish(self, sequence: Sequence, reason: str) -> None:
        """`sequence` has its answer (`stop`, `length` ...). Its blocks stay findable, and pinned if asked
        for."""
        if sequence.status is not Status.FINISHED:
            self._end(sequence, reason)

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """Stop every choice of a request, at any time, even during a step. False if there is no such
        request."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        for sequence in request.sequences:
            if sequence.status is not Status.FINISHED:
                self._end(sequence, reason, pin=False)
        return True

    def preempt(self, sequence: Sequence, reason: str = "asked") -> None:
        """Take the blocks of a running `sequence`, between steps; it resumes by itself with the same
        answer."""
        if self._in_flight is not None or sequence.status is not Status.RUNNING:
            raise RuntimeError(f"{sequence} cannot be preempted now")
        self.running.remove(sequence)
        self._filling.stop(sequence)
        self.cache.release(sequence.lease)
        self._books.preempted(sequence, reason)
        self._wait(sequence)

    def _make_room(self, sequence: Sequence, count: int) -> int:
        """Extend `sequence` by `count` tokens, preempting from the back. Returns the count, 0 if it went
        itself."""
        while not self.cache.extend(sequence.lease, sequence.num_computed + count):
            if len(self.running) == 1:
                return self._shrink(sequence, count)
            victim = self.running[-1]
            self.preempt(victim, "pressure")
            if victim is sequence:
                return 0
        return count

    def _owed(self, but: Sequence | None = None) -> int:
        """Bytes that running sequences still need for the tokens they have."""
        return sum(self.cache.bytes_owed(s.lease, len(s.token_ids)) for s in self.running if s is not but)

    def _bounded(self, sequence: Sequence, count: int, owed: int) -> int:
        """How many of `count` tokens to compute at once. The chunk of a sequence that drops context holds more
        blocks than its rule keeps, and one whose blocks are stored in a smaller form holds them as they are filled too,
        only if nobody is owed the room."""
        lease = sequence.lease
        if lease.drops is not None:
            least = lease.drops.reach(lease.computed)
        elif self.cache.layout.is_stored:
            least = (lease.computed // self.cache.layout.block_size + 1) * self.cache.layout.block_size
        else:
            return count
        spare = self.cache.reach(lease, self.cache.bytes_available - owed)
        return min(count, max(least, spare) - lease.computed)

    def _shrink(self, sequence: Sequence, count: int) -> int:
        """Alone, and still too much at once: only a window wider than the arena is long gets here."""
        while not self.cache.extend(sequence.lease, sequence.num_computed + count):
            if count == 1:
                raise BooksDoNotBalance(f"{sequence} has the cache to itself and finds no block")
            count //= 2
        return count

    def _admit(self, chunks: list[Chunk], budget: int) -> None:
        """Start waiting sequences in order. One that waits for a block being filled lets others pass; one for
        which there is no room does not."""
        owed = self._owed()
        i = 0
        while (
            budget and i < min(len(self.waiting), self.max_num_seqs) and len(self.running) < self.max_num_seqs
        ):
            sequence = self.waiting[i]
            if sequence.blocked_on is not None and sequence.blocked_on in self._filling:
                i += 1
                continue
            match = self.cache.find(sequence.lease, sequence.token_ids)
            sequence.blocked_on = self._next_block(sequence, match)
            if sequence.blocked_on is not None and sequence.blocked_on in self._filling:
                i += 1
                continue
            if not self._fits(sequence, match, owed):
                return
            count = self._start(sequence, match, budget, owed)
            if not count:
                return
            del self.waiting[i]
            owed += self.cache.bytes_owed(sequence.lease, len(sequence.token_ids))
            chunks.append(_chunk(sequence, count))
            budget -= count

    def _next_block(self, sequence: Sequence, match: Match) -> bytes | None:
        """Digest of the first block that `sequence` would have to fill although another may be filling it."""
        lease = sequence.lease
        reusable = self.cache.index.reusable(lease, len(sequence.token_ids))
        return lease.digests[match.depth] if lease.reuse and match.depth < reusable else None

    def _fits(self, sequence: Sequence, match: Match, owed: int) -> bool:
        """Whether all tokens known of `sequence` and one more fit, next to what running ones still need for
        theirs. Without this a sequence could be admitted only to be preempted, again and again."""
        need = self.cache.layout.sequence_bytes(len(sequence.token_ids) + 1, sequence.lease.drops) + owed
        if need <= self.cache.arena.bytes_free:
            return True
        return need <= self.cache.bytes_available + self.cache.bytes_shared(match)

    def _start(self, sequence: Sequence, match: Match, budget: int, owed: int) -> int:
        """Run `sequence` from `match` on. Returns the tokens to compute now, 0 if there is no room after
        all."""
        miss = self.cache.why(sequence.lease, sequence.token_ids, match)
        reused = self.cache.acquire(sequence.lease, match)
        count = self._bounded(sequence, min(len(sequence.token_ids) - reused, budget), owed)
        while count and not self.cache.extend(sequence.lease, reused + count):
            count //= 2
        if not count:
            self.cache.release(sequence.lease)
            return 0
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=_order)
        self._filling.start(sequence)
        request = sequence.request
        if request.admitted_at is None:
            request.admitted_at = self.cache.clock()
            self._pace.left(request.admitted_at - request.arrived_at, request.place)
        self._books.started(sequence, reused, miss)
        return count

    def _fork(self, sequence: Sequence, ids: Tokens[int]) -> None:
        """The choices of a request start from one prompt. A choice without room waits and matches the
        prompt."""
        request = sequence.request
        if len(ids) != request.n or len(request.sequences) != 1:
            raise ValueError(f"{len(ids)} tokens for {sequence}, a request with n={request.n}")
        for index, token in enumerate(ids[1:], start=1):
            lease = self.cache.fork(sequence.lease) if len(self.running) < self.max_num_seqs else None
            child = Sequence(request, index, sequence.token_ids, lease or self._lease(request))
            child.token_ids.append(token)
            child.ever_computed = sequence.ever_computed
            request.sequences.append(child)
            if lease is None:
                self._wait(child)
            else:
                child.status = Status.RUNNING
                insort(self.running, child, key=_order)
        sequence.token_ids.append(ids[0])

    def _lease(self, request: Request) -> Lease:
        return self.cache.lease(
            request.namespace,
            priority=request.priority,
            exact=request.exact,
            reuse=request.reuse,
            drops=request.drops,
            owner=Owner(request.namespace.tenant, request.label, request.request_id),
        )

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        sequence.blocked_on = None
        insort(self.waiting, sequence, key=_order)

    def _end(self, sequence: Sequence, reason: str, pin: bool = True) -> None:
        was_running = sequence.status is Status.RUNNING
        queue = self.running if was_running else self.waiting
        del queue[bisect_left(queue, sequence.order, key=_order)]
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        if was_running:
            self._filling.stop(sequence)
            if pin and sequence.request.cache_ttl_tokens is None:
                self._pin(sequence)
            if self._in_flight and any(chunk.sequence is sequence for chunk in self._in_flight.chunks):
                self._release_late.append(sequence)
            else:
                self.cache.release(sequence.lease)
        if sequence.request.finished:
            del self.requests[sequence.request.request_id]
            self._books.ended(sequence.request)

    def _let_go_late(self) -> None:
        """Give back what requests ended during the step were still being written to."""
        for sequence in self._release_late:
            self.cache.release(sequence.lease)
        self._release_late.clear()


def _chunk(sequence: Sequence, count: int) -> Chunk:
    start = sequence.num_computed
    return Chunk(sequence, start, start + count, start + count == len(sequence.token_ids))
