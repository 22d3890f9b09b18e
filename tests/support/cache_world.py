"""A world without a model: real cache and scheduler, memory of bytes, a runner that checks what it reads.

The runner writes into position p of a block a digest of everything that should decide its K and V (namespace, token
ids 0..p, what was dropped on the way) and, before it does, reads every earlier position that it sees through the block
table. Reading a
block that was not filled, or filled for somebody else, fails at once. Tokens are drawn from that digest, so the
right answer of a request can be written down without any cache: `answer`. A mark beside each digest says that it was
folded, or computed from something that was: a request that asks for exact answers must never read one.
"""

import hashlib
from collections.abc import Sequence as Tokens
from unittest.mock import patch

from octavo.cache.dropping import DropRule
from octavo.cache.formats import FIRST_STORED, block_format
from octavo.cache.layout import CacheLayout, LayerGroup
from octavo.cache.manager import CacheManager
from octavo.schedule.request import Request, Sequence
from octavo.schedule.scheduler import Scheduler, StepPlan

CELL = 8
FULL_GROUP = LayerGroup((0,), 1, 16)
NAN = b"\xff"
PURE, TAINTED = 0, 1


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Bytes:
    """The `Memory` of a test."""

    def __init__(self, nbytes: int, layout: CacheLayout | None = None) -> None:
        self.data = bytearray(nbytes)
        self.aside = bytearray(nbytes)
        self.copies = 0
        if layout is not None:
            self.layout = layout
            self._formats = {f.tag: f for f in map(block_format, (layout.format, *layout.ladder))}

    def cell(self, group: int, entry: int, i: int) -> int:
        """Where position `i` of a block begins."""
        offset = entry % FIRST_STORED
        nbytes = self.layout.format_bytes(group, self._formats[entry - offset])
        return offset + i * (nbytes // self.layout.block_size)

    def encode(self, group: int, from_to: Tokens[tuple[int, int]]) -> None:
        for entry, target in from_to:
            for i in range(self.layout.block_size):
                source, dst = self.cell(group, entry, i), self.cell(group, target, i)
                self.aside[dst : dst + CELL] = self.data[source : source + CELL]
                self.aside[dst + CELL] = TAINTED

    def place(self, aside: int, dst: int, nbytes: int) -> None:
        self.data[dst : dst + nbytes] = self.aside[aside : aside + nbytes]

    def move(self, src: int, dst: int, nbytes: int) -> None:
        self.data[dst : dst + nbytes] = self.data[src : src + nbytes]

    def copy(self, src: int, dst: int, nbytes: int) -> None:
        self.copies += 1
        self.move(src, dst, nbytes)

    def poison(self, offset: int, nbytes: int) -> None:
        self.data[offset : offset + nbytes] = NAN * nbytes


def mark(before: bytes, token: int) -> bytes:
    return hashlib.blake2b(before + token.to_bytes(8, "little"), digest_size=CELL).digest()


def marks(request: Request, token_ids: Tokens[int]) -> list[bytes]:
    """What position p must hold, for every p."""
    row, last = [], request.namespace.encode()
    for position, token in enumerate(token_ids):
        last = mark(last, token)
        if dropped := dropped_by(request.drops, position):
            last = mark(last, dropped)
        row.append(last)
    return row


def dropped_by(drops: DropRule | None, position: int) -> int:
    return 0 if drops is None else drops.dropped(position)


def draw(last: bytes, choice: int) -> int:
    """The token that follows a position which holds `last`; two to choose from, so that answers collide often."""
    return mark(last, choice)[0] % 2


def answer(request: Request, choice: int, max_tokens: int, limit: int) -> list[int]:
    """What choice `choice` must generate, computed from nothing but the request."""
    tokens = list(request.prompt_token_ids)
    end = len(tokens) + max_tokens
    while len(tokens) < (end if request.drops else min(limit, end)):
        tokens.append(draw(marks(request, tokens)[-1], choice))
    return tokens[len(request.prompt_token_ids) :]


class World:
    """Cache, scheduler and runner. `budget` counts blocks of every group."""

    def __init__(
        self,
        blocks: int = 16,
        *,
        block_size: int = 4,
        groups: tuple[LayerGroup, ...] = (FULL_GROUP,),
        spare_bytes: int = 0,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_model_len: int | None = None,
        max_waiting: int | None = None,
        ladder: tuple[str, ...] = (),
        **cache: object,
    ) -> None:
        self.clock = Clock()
        with patch("octavo.cache.layout.LEAST_STORED_BLOCK", block_size):  # only kernels need more
            self.layout = CacheLayout(groups, block_size, "bf16", ladder=ladder)
        total = blocks * sum(self.layout.block_sizes_bytes) + spare_bytes
        self.memory = Bytes(total, self.layout)
        self.tainted: set[Request] = set()
        self.cache = CacheManager(
            self.layout,
            total,
            memory=self.memory,
            poison=True,
            clock=self.clock,
            **cache,  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(
            self.cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            max_waiting=max_waiting,
        )
        self.max_tokens: dict[Request, int] = {}
        self.done: list[Request] = []
        self.computed = 0
        self._arrivals = 0

    def add(self, prompt: Tokens[int], max_tokens: int = 1, **fields: object) -> Request:
        """Queue a request. Raises what the scheduler raises."""
        self._arrivals += 1
        request = Request(f"r{self._arrivals}", self._arrivals, prompt, **fields)  # type: ignore[arg-type]
        self.scheduler.add(request)
        self.max_tokens[request] = max_tokens
        return request

    def step(self) -> StepPlan:
        """Plan, compute, commit, finish what is done, check the books."""
        plan = self.scheduler.plan()
        self.commit(plan)
        return plan

    def commit(self, plan: StepPlan) -> None:
        sampled = [
            self.compute(chunk.sequence, chunk.start, chunk.stop, chunk.sample) for chunk in plan.chunks
        ]
        self.scheduler.commit(plan, sampled)
        for chunk in plan.chunks:
            for sequence in list(chunk.sequence.request.sequences):
                self.finish_if_done(sequence)
        self.cache.check()

    def finish_if_done(self, sequence: Sequence) -> None:
        request = sequence.request
        if sequence.finish_reason is not None:
            return
        full = len(sequence.token_ids) >= self.scheduler.limit_of(request)
        if full or len(sequence.output_token_ids) >= self.max_tokens[request]:
            self.scheduler.finish(sequence, "length" if full else "stop")
            if request.finished:
                written = len(request.prompt_token_ids) + sum(
                    len(s.output_token_ids) - 1 for s in request.sequences
                )
                assert request.receipt.formats.total() == written, request.receipt
                self.done.append(request)

    def compute(self, sequence: Sequence, start: int, stop: int, sample: bool) -> list[int]:
        """What the model would do: read the context, write positions `start .. stop - 1`, sample."""
        request = sequence.request
        expected = marks(request, sequence.token_ids)
        for position in range(start, stop):
            self.computed += 1
            taint = PURE
            for g, group in enumerate(self.layout.groups):
                first = 0 if group.window is None else max(0, position - group.window + 1)
                dropped = dropped_by(request.drops, position)
                for p in range(first, position):
                    if request.drops and 0 <= p - request.drops.sinks < dropped:
                        continue
                    assert self._cell(sequence, g, p) == expected[p], f"{sequence} group {g} position {p}"
                    taint |= self.memory.data[self._where(sequence, g, p) + CELL]
            assert taint == PURE or not request.exact, f"{sequence} position {position}"
            if taint != PURE:
                self.tainted.add(request)
            for g in range(len(self.layout.groups)):
                where = self._where(sequence, g, position)
                self.memory.data[where : where + CELL] = expected[position]
                self.memory.data[where + CELL] = taint
        if not sample:
            return []
        forks = request.n > 1 and len(request.sequences) == 1
        choices = range(request.n) if forks else [sequence.index]
        return [draw(expected[stop - 1], choice) for choice in choices]

    def run(self, max_steps: int = 10_000) -> int:
        """Step until nothing is left. Returns the number of steps."""
        for steps in range(max_steps):
            if not self.scheduler.has_work:
                return steps
            self.step()
        raise AssertionError(f"{self.scheduler.running} and {self.scheduler.waiting} after {max_steps} steps")

    def generate(self, prompt: Tokens[int], max_tokens: int = 1, **fields: object) -> Request:
        """One request from start to end, alone or with whatever else is queued."""
        request = self.add(prompt, max_tokens, **fields)
        self.run()
        self.verify(request)
        return request

    def verify(self, request: Request) -> None:
        """The answers are the right ones."""
        for sequence in request.sequences:
            expected = answer(request, sequence.index, self.max_tokens[request], self.scheduler.limit)
            assert sequence.output_token_ids == expected, sequence

    def _where(self, sequence: Sequence, g: int, position: int) -> int:
        entry = sequence.tables[g].entries[position // self.layout.block_size]
        assert entry >= 0, f"{sequence} group {g} lost position {position}"
        return self.memory.cell(g, entry, position % self.layout.block_size)

    def _cell(self, sequence: Sequence, g: int, position: int) -> bytes:
        where = self._where(sequence, g, position)
        return bytes(self.memory.data[where : where + CELL])


def words(seed: int, count: int) -> list[int]:
    """`count` token ids that no other seed shares a block with."""
    return [1000 * seed + 7 + i for i in range(count)]
