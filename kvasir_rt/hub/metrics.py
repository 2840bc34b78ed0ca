"""Prometheus metrics of the hub. No label takes a value that a client chose.

Models are named by coordinators with the service token, 64 at most; workers are counted, not named.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvasir_rt.hub.access import Gate
from kvasir_rt.hub.relaying import RelayMount
from kvasir_rt.hub.service import HubService
from kvasir_rt.relay.meters import metrics_of

METHODS = frozenset({"GET", "POST", "DELETE", "HEAD"})
OTHER = "other"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTS = {
    "claims_granted": "Slices assigned.",
    "claims_confirmed": "Claims that coverage took the place of.",
    "claims_lapsed": "Claims that nobody confirmed in time.",
    "recruits_above_target": "Claims for what had enough replicas.",
    "target_changes": "Times that a model's target changed.",
    "releases": "Slices that workers were told to stop serving.",
    "workers_lost": "Workers without a heartbeat for the coverage TTL.",
    "polls_missed": "Polls of coordinators without a good answer in time.",
    "clock_jumps": "Times that the hub slept, or its clock jumped.",
}
MODEL_GAUGES = {
    "busy": "Busy slots of coordinators with a valid reading.",
    "slots": "Slots of coordinators with a valid reading.",
    "recruiting": "1 while the model's target is raised.",
    "effective_target": "Replicas wanted of workers.",
    "workers": "Workers with coverage.",
}


class HubCollector(Collector):
    """The core's numbers, read at scrape time."""

    def __init__(self, service: HubService, gate: Gate, relay: RelayMount | None) -> None:
        self._service = service
        self._gate = gate
        self._relay = relay

    def collect(self) -> Iterator[Metric]:
        hub = self._service.control.hub
        found = hub.statistics()
        for name, text in COUNTS.items():
            yield _counter(name, text, getattr(found, name))
        yield _gauge("claims_open", "Claims not confirmed yet.", found.claims_open)
        yield _gauge(
            "workers_connected", "Workers on the relay.", sum(n.is_connected for n in found.nodes)
        )
        models = hub.recruitment().models
        for name, text in MODEL_GAUGES.items():
            family = GaugeMetricFamily(f"kvasir_hub_model_{name}", text, labels=["model"])
            for model in models:
                family.add_metric([model.model], float(getattr(model, name)))
            yield family
        yield from self._shell()

    def _shell(self) -> Iterator[Metric]:
        service = self._service
        yield _gauge("coordinators", "Registered coordinators.", len(service.registry.heard))
        yield _gauge("tokens_live", "Nodes with a valid token.", service.keeper.tokens_live)
        yield _counter("auth_failures", "Wrong tokens and signatures.", service.keeper.failures)
        yield _counter("slowed", "Requests refused by a rate limit.", self._gate.slowed)
        yield _counter("events", "Facts the core has taken.", service.control.events_taken)
        yield _gauge(
            "state_unwritten", "1 while the database fails.", bool(service.control.store_problem)
        )
        slices = service.slices
        yield _gauge("slices_bytes", "Slices on disk.", slices.bytes_held)
        yield _gauge("downloads", "Downloads under way.", slices.downloads)
        yield _counter("slices_cut", "Slices cut from model files.", slices.cuts)
        yield _counter("slices_sent_bytes", "Bytes of slices sent.", slices.bytes_sent)
        if self._relay is not None:
            yield from metrics_of(self._relay.figures())


class HubMeters:
    """The registry, and the counts of HTTP answers.

    Args:
        routes: Path templates that may stand in the `route` label; any other path is `other`.
    """

    def __init__(self, routes: Iterable[str]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # They double the series and tell nothing we need.
        self._routes = frozenset(routes)
        self.registry = CollectorRegistry()
        self._http = Counter(
            "kvasir_hub_http_requests",
            "HTTP answers by route, method and status.",
            ["route", "method", "status"],
            registry=self.registry,
        )

    def answered(self, scope: Any, status: int, _seconds: float) -> None:
        route = getattr(scope.get("route"), "path_format", OTHER)
        method = scope["method"] if scope["method"] in METHODS else OTHER
        self._http.labels(route if route in self._routes else OTHER, method, str(status)).inc()

    def add(self, collector: Collector) -> None:
        self.registry.register(collector)

    def text(self) -> bytes:
        return generate_latest(self.registry)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvasir_hub_{name}", text, value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvasir_hub_{name}", text, value)
