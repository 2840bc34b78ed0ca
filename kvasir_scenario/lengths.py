"""Numbers by distribution: lengths in tokens, durations in seconds.

The k-th draw of a stream depends on the seed and on k alone, not on how many are drawn at a time
or in all.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import log
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kvasir_core.units import NANOS_PER_SECOND
from kvasir_scenario.schema_workload import TOKENS_MAX, Distribution

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_NORMAL = NormalDist()
_EDGE = 1e-4  # Where the least and the most of ten thousand draws are expected.
_SECONDS_MAX = 1 << 30  # 34 years; as nanoseconds, sums of two still fit an int64.


class Sampler(Protocol):
    """Draws numbers of at least 0."""

    def draw(self, rng: np.random.Generator, count: int, /) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    value: float

    def draw(self, _rng: np.random.Generator, count: int) -> Floats:
        return np.full(count, float(self.value))


@dataclass(frozen=True, slots=True)
class Uniform:
    """From `low` to `high`: every whole number equally often, or every real one."""

    low: float
    high: float
    is_whole: bool

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        if self.is_whole:
            return np.floor(self.low + rng.random(count) * (self.high - self.low + 1))
        return self.low + rng.random(count) * (self.high - self.low)


@dataclass(frozen=True, slots=True)
class Curve:
    """The inverse CDF as a line through points, over the normal score of the percentile.

    The line's value is the logarithm (two points make a lognormal, more bend it), or the number
    itself where one of the points is 0. Below the lowest point the line goes on.
    """

    scores: tuple[float, ...]  # Normal scores, ascending.
    values: tuple[float, ...]  # Logarithms or numbers, not falling.
    is_log: bool
    low: float = 0.0
    high: float = float(_SECONDS_MAX)

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        score = rng.standard_normal(count)
        x, y = self.scores, self.values
        line = np.interp(score, x, y)
        if len(x) > 1:
            low_slope = (y[1] - y[0]) / (x[1] - x[0])
            high_slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
            line += np.minimum(score - x[0], 0) * low_slope
            line += np.maximum(score - x[-1], 0) * high_slope
        if self.is_log:
            return np.clip(np.exp(np.minimum(line, log(self.high))), self.low, None)
        return np.clip(line, self.low, self.high)


def lognormal(median: float, p90: float) -> Curve:
    """The lognormal with this median and 90th percentile, tail and all."""
    return Curve((0.0, _NORMAL.inv_cdf(0.9)), (log(median), log(p90)), is_log=True)


def percentiles(points: Mapping[float, float]) -> Curve:
    """Through these percentiles (from 0 to 100, with values that do not fall).

    Nothing is above the highest value given: it stands for all percentiles beyond its own, so give
    99 or 100. Below the lowest percentile the line goes on, down to the value of 0 if given. A
    normal score has no ends, so 0 and 100 stand at 0.01 and 99.99. One point is a constant.
    """
    is_log = all(value > 0 for value in points.values())
    line = {
        _NORMAL.inv_cdf(min(max(p / 100, _EDGE), 1 - _EDGE)): log(points[p])
        if is_log
        else points[p]
        for p in sorted(points)
    }
    return Curve(
        tuple(line),
        tuple(line.values()),
        is_log=is_log,
        low=points.get(0, 0.0),
        high=points[max(points)],
    )


@dataclass(frozen=True, slots=True)
class Empirical:
    """Drawn with replacement from these values, each place as likely as the others."""

    values: tuple[float, ...]

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        values = np.array(self.values, dtype=np.float64)
        return values[np.floor(rng.random(count) * len(values)).astype(np.int64)]


@dataclass(frozen=True, slots=True)
class Clipped:
    """Another's draws, none below `low` or above `high`."""

    inner: Sampler
    low: float
    high: float

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        return np.clip(self.inner.draw(rng, count), self.low, self.high)


def sampler_of(spec: float | Distribution, *, is_whole: bool) -> Sampler:
    """The sampler of a scenario's number or distribution; `is_whole` for tokens."""
    if not isinstance(spec, Distribution):
        return Fixed(spec)
    inner = _form_of(spec, is_whole=is_whole)
    if spec.min is None and spec.max is None:
        return inner
    return Clipped(inner, spec.min or 0.0, _SECONDS_MAX if spec.max is None else spec.max)


def _form_of(spec: Distribution, *, is_whole: bool) -> Sampler:
    if spec.percentiles is not None:
        return percentiles(spec.percentiles)
    if spec.lognormal is not None:
        return lognormal(spec.lognormal.median, spec.lognormal.p90)
    if spec.uniform is not None:
        return Uniform(*spec.uniform, is_whole=is_whole)
    assert spec.empirical is not None, "the schema has checked that one form is given"
    return Empirical(spec.empirical)


def draw_tokens(sampler: Sampler, rng: np.random.Generator, count: int) -> Ints:
    """Lengths: whole numbers from 1 to `TOKENS_MAX`, halves to even."""
    tokens: Floats = np.clip(np.rint(sampler.draw(rng, count)), 1, TOKENS_MAX)
    return tokens.astype(np.int64)


def draw_nanos(sampler: Sampler, rng: np.random.Generator, count: int) -> Ints:
    """Durations drawn in seconds, to the nearest nanosecond."""
    nanos: Floats = np.rint(np.minimum(sampler.draw(rng, count), _SECONDS_MAX) * NANOS_PER_SECOND)
    return nanos.astype(np.int64)
