"""More clients than there is room for: each gets the right answer or is told to come back, and health stays green."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo import AsyncEngine
from octavo.engine import Engine
from support.load import Heard, Refused, Stream, ask
from support.serving import SMALL, Served, serving
from support.sizes import sized

CLIENTS = sized(64, 200)
EACH = sized(3, 5)
"""Requests of each client, one after the other."""
MAX_NUM_SEQS = 16
MAX_WAITING = 32

PROMPTS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": f"Client {i}: " + "tell me more. " * (i + 1)}],
        "max_tokens": 8 + 4 * i,
        "temperature": (0, 0.9)[i % 2],
        "seed": i,
        "stream_options": {"include_usage": True},
    }
    for i in range(10)
]


@pytest.fixture
def server(tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path))
    engine = AsyncEngine(str(tiny("llama")), **SMALL, max_num_seqs=MAX_NUM_SEQS, max_waiting=MAX_WAITING)
    with serving(engine) as served:
        yield served
    engine.close()


class Crowd:
    """Clients that ask at the same time, several times each."""

    def __init__(self, server: Served, expected: list[Heard]) -> None:
        self._server = server
        self._expected = expected
        self._start = threading.Barrier(CLIENTS + 1)
        self._lock = threading.Lock()
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._threads = [threading.Thread(target=self._client, args=(i,)) for i in range(CLIENTS)]

    def run(self) -> None:
        """Let them ask, and look after the server's health until all have been answered."""
        for thread in self._threads:
            thread.start()
        self._start.wait(60)
        with self._server.client() as client:
            while any(thread.is_alive() for thread in self._threads):
                health = client.get("/health")
                self._count(f"health {health.status_code}")
                scheduler = self._server.ask(
                    lambda engine: (len(engine.scheduler.running), len(engine.scheduler.waiting))
                )
                assert scheduler[0] <= MAX_NUM_SEQS
                assert sum(scheduler) <= MAX_NUM_SEQS + MAX_WAITING
        for thread in self._threads:
            thread.join()

    def _count(self, what: str) -> None:
        with self._lock:
            self.answers[what] += 1

    def _client(self, index: int) -> None:
        self._start.wait(60)
        for turn in range(EACH):
            which = (index + turn) % len(PROMPTS)
            name = f"client-{index}-{turn}"
            stream = Stream(self._server, name, PROMPTS[which])
            try:
                stream.send()
                if stream.hear() != self._expected[which]:
                    self.wrong.append(name)
                self._count("answered")
            except Refused as refused:
                error = refused.body["error"]
                if (refused.status, error["code"]) != (503, "overloaded") or int(
                    refused.headers["retry-after"]
                ) < 1:
                    self.wrong.append(f"{name}: {refused}")
                self._count("refused")
            except Exception as error:
                self.wrong.append(f"{name}: {error!r}")
            finally:
                stream.close()


def test_an_overload_ends_in_right_answers_and_refusals(server: Served) -> None:
    expected = [ask(server, f"alone-{i}", body)[0] for i, body in enumerate(PROMPTS)]
    crowd = Crowd(server, expected)
    crowd.run()
    assert crowd.wrong == []
    assert crowd.answers["answered"] + crowd.answers["refused"] == CLIENTS * EACH
    assert crowd.answers["answered"] >= MAX_NUM_SEQS + MAX_WAITING
    assert crowd.answers["refused"] > 0
    assert {name for name in crowd.answers if name.startswith("health")} == {"health 200"}

    def check(engine: Engine) -> None:
        engine.check()
        stats, totals = engine.stats(), engine.totals()
        assert (stats.running, stats.waiting, stats.blocks["open"], stats.bytes_running) == (0, 0, 0, 0)
        assert totals.rejected == crowd.answers["refused"]
        assert totals.started == sum(totals.finished.values()) + totals.rejected

    server.ask(check)
    with server.client() as client:
        metrics = dict(
            line.rsplit(" ", 1)
            for line in client.get("/metrics").text.splitlines()
            if not line.startswith("#")
        )
    gauges = {name.partition("{")[0]: float(value) for name, value in metrics.items()}
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert gauges[f"octavo:{gauge}"] == 0
