"""Prometheus metrics. Counts and gauges are read from the engine when they are asked for, in one go between two
steps, so that they are right at all times and agree with each other; latencies are observed as they happen."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine import Engine, EngineStats
from octavo.live import LiveRequest
from octavo.watch import EngineTotals, Observer

ABORTED = ("disconnect", "slow_client", "shutdown", "error")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_GAPS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
_TOKENS = tuple(float(4**power) for power in range(11))


class Latencies(Observer):
    """What requests took, as histograms. Belongs to the engine's thread; reading them is safe from any."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        def histogram(name: str, text: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            made = Histogram(f"octavo:{name}", text, ["model_name"], registry=registry, buckets=buckets)
            return made.labels(model)

        self._first = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._gaps = histogram("inter_token_latency_seconds", "Between two tokens of an answer.", _GAPS)
        self._whole = histogram("e2e_request_latency_seconds", "From arrival to the end of the last answer.")
        self._queued = histogram("request_queue_time_seconds", "From arrival to the first step.")
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.")
        self._prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self._generated = histogram(
            "request_generation_tokens", "Tokens of all answers to a request.", _TOKENS
        )

    def first_token(self, live: LiveRequest) -> None:
        """See `Observer`."""
        timing = live.timing
        if timing.first_token is not None:
            self._first.observe(timing.first_token - timing.arrived)

    def token_gaps(self, seconds: Sequence[float]) -> None:
        """See `Observer`."""
        for gap in seconds:
            self._gaps.observe(gap)

    def ended(self, live: LiveRequest, reason: str) -> None:
        """See `Observer`. Requests that were aborted do not count: how long they would have taken nobody knows."""
        timing, receipt = live.timing, live.request.receipt
        if reason == "abort" or timing.ended is None:
            return
        self._whole.observe(timing.ended - timing.arrived)
        self._prompt.observe(receipt.prompt_tokens)
        self._generated.observe(receipt.completion_tokens)
        if timing.admitted is not None:
            self._queued.observe(timing.admitted - timing.arrived)
            if timing.first_token is not None:
                self._prefill.observe(timing.first_token - timing.admitted)
        if timing.first_token is not None and timing.last_token is not None:
            self._decode.observe(timing.last_token - timing.first_token)


@dataclass(frozen=True)
class Reading:
    """The engine at one moment."""

    totals: EngineTotals
    stats: EngineStats
    format_bytes: Mapping[str, int]

    @classmethod
    def of(cls, engine: Engine) -> Reading:
        """Taken in the engine's thread."""
        sizes = Counts({engine.layout.format: 0})
        for block in engine.cache.pool.blocks:
            sizes[block.format.name] += block.nbytes
        return cls(engine.totals(), engine.stats(), sizes)


