"""Clients hang up at any moment: whoever stays gets the right answer, and nothing of the others remains."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngine
from octavo.engine import Engine
from support.load import LEFT, Heard, Stream, ask, resident_bytes
from support.serving import SMALL, Served, serving
from support.sizes import sized

BLOCKS = 128
BLOCK_BYTES = 8192
"""Of the tiny llama in float32."""
STREAMS = 12
SECONDS = sized(4.0, 180.0)
ROUNDS = sized(20, 1000)
MIB = 1024**2
MOMENTS = ("queued", "prefill", "decode", "complete")

# Prompts of up to 44 of the 128 blocks, so that most streams wait, and preempt each other when they run.
PROMPTS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": f"{i}" + "abcdefghij"[i % 10] * (250 + 37 * i)}],
        "max_tokens": 60 + 5 * i,
        "temperature": (0, 0.9)[i % 2],
        "seed": i,
    }
    for i in range(STREAMS)
]


@pytest.fixture
def server(tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    engine = AsyncEngine(
        str(tiny("llama")), **{**SMALL, "kv_cache_memory": BLOCKS * BLOCK_BYTES, "max_num_batched_tokens": 64}
    )
    with serving(engine) as served:
        yield served
    engine.close()


def until_idle(server: Served) -> None:
    """Wait until nothing runs or waits, then check the books."""
    for _ in range(600):
        if not server.ask(lambda engine: engine.has_work):
            break
        time.sleep(0.05)

    def check(engine: Engine) -> None:
        engine.check()
        stats, totals = engine.stats(), engine.totals()
        assert (stats.running, stats.waiting, stats.blocks["open"], stats.bytes_running) == (0, 0, 0, 0)
        assert totals.started == sum(totals.finished.values()) + totals.cancelled + totals.rejected

    server.ask(check)


class Storm:
    """Streams that are opened again as soon as they end, and one who hangs up on them at moments of his choice."""

    def __init__(self, server: Served, expected: list[Heard]) -> None:
        self._server = server
        self._expected = expected
        self._lock = threading.Lock()
        self._open: dict[str, Stream] = {}
        self._names = 0
        self._over = threading.Event()
        self.survived = 0
        self.dropped: Counter[str] = Counter()
        self.resident: list[int] = []
        """Memory of this process, as time went on."""
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._stream, args=(i,)) for i in range(STREAMS)]

    def run(self, seconds: float) -> None:
        """The storm, and then silence: what is still open is hung up on at once."""
        dice = random.Random(7)
        for thread in self._threads:
            thread.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            time.sleep(dice.uniform(0.05, 0.3))
            self._drop_one(dice)
            self.resident.append(resident_bytes())
        self._over.set()
        with self._lock:
            for stream in self._open.values():
                stream.drop(reset=True)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()

    def _drop_one(self, dice: random.Random) -> None:
        """Hang up on one stream, at the moment that was least often tried so far if there is one."""
        moments = self._server.ask(moments_of)
        with self._lock:
            found: dict[str, list[Stream]] = {}
            for name, stream in self._open.items():
                moment = "complete" if stream.complete else moments.get(name)
                if moment is not None:
                    found.setdefault(moment, []).append(stream)
            if not found:
                return
            moment = min(found, key=lambda m: (self.dropped[m], m))
            dice.choice(found[moment]).drop(reset=dice.random() < 0.5)
            self.dropped[moment] += 1

    def _stream(self, index: int) -> None:
        dice = random.Random(index)
        while not self._over.is_set():
            which = dice.randrange(len(PROMPTS))
            with self._lock:
                self._names += 1
                stream = Stream(self._server, f"stream-{self._names}", PROMPTS[which])
                self._open[stream.name] = stream
            try:
                stream.send()
                heard = stream.hear()
                self.survived += 1
                if heard != self._expected[which]:
                    self.wrong.append(stream.name)
                self._over.wait(dice.uniform(0, 0.1))  # so that some are hung up on after their last token
            except LEFT as error:
                if not (stream.dropped or self._over.is_set()):
                    self.wrong.append(f"{stream.name}: {error!r}")
            finally:
                with self._lock:
                    del self._open[stream.name]
                stream.close()


def moments_of(engine: Engine) -> dict[str, str]:
    """What each request in the engine is waiting for."""
    waiting = {s.request.request_id: "queued" for s in engine.scheduler.waiting}
    return waiting | {
        s.request.request_id: "decode" if s.output_token_ids else "prefill" for s in engine.scheduler.running
    }


def test_hang_ups_harm_nobody_and_leave_nothing(server: Served) -> None:
    expected = [ask(server, f"alone-{i}", body)[0] for i, body in enumerate(PROMPTS)]
    Storm(server, expected).run(0.5)
    until_idle(server)
    before = server.ask(Engine.totals)
    storm = Storm(server, expected)
    storm.run(SECONDS)
    heard, receipt = ask(server, "next", PROMPTS[3])
    after = server.ask(Engine.totals)
    storm.join()
    until_idle(server)
    assert storm.wrong == []
    assert storm.survived > 0
    assert set(storm.dropped) == set(MOMENTS)
    # Those far from their end were ended; others may have reached it before it was noticed.
    assert after.cancelled - before.cancelled >= storm.dropped["queued"]
    assert heard == expected[3]
    assert receipt["preemptions"] == 0
    # In the first half logs and caches fill up to their bounds.
    assert storm.resident[-1] - storm.resident[len(storm.resident) // 2] < 8 * MIB


def test_a_turn_that_is_dropped_is_followed_by_the_next_at_once(server: Served) -> None:
    def turns(topic: int) -> list[dict[str, Any]]:
        first: dict[str, Any] = {"role": "user", "content": f"Topic {topic}. " + "words " * 60}
        answer = {"role": "assistant", "content": "So be it. " * 4}
        return [first, answer, {"role": "user", "content": f"Turn two of {topic}."}]

    def body(messages: list[dict[str, Any]], tokens: int) -> dict[str, Any]:
        return {"messages": messages, "max_tokens": tokens, "ignore_eos": True, "seed": 11}

    def third(topic: int) -> dict[str, Any]:
        return body([*turns(topic)[:2], {"role": "user", "content": f"Turn three of {topic}."}], 16)

    topics = range(5)
    expected = [ask(server, f"alone-{topic}", third(topic))[0] for topic in topics]
    dice = random.Random(3)
    resident = 0
    for number in range(ROUNDS):
        topic = number % len(topics)
        second = Stream(server, f"second-{number}", body(turns(topic), 400))
        second.send()
        chunks = second.chunks()
        for _ in range(dice.randrange(4)):
            next(chunks)
        second.drop(reset=dice.random() < 0.5)
        second.close()
        heard, receipt = ask(server, f"third-{number}", third(topic))
        assert heard == expected[topic]
        assert receipt["reused_tokens"] >= len("B<user>Topic 0.") // 16 * 16
        assert receipt["preemptions"] == 0
        if number == ROUNDS // 4:
            resident = resident_bytes()
    until_idle(server)
    totals = server.ask(Engine.totals)
    assert sum(totals.finished.values()) == len(topics) + ROUNDS  # no dropped turn ran to its end
    assert ROUNDS // 2 < totals.cancelled <= ROUNDS  # some left before they arrived
    assert resident_bytes() - resident < 8 * MIB
