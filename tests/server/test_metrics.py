"""Metrics are right at all times, and the Grafana dashboard asks for metrics that exist."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo import AsyncEngine
from support.serving import SMALL, Served, serving
from support.sizes import sized

ROOT = Path(__file__).parents[2]
CONTRACT = {
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "num_preemptions_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "prompt_tokens_total",
    "generation_tokens_total",
    "request_success_total",
}

Labels = frozenset[tuple[str, str]]


@pytest.fixture
def served(tiny: Callable[[str], Path]) -> Iterator[Served]:
    """An engine of its own, so that every count begins at 0, with room for 64 blocks and 4 sequences."""
    options = {
        **SMALL,
        "kv_cache_memory": 64 * 8192,
        "max_num_seqs": 4,
        "max_waiting": 8,
        "max_num_batched_tokens": 64,
    }
    engine = AsyncEngine(str(tiny("llama")), **options)
    with serving(engine) as server:
        yield server
    engine.close()


class Scrape:
    """One reading of `/metrics`."""

    def __init__(self, served: Served) -> None:
        with served.client() as client:
            response = client.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain")
        self.families = set(re.findall(r"^# TYPE (\S+) ", response.text, re.MULTILINE))
        self.samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                labels = frozenset((k, v) for k, v in sample.labels.items() if k != "model_name")
                self.samples.setdefault(sample.name, {})[labels] = sample.value

    def __getitem__(self, name: str) -> float:
        """The sum over all labels but the model's."""
        return sum(self.samples[f"octavo:{name}"].values())

    def by(self, name: str, label: str) -> dict[str, float]:
        """Values by one label."""
        return {dict(labels)[label]: value for labels, value in self.samples[f"octavo:{name}"].items()}

    @property
    def balances(self) -> bool:
        """Whether every request that was handed in is accounted for, and the usage is a share."""
        ended = (
            self["requests_finished_total"]
            + self["requests_cancelled_total"]
            + self["requests_rejected_total"]
        )
        now = self["num_requests_running"] + self["num_requests_waiting"]
        return self["requests_started_total"] == ended + now and 0 <= self["kv_cache_usage_perc"] <= 1


def complete(client: httpx.Client, prompt: Any, **more: Any) -> httpx.Response:
    return client.post(
        "/v1/completions", json={"model": "tiny", "prompt": prompt, "max_tokens": 5, "seed": 1, **more}
    )


def test_the_contract_is_kept(served: Served) -> None:
    with served.client() as client:
        complete(client, "x")
    samples = Scrape(served).samples
    assert {f"octavo:{name}" for name in CONTRACT} <= samples.keys()
    assert all(name.startswith("octavo:") for name in samples)
    with served.client() as client:
        text = client.get("/metrics").text
    assert 'octavo:num_requests_running{model_name="tiny"} 0.0' in text


def test_the_page_names_every_metric(served: Served) -> None:
    page = (ROOT / "docs" / "serving.md").read_text().partition("## Metrics")[2]
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    named = {f"octavo:{name}" for row in rows for name in re.findall(r"`(\w+)", row)}
    with served.client() as client:
        client.get("/health")
    families = {name for name in Scrape(served).families if not name.endswith("_created")}
    assert named == families


def test_counts_are_those_of_the_requests(served: Served) -> None:
    prompt = list(range(40))
    with served.client() as client:
        for body in (prompt, prompt, [*prompt[:20], *prompt[:20]]):
            assert complete(client, body).status_code == 200
        assert complete(client, prompt, n=2, max_tokens=7).status_code == 200
        assert complete(client, "x" * 2000).status_code == 400
        assert complete(client, [999]).status_code == 400
        assert client.get("/nowhere").status_code == 404
    found = Scrape(served)
    assert found.balances
    assert (found["requests_started_total"], found["requests_rejected_total"]) == (6, 2)
    assert found.by("request_success_total", "finished_reason") == {"length": 4, "stop": 0}
    assert (found["prompt_tokens_total"], found["generation_tokens_total"]) == (160, 3 * 5 + 2 * 7)
    assert (found["prefix_cache_queries_total"], found["prefix_cache_hits_total"]) == (160, 32 + 16 + 32)
    assert found["prompt_tokens_computed_total"] == 160 - 80
    assert found["time_to_first_token_seconds_count"] == found["e2e_request_latency_seconds_count"] == 4
    assert found["inter_token_latency_seconds_count"] == 3 * 4 + 2 * 6
    assert found["request_prompt_tokens_sum"] == 160
    assert found["request_generation_tokens_sum"] == 29
    statuses = {
        (dict(labels)["route"], dict(labels)["status"]): value
        for labels, value in found.samples["octavo:http_requests_total"].items()
    }
    assert statuses == {("/v1/completions", "200"): 4, ("/v1/completions", "400"): 2, ("other", "404"): 1}
    assert found["requests_aborted_total"] == 0


