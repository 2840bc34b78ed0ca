"""A relay's figures as Prometheus metrics, for the relay itself and for the hub that embeds one."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


def metrics_of(figures: Mapping[str, float]) -> Iterator[Metric]:
    """What is named `..._total` only grows; the rest is how things stand."""
    for name, value in figures.items():
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        text = f"The relay's {name.removesuffix('_total').replace('_', ' ')}."
        yield kind(f"kvasir_relay_{name}", text, value)
