"""Prometheus metrics of the bridge: request counts and times; the ring's own come at scrape time.

Names end as those of other serving engines do (`..._time_to_first_token_seconds`), with the prefix
`kvasir_`. No label takes a value that a client chose.
"""

from collections.abc import Iterable
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.registry import Collector

from kvasir_core.microbatch import FinishReason

METHODS = frozenset({"GET", "POST", "HEAD"})
OTHER = "other"
MODEL_PREFIX = "/v1/models/"
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
SHORT_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Meters:
    """One bridge's metrics, in a registry of their own.

    Args:
        routes: Path templates that may stand in the `route` label; any other path is `other`.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # They double the series and tell nothing we need.
        self._routes = frozenset(routes)
        self.registry = CollectorRegistry()
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", SECONDS
        )
        self._gap = self._histogram(
            "inter_token_latency_seconds", "Between two tokens of a request.", SHORT_SECONDS
        )
        self._whole = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the end of the request.", SECONDS
        )
        self._queue = self._histogram(
            "request_queue_time_seconds", "From arrival to admission into the ring.", SECONDS
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of admitted requests.")
        self._tokens = self._counter("generation_tokens", "Tokens the ring has generated.")
        self._rejected = self._counter("requests_rejected", "Requests refused: the queue is full.")
        ended = Counter(
            "kvasir_request_success",
            "Ended requests by finish reason.",
            ["finished_reason"],
            registry=self.registry,
        )
        self._ended = {reason: ended.labels(str(reason)) for reason in FinishReason}
        self._http = Counter(
            "kvasir_http_requests",
            "HTTP answers by route, method and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"kvasir_{name}", text, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"kvasir_{name}", text, registry=self.registry)

    def token(self, now: float, arrived: float, last_token: float) -> None:
        """A request got a token; `last_token` is 0 for its first."""
        self._tokens.inc()
        if last_token:
            self._gap.observe(now - last_token)
        else:
            self._first_token.observe(now - arrived)

    def admitted(self, queued_s: float) -> None:
        self._queue.observe(queued_s)

    def prompt_tokens(self, count: int) -> None:
        self._prompt_tokens.inc(count)

    def rejected(self) -> None:
        self._rejected.inc()

    def ended(self, reason: FinishReason, seconds: float) -> None:
        self._ended[reason].inc()
        self._whole.observe(seconds)

    def answered(self, scope: Any, status: int, _seconds: float) -> None:
        route = scope["path"] if scope["path"] in self._routes else OTHER
        if scope["path"].startswith(MODEL_PREFIX):
            route = MODEL_PREFIX + "{model}"
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self._http.labels(route, method, str(status)).inc()

    def add(self, collector: Collector) -> None:
        self.registry.register(collector)

    def text(self) -> bytes:
        return generate_latest(self.registry)
