"""Prometheus metrics, read from the engine when they are asked for, so that they are right at all times."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram


class Metrics:
    """What only the server counts: HTTP requests, and answers that were given up."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "octavo:http_requests",
            "HTTP requests that were answered.",
            ["method", "route", "status"],
            registry=self.registry,
        )
        self._seconds = Histogram(
            "octavo:http_request_duration_seconds",
            "From the end of a request's headers to the end of its response.",
            ["route"],
            registry=self.registry,
        )
        self._aborted = Counter(
            "octavo:requests_aborted",
            "Requests that were given up before their answer was complete.",
            ["reason"],
            registry=self.registry,
        )
        for reason in ("disconnect", "slow_client", "shutdown", "error"):
            self._aborted.labels(reason)

    def answered(self, route: str, method: str, status: int, seconds: float) -> None:
        """One HTTP request has ended. `route` is a path with its parameters unfilled, so that labels stay few."""
        self._requests.labels(method if method in ("GET", "POST") else "other", route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def aborted(self, reason: str) -> None:
        """The answer to a request was given up."""
        self._aborted.labels(reason).inc()