def test_memory_by_state_and_format(served: Served) -> None:
    with served.client() as client:
        complete(client, list(range(40)))
    found, stats = Scrape(served), served.ask(lambda engine: engine.stats())
    states = found.by("kv_cache_bytes", "state")
    assert sum(states.values()) == stats.bytes_total
    assert (states["running"], states["cached"]) == (0, stats.bytes_cached)
    assert found.by("kv_cache_blocks", "state") == {"open": 0, "sealed": 2}
    assert found.by("kv_cache_format_blocks", "format") == {"f32": 2}
    assert found.by("kv_cache_format_bytes", "format") == {"f32": stats.bytes_cached}
    assert found["kv_cache_written_blocks_total"] == 2


def test_formats_are_told_apart(tiny: Callable[[str], Path]) -> None:
    engine = AsyncEngine(str(tiny("llama")), **{**SMALL, "kv_cache_dtype": "int8", "block_size": 32})
    with serving(engine) as served:
        with served.client() as client:
            complete(client, list(range(100)))
        found, stats = Scrape(served), served.ask(lambda engine: engine.stats())
        blocks, sizes = (
            found.by("kv_cache_format_blocks", "format"),
            found.by("kv_cache_format_bytes", "format"),
        )
        assert blocks == stats.formats
        assert blocks["int8"] > 0
        assert sum(sizes.values()) == stats.bytes_cached
    engine.close()


class Streams:
    """Streams that are all left at once, wherever they are."""

    def __init__(self, served: Served, count: int) -> None:
        self._client = served.client(limits=httpx.Limits(max_connections=None))
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._read, args=(i,)) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def _read(self, number: int) -> None:
        body = {
            "model": "tiny",
            "prompt": [number] * 100,
            "max_tokens": 900,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            with self._client.stream("POST", "/v1/completions", json=body) as response:
                for _ in response.iter_lines():
                    if self._stop.is_set():
                        return
        except httpx.TransportError:
            pass

    def leave(self) -> None:
        """Close every connection."""
        self._stop.set()
        self._client.close()
        for thread in self._threads:
            thread.join(60)


def test_they_are_right_while_it_runs_and_idle_soon_after_a_mass_cancel(served: Served) -> None:
    for _ in range(sized(2, 10)):
        streams = Streams(served, 10)
        readings = [Scrape(served) for _ in range(10)]
        while readings[-1]["num_requests_running"] == 0:
            readings.append(Scrape(served))
        streams.leave()
        readings += [Scrape(served) for _ in range(5)]
        for _ in range(1000):
            last = Scrape(served)
            readings.append(last)
            if last["num_requests_running"] + last["num_requests_waiting"] == 0:
                break
            threading.Event().wait(0.01)
        assert all(reading.balances for reading in readings)
        assert max(reading["num_requests_running"] for reading in readings) > 0
        assert (last["num_requests_running"], last["num_requests_waiting"]) == (0, 0)
        assert last["kv_cache_usage_perc"] == 0
    aborted = last.by("requests_aborted_total", "reason")
    assert 0 < last["requests_cancelled_total"] <= aborted["disconnect"] <= 10 * sized(2, 10)
    assert sum(aborted.values()) == aborted["disconnect"]


def test_a_client_that_does_not_wait_for_its_answer_is_counted(served: Served) -> None:
    body = {"model": "tiny", "prompt": [1] * 100, "max_tokens": 900, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    with socket.create_connection((served.host, served.port), timeout=60) as connection:
        connection.sendall(head.encode() + data)
        while Scrape(served)["num_requests_running"] == 0:
            pass
    for _ in range(1000):
        found = Scrape(served)
        if found["requests_aborted_total"] and found["requests_cancelled_total"]:
            break
        threading.Event().wait(0.01)
    assert found.balances
    assert (
        found.by("requests_aborted_total", "reason")["disconnect"] == found["requests_cancelled_total"] == 1
    )
    assert found.by("http_requests_total", "status")["499"] == 1


def test_an_engine_that_does_not_answer_shows(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.server.admin.PATIENCE_S", 0.2)
    assert Scrape(served)["engine_up"] == 1
    hold = threading.Event()
    blocked = served.engine.ask(lambda _: hold.wait(60))
    try:
        found = Scrape(served)
        assert found["engine_up"] == 0
        assert "octavo:num_requests_running" not in found.samples
    finally:
        hold.set()
        blocked.result(60)
    assert Scrape(served)["engine_up"] == 1


def test_the_dashboard_asks_for_metrics_that_exist(served: Served) -> None:
    with served.client() as client:
        complete(client, "x")
    found = Scrape(served)
    samples = found.samples
    page = json.loads((ROOT / "docs" / "grafana.json").read_text())
    asked = [target["expr"] for panel in page["panels"] for target in panel["targets"]]
    asked += [v["query"]["query"] for v in page["templating"]["list"] if v["type"] == "query"]
    names = {name for text in asked for name in re.findall(r"octavo:\w+", text)}
    assert len(names) > 25
    assert names <= samples.keys() | found.families
    for text in asked:
        for by in re.findall(r"sum by \(([^)]*)\) \((?:rate\()?(octavo:\w+)", text):
            wanted = {label.strip() for label in by[0].split(",")}
            if by[1] in samples:  # nothing was reclaimed, so no reason is known yet
                assert wanted <= {label for labels in samples[by[1]] for label, _ in labels}, text
    ids = [panel["id"] for panel in page["panels"]]
    assert len(set(ids)) == len(ids)
