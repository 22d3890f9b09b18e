"""Engines under pressure: what each client of a stream gets, hooks between steps, and rows counted where they run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from octavo.cache.layout import CacheLayout
from octavo.cache.receipt import Receipt
from octavo.engine import Engine
from octavo.live import LiveRequest
from octavo.model.batch import Piece
from octavo.model.spec import ModelSpec
from octavo.schedule.request import Sequence as Running
from octavo.schedule.request import Status
from support.engines import Answer, Request, answers, submit
from support.tiny import KINDS

Chunk = tuple[tuple[int, ...], str]
Between = Callable[[list[LiveRequest]], None]
Wanted = Callable[[LiveRequest, Running], bool]
MAX_STEPS = 20_000
COUNTS = (
    "prompt_tokens",
    "completion_tokens",
    "reused_tokens",
    "computed_tokens",
    "recomputed_tokens",
    "written_blocks",
    "preemptions",
)


@dataclass(frozen=True)
class Heard:
    """What one client got: the answers, the stream they came in (new ids and text, per choice), and the usage."""

    answers: tuple[Answer, ...]
    chunks: tuple[tuple[Chunk, ...], ...]
    usage: tuple[int, int]
    prompt_logprobs: tuple[tuple[tuple[int, float, int], ...], ...]


@dataclass
class Ear:
    """Follows one request; what it has heard never changes later."""

    live: LiveRequest
    chunks: list[list[Chunk]] = field(default_factory=list)
    _ids: list[int] = field(default_factory=list)
    _text: list[str] = field(default_factory=list)

    def listen(self) -> None:
        for c in self.live.output().outputs:
            if c.index == len(self.chunks):
                self.chunks.append([])
                self._ids.append(0)
                self._text.append("")
            new, known = tuple(c.token_ids[self._ids[c.index] :]), self._text[c.index]
            assert c.text.startswith(known)
            if new:
                self.chunks[c.index].append((new, c.text[len(known) :]))
            self._ids[c.index], self._text[c.index] = len(c.token_ids), c.text

    def heard(self) -> Heard:
        output, receipt = self.live.output(), self.live.request.receipt
        return Heard(
            tuple(answers(output)),
            tuple(tuple(chunks) for chunks in self.chunks),
            (receipt.prompt_tokens, receipt.completion_tokens),
            tuple(
                tuple((token, entry.logprob, entry.rank) for token, entry in (position or {}).items())
                for position in output.prompt_logprobs or ()
            ),
        )


def serve(
    engine: Engine, requests: Sequence[Request], between: Between = lambda _: None
) -> tuple[list[Heard], list[Receipt]]:
    """Serve `requests` at once, calling `between` before the first step and after every one.

    What each client heard, and its receipt.
    """
    ears = [Ear(submit(engine, f"request {i}", request)) for i, request in enumerate(requests)]
    lives = [ear.live for ear in ears]
    of = {live.request.request_id: ear for live, ear in zip(lives, ears, strict=True)}
    between(lives)
    for _ in range(MAX_STEPS):
        if not engine.has_work:
            break
        for live in engine.step():
            of[live.request.request_id].listen()
        between(lives)
    assert not engine.has_work
    engine.check()
    for ear in ears:
        assert ear.live.error is None
        heard = ear.heard()
        for answer, chunks in zip(heard.answers, heard.chunks, strict=True):
            assert "".join(text for _, text in chunks) == answer.text
            assert tuple(token for ids, _ in chunks for token in ids) == answer.token_ids
    return [ear.heard() for ear in ears], [live.request.receipt for live in lives]


def hear(engine: Engine, requests: Sequence[Request], between: Between = lambda _: None) -> list[Heard]:
    """What the clients heard of requests served at once."""
    return serve(engine, requests, between)[0]


class Preempting:
    """Between steps, takes the blocks of every running sequence for which `wanted` holds, `times` times each."""

    def __init__(self, engine: Engine, wanted: Wanted, times: int = 3) -> None:
        self.engine, self.wanted, self.times = engine, wanted, times
        self.count: dict[tuple[str, int], int] = {}

    def __call__(self, lives: list[LiveRequest]) -> None:
        for live in lives:
            for sequence in live.request.sequences:
                name = live.request.request_id, sequence.index
                due = self.count.get(name, 0) < self.times and sequence.status is Status.RUNNING
                if due and self.wanted(live, sequence):
                    self.engine.scheduler.preempt(sequence)
                    self.engine.check()
                    self.count[name] = self.count.get(name, 0) + 1


class Rows:
    """Counts the rows that an engine's runner computes: the work itself, not the account of it."""

    def __init__(self, engine: Engine) -> None:
        self.computed = 0
        forward = engine.runner.forward

        def counting(pieces: Sequence[Piece], rows: Sequence[int]) -> object:
            self.computed += sum(len(piece.token_ids) for piece in pieces)
            return forward(pieces, rows)

        engine.runner.forward = counting  # type: ignore[method-assign, assignment]


def pool(blocks: int, block_size: int, kind: str = "llama", format: str = "bf16") -> int:
    """Bytes of a cache that holds `blocks` blocks of every layer group of a tiny model."""
    layout = CacheLayout(ModelSpec.from_config(KINDS[kind]()).layer_groups(), block_size, format)
    return blocks * sum(layout.block_sizes_bytes)


def assert_sums(totals: Receipt, receipts: Sequence[Receipt]) -> None:
    """The engine's counters are the sums over `receipts`, each of which is true in itself."""
    for receipt in receipts:
        assert (
            receipt.miss is None or receipt.reused_tokens + receipt.computed_tokens == receipt.prompt_tokens
        )
        assert receipt.reused_tokens <= receipt.prompt_tokens - 1
    for name in COUNTS:
        assert getattr(totals, name) == sum(getattr(receipt, name) for receipt in receipts), name
    assert sum((receipt.formats for receipt in receipts), start=type(totals.formats)()) == totals.formats
