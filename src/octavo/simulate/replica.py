"""One replica: the real scheduler on the real cache, with a virtual clock and a cost in place of the forward pass.

A step is planned when the one before has ended, and committed when its cost has passed. Where nothing but decoding can
happen, several steps are taken in one leap: their tokens are known beforehand, so the scheduler is handed them all and
plans one chunk of several tokens per sequence. The outcome is that of single steps, but that curves have fewer looks,
and but for the moments at which blocks were sealed and reclaimed; where these count, and where blocks are freed or
shrink meanwhile (windows, formats smaller than the compute type), there are no leaps.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace

from octavo.cache.hashing import Namespace
from octavo.cache.layout import CacheLayout
from octavo.cache.manager import CacheManager
from octavo.errors import OctavoError
from octavo.schedule.request import Request, Sequence
from octavo.schedule.scheduler import Scheduler, StepPlan
from octavo.simulate.cost import StepCost, StepWork, factor, work_of
from octavo.simulate.measure import Measures
from octavo.simulate.trace import Arrival

_NAMESPACE = Namespace()


@dataclass(frozen=True)
class ReplicaSpec:
    """What every replica is made of."""

    layout: CacheLayout
    cache_bytes: int
    cost: StepCost
    policy: str = "lru"
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    enable_prefix_caching: bool = True


class Replica:
    """Serves arrivals in virtual time. `load` are tokens of its requests that are neither computed nor found in the
    cache yet."""

    def __init__(
        self, spec: ReplicaSpec, width: float, *, leaps: bool = True, lifetimes: bool = False
    ) -> None:
        self.now = 0.0
        self.load = 0
        self.measures = Measures(width)
        self.cache = CacheManager(
            spec.layout,
            spec.cache_bytes,
            enable_prefix_caching=spec.enable_prefix_caching,
            policy=spec.policy,
            clock=self._clock,
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            max_model_len=spec.max_model_len,
        )
        self._ends_at = 0.0
        self._spec = spec
        plain = not spec.layout.is_stored and all(window is None for window in spec.cost.windows)
        self._leaps = leaps and plain and not lifetimes
        self._lifetimes = lifetimes
        self._stored: dict[bytes, float] = {}
        self._plan: StepPlan | None = None
        self._steady = False
        self._arrivals: dict[str, Arrival] = {}
        self._last_token: dict[Sequence, float] = {}
        self._reached: dict[Sequence, int] = {}

    def _clock(self) -> float:
        return self.now

    @property
    def outstanding(self) -> int:
        """Requests that run or wait."""
        return len(self._arrivals)

    def add(self, arrival: Arrival) -> None:
        """Queue a request that arrives now, which `advance` has been told. One that can never run is rejected."""
        if self._plan is None and not self.scheduler.has_work:
            self.now = max(self.now, arrival.at)
        name = str(arrival.index)
        try:
            self.scheduler.limits.check(arrival.prompt, name)  # before its tokens, however many, are made
            request = Request(
                request_id=name,
                arrival=arrival.index,
                prompt_token_ids=arrival.prompt_tokens(),
                n=arrival.n,
                priority=arrival.priority,
                namespace=_NAMESPACE,
            )
            self.scheduler.add(request)
        except OctavoError:
            self.measures.rejected += 1
            return
        request.arrived_at = arrival.at
        self._steady = False
        self._arrivals[name] = arrival
        self.load += arrival.prompt + arrival.n * arrival.output

    @property
    def next_at(self) -> float | None:
        """When something happens next: a step ends, or one can begin. None if there is nothing to do."""
        if self._plan is not None:
            return self._ends_at
        return self.now if self.scheduler.has_work else None

    def advance(self, until: float) -> None:
        """Let time pass: end every step that ends by `until`, and begin every one that begins before."""
        while True:
            if self._plan is not None:
                if self._ends_at > until:
                    return
                self._commit(self._plan)
            if not self.scheduler.has_work or self.now >= until:
                return
            if self._steady and self._leaps:
                self._leap(until)
                if self.now >= until:
                    return
            self._begin()

    def _begin(self) -> None:
        preempted = self.scheduler.totals.preemptions
        plan = self.scheduler.plan()
        self._plan = plan
        work = work_of(plan.chunks, self._spec.cost.windows)
        self._ends_at = self.now + self._seconds(work, self.measures.steps)
        # After a preemption nobody was admitted, but somebody may be in the next step.
        calm = self.scheduler.totals.preemptions == preempted
        if not calm:
            self._start_again()
        self._steady = calm and work.rows == len(self.scheduler.running) == len(plan.chunks) == work.logits
        for chunk in plan.chunks:
            self._reach(chunk.sequence, chunk.start)
            request = chunk.sequence.request
            if request.admitted_at == self.now and chunk.sequence not in self._last_token:
                self.measures.waiting.add(self.now - request.arrived_at)

    def _reach(self, sequence: Sequence, position: int) -> None:
        """The positions of `sequence` before `position` are there."""
        self.load -= position - self._reached.get(sequence, 0)
        self._reached[sequence] = position

    def _start_again(self) -> None:
        """Those that were preempted have nothing left."""
        for sequence in self.scheduler.waiting:
            self.load += self._reached.pop(sequence, 0)

    def _seconds(self, work: StepWork, step: int) -> float:
        cost = self._spec.cost
        return cost.seconds(work) * factor(cost.spread, step)

    def _commit(self, plan: StepPlan) -> None:
        self._plan, self.now = None, self._ends_at
        tokens: list[Tokens[int]] = []
        for chunk in plan.chunks:
            tokens.append(self._sampled(chunk.sequence) if chunk.sample else ())
        self.scheduler.commit(plan, tokens)
        self.measures.steps += 1
        for chunk in plan.chunks:
            self._reach(chunk.sequence, chunk.stop)
            if chunk.sample:
                first = chunk.stop == len(chunk.sequence.request.prompt_token_ids)
                for sequence in chunk.sequence.request.sequences if first else (chunk.sequence,):
                    self._deliver(sequence)
        self._look()

    def _sampled(self, sequence: Sequence) -> list[int]:
        """What `sequence` gets: a token, and at the end of the prompt one for every answer."""
        arrival, position = self._arrivals[sequence.request.request_id], len(sequence.token_ids)
        choices = range(arrival.n) if position == arrival.prompt else (sequence.index,)
        return [arrival.output_token(position, choice) for choice in choices]

    def _deliver(self, sequence: Sequence) -> None:
        """`sequence` has got a token now."""
        request, measures = sequence.request, self.measures
        before = self._last_token.get(sequence)
        if before is not None:
            measures.itl.add(self.now - before)
        elif not sequence.index:
            measures.ttft.add(self.now - request.arrived_at)
        else:
            self._steady = False  # it was forked off, and has the prompt or waits for room to get it
            self.load += request.receipt.prompt_tokens
            self._reach(sequence, sequence.num_computed)
        self._last_token[sequence] = self.now
        arrival = self._arrivals[request.request_id]
        if len(sequence.token_ids) >= min(arrival.prompt + arrival.output, self.scheduler.limit):
            self.scheduler.finish(sequence, "length")
            self._steady = False
            self._reach(sequence, arrival.prompt + arrival.output)  # the last token is not computed
            del self._reached[sequence]
            del self._last_token[sequence]
            if request.finished:
                self._account(request)

    def _account(self, request: Request) -> None:
        measures, receipt = self.measures, request.receipt
        arrival = self._arrivals.pop(request.request_id)
        output = sum(len(sequence.token_ids) - arrival.prompt for sequence in request.sequences)
        measures.finished += 1
        measures.output_tokens += output
        measures.prompt_tokens += receipt.prompt_tokens
        measures.reused_tokens += receipt.reused_tokens
        measures.preemptions += receipt.preemptions
        measures.recomputed_tokens += receipt.recomputed_tokens
        measures.ended_at = self.now

    def _look(self) -> None:
        cache, measures = self.cache, self.measures
        total = cache.arena.bytes_total
        measures.running.add(self.now, 1 - cache.bytes_available / total)
        measures.cached.add(self.now, cache.idle.bytes / total)
        measures.queue.add(self.now, len(self.scheduler.waiting))
        events = cache.pool.log.drain()
        if not self._lifetimes:
            return
        for event in events:
            if event.kind == "stored":
                self._stored[event.digest] = event.time
            elif event.kind == "reclaimed":
                born = self._stored.pop(event.digest, None)
                if born is not None:
                    measures.lifetime.add(event.time - born)

    def _leap(self, until: float) -> None:
        """Take as many steps as end by `until` and in which nothing ends, starts or is preempted."""
        running = self.scheduler.running
        limit = self.scheduler.limit
        remaining = []
        for sequence in running:
            arrival = self._arrivals[sequence.request.request_id]
            last = min(arrival.prompt + arrival.output, limit)
            remaining.append(last - len(sequence.token_ids))
        steps = min(remaining) - 1
        if steps < 2:
            return
        ends = self._ends(steps, until)
        steps = len(ends)
        missing = sum(self.cache.bytes_missing(s.lease, s.num_computed + steps) for s in running)
        if steps < 2 or missing > self.cache.bytes_available:
            return
        for sequence in running:
            arrival = self._arrivals[sequence.request.request_id]
            known = len(sequence.token_ids)
            sequence.token_ids += [arrival.output_token(known + i, sequence.index) for i in range(steps - 1)]
        self._take(ends)

    def _ends(self, steps: int, until: float) -> list[float]:
        """When each of the next `steps` decode steps ends, as far as they end by `until`."""
        running, done = self.scheduler.running, self.measures.steps
        rows, kinds = len(running), len(self._spec.cost.windows)
        seen = sum(len(sequence.token_ids) for sequence in running)
        work = StepWork(rows, rows, rows, (seen,) * kinds, (seen,) * kinds, (0,) * kinds)
        ends: list[float] = []
        now = self.now
        for step in range(done, done + steps):
            now += self._seconds(work, step)
            if now > until:
                break
            ends.append(now)
            seen += rows
            work = replace(work, seen=(seen,) * kinds, pairs=(seen,) * kinds)
        return ends

    def _take(self, ends: list[float]) -> None:
        """One plan of `len(ends)` tokens per sequence, counted as as many steps."""
        scheduler, measures, steps = self.scheduler, self.measures, len(ends)
        width = scheduler.max_num_batched_tokens
        # Nothing is left to admit anybody with.
        scheduler.max_num_batched_tokens = len(scheduler.running) * steps
        plan = scheduler.plan()
        scheduler.max_num_batched_tokens = width
        start, self.now = self.now, ends[-1]
        tokens = []
        for chunk in plan.chunks:
            sequence = chunk.sequence
            assert chunk.stop - chunk.start == steps
            tokens.append(self._sampled(sequence))
        scheduler.commit(plan, tokens)
        for chunk in plan.chunks:
            for receipt in (chunk.sequence.request.receipt, scheduler.totals):
                receipt.completion_tokens += steps - 1
            self._last_token[chunk.sequence] = self.now
            self._reach(chunk.sequence, chunk.stop)
        rows = len(plan.chunks)
        for before, end in zip([start, *ends], ends, strict=False):
            measures.itl.add(end - before, rows)
        measures.steps += steps
        self._look()
