"""Arrival times of open-loop load: Poisson, gamma (bursty or even), constant; at any rate curve.

Gaps of mean 1 are drawn and summed, and the sums are mapped to times by the inverse of the rate's
integral. So the k-th arrival depends on the seed, the rate and k alone: a longer run begins with
the arrivals of a shorter one, and twice the rate is the same pattern in half the time.
"""

from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvasir_core.errors import ScenarioError
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_scenario.lengths import Sampler, sampler_of
from kvasir_scenario.schema_workload import RateProfile

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

REQUESTS_MAX = 50_000_000  # As many as a trace may have.
SPAN_S_MAX = 1e9  # 31 years; sums of two such times still fit an int64 of nanoseconds.
PHASES_MAX = 1_000_000  # Of a rate curve, repeats counted; each is a point of its integral.
BLOCK = 1 << 16  # Drawn at a time; a block's edge is never seen in the result.


def constant_sums(first: int) -> Floats:
    """The block that begins at the first-th arrival: gaps of exactly 1, the first arrival at 0."""
    return np.arange(first, first + BLOCK, dtype=np.float64)


def poisson_sums(rng: np.random.Generator) -> Callable[[int], Floats]:
    """Independent exponential gaps; the first arrival is after one gap."""
    return _running_sums(lambda: rng.exponential(1.0, BLOCK))


def gamma_sums(rng: np.random.Generator, variation: float) -> Callable[[int], Floats]:
    """Independent gamma gaps with this coefficient of variation.

    Above 1 the load is burstier than Poisson, below 1 more even.
    """
    shape = variation**-2
    return _running_sums(lambda: rng.gamma(shape, 1 / shape, BLOCK))


def _running_sums(draw: Callable[[], Floats]) -> Callable[[int], Floats]:
    """Blocks of sums, added up in the same order whatever the block."""
    last = 0.0

    def block(_first: int) -> Floats:
        nonlocal last
        gaps = draw()
        gaps[0] += last
        sums = np.cumsum(gaps)
        last = float(sums[-1])
        return sums

    return block


Complain = Callable[[str, str], ScenarioError]
"""Makes the error about a key; `Scenario.error` does, with file and line."""


class RateCurve:
    """A rate over time, and the inverse of its integral.

    `starts[i]` is when phase i begins, `counts[i]` how many arrivals are expected before; the last
    phase known so far goes on for ever, and more are made when a time beyond it is asked for.
    """

    def __init__(
        self, rate: float | RateProfile, rng: np.random.Generator, complain: Complain
    ) -> None:
        self.complain = complain
        self._phases = _phases(rate, rng)
        rate_per_s, self._lasts_s = next(self._phases)
        self.starts, self.counts, self.rates = [0.0], [0.0], [rate_per_s]

    def seconds(self, sums: Floats, stop_s: float) -> Floats:
        """When each sum is reached; `inf` for those at or after `stop_s`, or never reached."""
        self._reach(float(sums[-1]), stop_s)
        starts, counts, rates = map(np.array, (self.starts, self.counts, self.rates))
        # The last phase that begins by then: an arrival never falls into a phase of rate 0.
        phase = np.searchsorted(counts, sums, side="right") - 1
        with np.errstate(divide="ignore", invalid="ignore"):
            seconds = starts[phase] + (sums - counts[phase]) / rates[phase]
        return np.where(seconds < stop_s, seconds, inf)

    def _reach(self, count: float, stop_s: float) -> None:
        """Make phases until one begins after the count or the time."""
        while self.counts[-1] <= count and self.starts[-1] < stop_s and self._lasts_s < inf:
            if len(self.starts) == PHASES_MAX:
                raise self.complain(
                    "workload.rate_per_s.phases",
                    f"more than {PHASES_MAX} phases (repeats counted) before {stop_s:.3g} s and "
                    f"{count:.3g} requests; make them longer",
                )
            self.starts.append(self.starts[-1] + self._lasts_s)
            self.counts.append(self.counts[-1] + self._lasts_s * self.rates[-1])
            rate_per_s, self._lasts_s = next(self._phases)
            self.rates.append(rate_per_s)


def _phases(rate: float | RateProfile, rng: np.random.Generator) -> Iterator[tuple[float, float]]:
    """Rate and duration of phase after phase; the last of a finite list lasts for ever."""
    if not isinstance(rate, RateProfile):
        return repeat((rate, inf))
    lengths = [(phase.rate_per_s, sampler_of(phase.for_s, is_whole=False)) for phase in rate.phases]

    def drawn(items: Iterator[tuple[float, Sampler]]) -> Iterator[tuple[float, float]]:
        for rate_per_s, sampler in items:
            yield rate_per_s, float(sampler.draw(rng, 1)[0])

    if rate.repeat:
        return drawn(cycle(lengths))
    return chain(drawn(iter(lengths[:-1])), repeat((lengths[-1][0], inf)))


def arrivals(
    sums: Callable[[int], Floats], rate: RateCurve, requests: int | None, duration_s: float | None
) -> Ints:
    """Ascending nanoseconds of so many requests, or of all before `duration_s`.

    Raises:
        ScenarioError: More than `REQUESTS_MAX`, or so many never come.
    """
    if requests is not None and requests > REQUESTS_MAX:
        raise rate.complain("workload.requests", f"found {requests}; at most {REQUESTS_MAX}")
    stop_s = SPAN_S_MAX if duration_s is None else min(duration_s, SPAN_S_MAX)
    parts: list[Ints] = []
    have = 0
    while requests is None or have < requests:
        seconds = rate.seconds(sums(have), stop_s)
        kept = seconds[seconds < inf][: None if requests is None else requests - have]
        parts.append(np.rint(kept * NANOS_PER_SECOND).astype(np.int64))
        have += len(kept)
        if have > REQUESTS_MAX:
            raise rate.complain(
                "workload.duration_s",
                f"more than {REQUESTS_MAX} requests come in {stop_s:g} s; lower it or rate_per_s",
            )
        if len(kept) < len(seconds):
            break
    if requests is not None and have < requests:
        raise rate.complain(
            "workload.requests",
            f"only {have} of {requests} come within {SPAN_S_MAX:.0e} s at this rate_per_s; lower "
            "it or raise the rate",
        )
    return np.concatenate(parts)