class _ReadingCollector(Collector):
    """One reading as metrics."""

    def __init__(self, reading: Reading, model: str) -> None:
        self._totals = reading.totals
        self._stats = reading.stats
        self._format_bytes = reading.format_bytes
        self._model = model

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        yield from self._requests()
        yield from self._tokens()
        yield from self._cache()

    def _requests(self) -> Iterator[Metric]:
        t = self._totals
        yield self._gauge("num_requests_running", "Requests that are computed.", t.running)
        yield self._gauge("num_requests_waiting", "Requests that wait for their turn.", t.waiting)
        yield self._counter("requests_started", "Requests that were handed in.", t.started)
        yield self._counter("requests_cancelled", "Requests that were aborted.", t.cancelled)
        yield self._counter(
            "requests_rejected", "Requests that were refused: impossible, or no room.", t.rejected
        )
        finished = {"stop": 0, "length": 0, "error": 0} | t.finished
        yield self._counters(
            "requests_finished", "Requests that ended by themselves.", "finished_reason", finished
        )
        answered = {reason: count for reason, count in finished.items() if reason != "error"}
        yield self._counters("request_success", "Requests that were answered.", "finished_reason", answered)
        yield self._counter("num_preemptions", "Running requests that were put back.", t.preemptions)
        yield self._counter("engine_steps", "Forward passes.", t.steps)

    def _tokens(self) -> Iterator[Metric]:
        t = self._totals
        yield self._counter("prompt_tokens", "Tokens of prompts.", t.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens that were generated.", t.generated_tokens)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked for in the cache.", t.queried_tokens
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found there.", t.reused_tokens)
        yield self._counter("prompt_tokens_computed", "Prompt tokens not found there.", t.computed_tokens)
        yield self._counter(
            "recomputed_tokens", "Positions computed again after a preemption.", t.recomputed_tokens
        )
        yield self._counter(
            "dropped_positions", "Positions dropped by a context policy.", t.dropped_positions
        )

    def _cache(self) -> Iterator[Metric]:
        s, t = self._stats, self._totals
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of the cache that running requests hold.",
            s.bytes_running / s.bytes_total,
        )
        states = {"free": s.bytes_free, "running": s.bytes_running, "cached": s.bytes_cached}
        yield self._gauges("kv_cache_bytes", "Bytes of the cache.", "state", states)
        yield self._gauge("kv_cache_pinned_bytes", "Bytes of pinned blocks.", s.bytes_pinned)
        yield self._gauges("kv_cache_blocks", "Blocks that hold something.", "state", s.blocks)
        formats = dict.fromkeys(self._format_bytes, 0) | s.formats
        yield self._gauges("kv_cache_format_blocks", "Blocks that hold something.", "format", formats)
        yield self._gauges("kv_cache_format_bytes", "Bytes of these blocks.", "format", self._format_bytes)
        yield self._counter("kv_cache_written_blocks", "Blocks that were filled.", t.written_blocks)
        yield self._counters(
            "kv_cache_folded_blocks", "Cached blocks that were made smaller.", "format", t.folded_blocks
        )
        yield self._counters(
            "kv_cache_reclaimed_blocks", "Cached blocks that were taken back.", "reason", t.reclaimed_blocks
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"octavo:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = GaugeMetricFamily(f"octavo:{name}", text, labels=["model_name", label])
        for value, count in values.items():
            family.add_metric([self._model, value], count)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"octavo:{name}", text, labels=["model_name"])
        family.add_metric([self._model], value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"octavo:{name}", text, labels=["model_name", label])
        for value, count in values.items():
            family.add_metric([self._model, value], count)
        return family


class Metrics:
    """All metrics of a server, and the counts that it keeps itself: HTTP requests, and answers given up."""

    def __init__(self, model: str, info: Mapping[str, str]) -> None:
        self._model = model
        self._registry = CollectorRegistry()
        self.latencies = Latencies(self._registry, model)
        registry = self._registry
        about = Gauge("octavo:info", "What is served, as labels.", ["model_name", *info], registry=registry)
        about.labels(model, *info.values()).set(1)
        self._up = Gauge("octavo:engine_up", "1 while the engine answers.", ["model_name"], registry=registry)
        self._requests = Counter(
            "octavo:http_requests", "HTTP requests.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "octavo:http_request_duration_seconds",
            "From the end of a request's headers to the end of its response.",
            ["route"],
            registry=registry,
            buckets=_SECONDS,
        )
        self._aborted = Counter(
            "octavo:requests_aborted", "Answers that were given up, and why.", ["reason"], registry=registry
        )
        for reason in ABORTED:
            self._aborted.labels(reason)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """One HTTP request has ended. `route` is a path with its parameters unfilled, so that labels stay few."""
        self._requests.labels(method if method in ("GET", "POST") else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def aborted(self, reason: str) -> None:
        """An answer was given up: one of `ABORTED`."""
        self._aborted.labels(reason).inc()

    def render(self, reading: Reading | None) -> bytes:
        """The text that Prometheus reads; None says that the engine does not answer."""
        self._up.labels(self._model).set(0 if reading is None else 1)
        text = generate_latest(self._registry)
        if reading is None:
            return text
        registry = CollectorRegistry()
        registry.register(_ReadingCollector(reading, self._model))
        return text + generate_latest(registry)
