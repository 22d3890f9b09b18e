"""Scheduler and CacheManager as a state machine against a simple model.

The model is what was asked: which request, with how many choices, and whether somebody ended it early. The world's
runner checks every position that is read; the books are checked after every rule, the answers at the end.
"""

from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.cache.dropping import DropRule
from octavo.cache.hashing import Namespace
from octavo.cache.layout import LayerGroup
from octavo.errors import InvalidRequest, Overloaded
from octavo.schedule.request import Request, Status
from support.cache_world import FULL_GROUP, World, answer, dropped_by
from support.sizes import sized

GROUPS = {
    "full": (FULL_GROUP,),
    "two sizes": (FULL_GROUP, LayerGroup((1, 2), 1, 16)),
    "window": (LayerGroup((0,), 1, 16, window=5),),
    "mixed": (FULL_GROUP, LayerGroup((1, 2), 1, 16, window=6)),
    "only a tiny window": (LayerGroup((0,), 1, 16, window=1),),
    "tiny window": (FULL_GROUP, LayerGroup((1,), 1, 16, window=1)),
}
# Few variants of every length, so that prompts share prefixes and yet fill the pool.
PROMPTS = st.builds(
    lambda length, variant: [(variant * i) // 8 % 2 for i in range(length)],
    st.integers(1, 45),
    st.integers(0, 3),
)
SUMMED = (
    "prompt_tokens",
    "completion_tokens",
    "reused_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "written_blocks",
    "preemptions",
    "compressed_tokens",
)


class CacheMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Request] = []
        self.ended_early: set[tuple[Request, int]] = set()
        self.aborted: set[Request] = set()
        self.refused = 0

    @initialize(
        groups=st.sampled_from(sorted(GROUPS)),
        blocks=st.integers(4, 20),
        spare=st.sampled_from([0, 0, 64, 200]),
        budget=st.sampled_from([3, 8, 30]),
        seqs=st.integers(1, 6),
        policy=st.sampled_from(["lru", "cost"]),
        hash_bits=st.sampled_from([256, 256, 8]),
        caching=st.sampled_from([True, True, True, False]),
        pinned=st.integers(0, 8),
        waiting=st.sampled_from([None, None, 0, 3]),
        ladder=st.sampled_from([(), (), ("int8",), ("int8", "int4")]),
    )
    def start(self, groups, blocks, spare, budget, seqs, policy, hash_bits, caching, pinned, waiting, ladder):
        layout_groups = GROUPS[groups]
        if ladder:  # heads long enough that what is folded is smaller
            layout_groups = tuple(replace(group, head_dim=64) for group in layout_groups)
        self.world = World(
            blocks,
            groups=layout_groups,
            spare_bytes=spare,
            max_num_batched_tokens=budget,
            max_num_seqs=seqs,
            max_waiting=waiting,
            policy=policy,
            hash_bits=hash_bits,
            enable_prefix_caching=caching,
            max_pinned=pinned * 256 * (4 if ladder else 1),
            ladder=ladder,
        )

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        priority=st.integers(-1, 1),
        salt=st.sampled_from([None, None, "", "a"]),
        ttl=st.sampled_from([None, None, 5.0, 20.0]),
        reuse=st.sampled_from([True, True, True, False]),
        rule=st.sampled_from([None, None, (0, 4), (4, 8), (8, 12), (4, 20)]),
        exact=st.booleans(),
    )
    def add(self, prompt, max_tokens, n, priority, salt, ttl, reuse, rule, exact):
        drops = None
        if rule is not None and all(group.window is None for group in self.world.layout.groups):
            drops, max_tokens = DropRule(*rule, self.world.layout.block_size), 3 * max_tokens
        self._add(prompt, max_tokens, n, priority, salt, ttl, reuse, drops, exact)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), extra=st.lists(st.integers(0, 1), max_size=6), max_tokens=st.integers(1, 12))
    def next_turn(self, data, extra, max_tokens):
        before = data.draw(st.sampled_from(self.asked))
        prompt = [*before.sequences[0].token_ids, *extra]
        self._add(prompt, max_tokens, 1, 0, before.namespace.salt, None, True)

    @rule(times=st.integers(1, 12))
    def step(self, times):
        for _ in range(times):
            self.world.step()

    @precondition(lambda self: self._unfinished())
    @rule(data=st.data(), during_a_step=st.booleans())
    def cancel(self, data, during_a_step):
        request = data.draw(st.sampled_from(self._unfinished()))
        plan = self.world.scheduler.plan() if during_a_step else None
        assert self.world.scheduler.abort(request.request_id)
        self.aborted.add(request)
        if plan is not None:
            self.world.commit(plan)

    @precondition(lambda self: self.world.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.world.scheduler.preempt(data.draw(st.sampled_from(self.world.scheduler.running)))

    @precondition(lambda self: self.world.scheduler.running)
    @rule(data=st.data())
    def finish(self, data):
        sequence = data.draw(st.sampled_from(self.world.scheduler.running))
        self.ended_early.add((sequence.request, sequence.index))
        self.world.scheduler.finish(sequence, "stop")

    @precondition(lambda self: self.world.scheduler.running)
    @rule()
    def fail_a_step(self):
        self.world.scheduler.plan()
        self.world.scheduler.drop()

    @rule(seconds=st.sampled_from([1.0, 5.0, 30.0]))
    def time_passes(self, seconds):
        self.world.clock.now += seconds
        self.world.cache.expire()

    @precondition(lambda self: len(self.asked) % 4 == 3)
    @rule()
    def reset(self):
        self.world.cache.reset()

    @invariant()
    def books_balance(self):
        if not hasattr(self, "world"):
            return
        scheduler = self.world.scheduler
        self.world.cache.check()
        alive = [s for r in self.asked for s in r.sequences if s.status is not Status.FINISHED]
        assert sorted(scheduler.running + scheduler.waiting, key=id) == sorted(alive, key=id)
        assert {s.lease for s in scheduler.running} == self.world.cache.leases
        assert len(scheduler.running) <= scheduler.max_num_seqs
        for name in SUMMED:
            total = sum(getattr(request.receipt, name) for request in self.asked)
            assert getattr(scheduler.totals, name) == total, name
        self._check_counts()

    def _check_counts(self):
        totals, live = self.world.scheduler.totals, len(self.world.scheduler.requests)
        assert totals.started == totals.finished.total() + totals.cancelled + totals.rejected + live
        assert (totals.started, totals.rejected) == (len(self.asked) + self.refused, self.refused)
        assert totals.cancelled == len(self.aborted)
        assert live == sum(not request.finished for request in self.asked)
        assert totals.dropped_positions == sum(
            last - first + 1 for request in self.asked for first, last, _ in request.receipt.dropped
        )
        admitted = [r.receipt for r in self.asked if r.receipt.miss is not None]
        asked = sum(r.prompt_tokens for r in admitted)
        assert totals.reused_tokens <= totals.queried_tokens <= asked
        assert totals.reused_tokens + totals.computed_tokens == asked

    def teardown(self):
        if not hasattr(self, "world"):
            return
        self.world.run()
        for request in self.asked:
            self._check_answer(request)
        self.world.cache.reset()
        assert self.world.cache.arena.bytes_free == self.world.cache.arena.bytes_total
        self.world.cache.check()

    def _add(self, prompt, max_tokens, n, priority, salt, ttl, reuse, drops=None, exact=False):
        fields = {
            "n": n,
            "priority": priority,
            "namespace": Namespace("m", salt=salt),
            "cache_ttl": ttl,
            "reuse": reuse,
            "drops": drops,
            "exact": exact,
        }
        try:
            self.asked.append(self.world.add(prompt, max_tokens, **fields))
        except Overloaded:
            self.refused += 1
            assert len(self.world.scheduler.waiting) >= self.world.scheduler.max_waiting
        except InvalidRequest:
            self.refused += 1
            longest = max(len(prompt) + 1, drops.kept if drops else 0)
            assert longest > self.world.scheduler.limit

    def _unfinished(self):
        return [request for request in self.asked if not request.finished]

    def _ended_early(self, request):
        return request in self.aborted or any((request, i) in self.ended_early for i in range(request.n))

    def _check_answer(self, request):
        limit = self.world.scheduler.limit
        if request not in self.aborted and (request, 0) not in self.ended_early:
            assert len(request.sequences) == request.n
        for sequence in request.sequences:
            expected = answer(request, sequence.index, self.world.max_tokens[request], limit)
            got = sequence.output_token_ids
            if request in self.aborted or (request, sequence.index) in self.ended_early:
                expected = expected[: len(got)]
            assert got == expected, sequence
        receipt = request.receipt
        if not self.world.layout.ladder:
            assert receipt.exact == (not receipt.dropped)
        assert not (receipt.exact and (receipt.dropped or request in self.world.tainted))
        assert receipt.exact or receipt.dropped or not request.exact
        assert receipt.compressed_tokens == 0 or not receipt.exact
        if not self._ended_early(request):
            last = max(len(s.token_ids) for s in request.sequences) - 2
            gone = dropped_by(request.drops, last)
            sinks = request.drops.sinks if request.drops else 0
            assert receipt.dropped == ([(sinks, sinks + gone - 1, "window")] if gone else [])
        if receipt.miss is not None:
            assert receipt.reused_tokens + receipt.computed_tokens == receipt.prompt_tokens
            assert receipt.reused_tokens < receipt.prompt_tokens


CacheMachine.TestCase.settings = settings(
    max_examples=sized(400, 500),
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
TestCacheMachine = CacheMachine.TestCase
