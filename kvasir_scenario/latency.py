"""Percentiles of latencies: exact up to a limit, then within one part in four thousand."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvasir_core.units import NANOS_PER_SECOND
from kvasir_scenario.tables import Floats, Ints

QUANTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0}
SAMPLES_MIN = {"p50": 2, "p90": 10, "p99": 100}  # One sample, at least, lies beyond the percentile.
EXACT_MAX = 1 << 23  # Samples kept one by one: 64 MB.
BUCKET_BITS = 12  # A bucket is 2^-12 of its value wide: an error of 0.02 % at most.
BUCKETS = (64 - BUCKET_BITS) << BUCKET_BITS


@dataclass(frozen=True, slots=True)
class Quantiles:
    """A distribution in seconds; all None without samples.

    Attributes:
        few_samples: Percentiles with too few samples to be trusted (`SAMPLES_MIN`).
    """

    n: int
    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    few_samples: tuple[str, ...]


def quantiles_of(latencies_ns: Ints | Floats) -> Quantiles:
    """Quantiles of samples that are all at hand."""
    count = latencies_ns.size
    if not count:
        return Quantiles(0, None, None, None, None, tuple(SAMPLES_MIN))
    mean = float(latencies_ns.sum()) / count / NANOS_PER_SECOND
    return _quantiles(count, mean, np.percentile(latencies_ns, list(QUANTILES.values())).tolist())


def _quantiles(count: int, mean_s: float, percentiles_ns: Sequence[float]) -> Quantiles:
    p50, p90, p99 = (value / NANOS_PER_SECOND for value in percentiles_ns)
    few = tuple(name for name, least in SAMPLES_MIN.items() if count < least)
    return Quantiles(count, mean_s, p50, p90, p99, few)


class LatencySamples:
    """Collects latencies in nanoseconds."""

    __slots__ = ("_buckets", "_chunks", "count", "total_ns")

    def __init__(self) -> None:
        self.count = 0
        self.total_ns = 0
        self._chunks: list[Ints] = []
        self._buckets: Ints | None = None  # Counts per bucket, once there are too many samples.

    def add(self, latencies_ns: Ints) -> None:
        """Take in samples, each at least 0."""
        if not latencies_ns.size:
            return
        self.count += latencies_ns.size
        self.total_ns += int(latencies_ns.sum())
        self._chunks.append(latencies_ns)
        if self.count > EXACT_MAX:
            self._condense()

    def _condense(self) -> None:
        if self._buckets is None:
            self._buckets = np.zeros(BUCKETS, np.int64)
        for chunk in self._chunks:
            self._buckets += np.bincount(_bucket_of(chunk), minlength=BUCKETS)
        self._chunks.clear()

    @property
    def is_exact(self) -> bool:
        return self._buckets is None

    def quantiles(self) -> Quantiles:
        """Mean (always exact) and percentiles by linear interpolation."""
        if self._buckets is None:
            self._chunks = [np.concatenate(self._chunks)] if self._chunks else []
            return quantiles_of(self._chunks[0] if self._chunks else np.empty(0, np.int64))
        mean = self.total_ns / self.count / NANOS_PER_SECOND
        return _quantiles(self.count, mean, self._from_buckets(self._buckets))

    def _from_buckets(self, buckets: Ints) -> list[float]:
        upto = np.cumsum(buckets)
        values = []
        for percent in QUANTILES.values():
            rank = percent / 100 * (self.count - 1)
            low, high = (
                _middle_of(int(np.searchsorted(upto, whole, side="right")))
                for whole in (int(rank), min(int(rank) + 1, self.count - 1))
            )
            values.append(low + (high - low) * (rank % 1))
        return values


def _bucket_of(values: Ints) -> Ints:
    """Values below 2^13 have their own bucket; above, the 13 leading bits choose it."""
    exponent = np.frexp(values.astype(np.float64))[1].astype(np.int64)
    shift = np.maximum(exponent - BUCKET_BITS - 1, 0)
    bucket: Ints = (shift << BUCKET_BITS) + (values >> shift)
    return bucket


def _middle_of(bucket: int) -> float:
    shift = max((bucket >> BUCKET_BITS) - 1, 0)
    low = (bucket - (shift << BUCKET_BITS)) << shift
    return low + ((1 << shift) - 1) / 2
