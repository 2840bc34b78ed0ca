"""The swarm over time, for both shells: rows of `swarm.parquet`, and the moments reports name."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvasir_core.units import NANOS_PER_SECOND, Nanos, RequestId, nanos
from kvasir_scenario import tables
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_workload import ClosedWorkload, RateProfile, TraceWorkload
from kvasir_scenario.swarm_report import SpanPart
from kvasir_scenario.tables import TableWriter

ROWS = 600  # About so many for a run with a horizon.
PERIOD_S = (0.25, 30.0)
PERIOD_UNKNOWN_S = 5.0
FOR_EVER = 1 << 62
Row = tuple[int | float | bool, ...]  # As `tables.SWARM`, times in ns.
Spans = tuple[tuple[int, int], ...]


class TokenClock:
    """Tokens and the time between them, in spans of the run."""

    def __init__(self, spans: tuple[tuple[int, int], ...]) -> None:
        self._spans = spans
        self._last: dict[RequestId, int] = {}  # Per live request, when its last token came.
        self.tokens = 0
        self.gap_ns = self.gaps = 0
        self.by_span = [[0, 0, 0] for _ in spans]  # Tokens, sum of gaps, number of gaps.

    def given(self, requests: tuple[RequestId, ...], now: int) -> None:
        """Each of these got a token."""
        last = self._last
        gap_ns = gaps = 0
        for request in requests:
            before = last.get(request)
            if before is not None:
                gap_ns += now - before
                gaps += 1
            last[request] = now
        self.tokens += len(requests)
        self.gap_ns += gap_ns
        self.gaps += gaps
        for (start, stop), sums in zip(self._spans, self.by_span, strict=True):
            if start < now <= stop:
                sums[0] += len(requests)
                sums[1] += gap_ns
                sums[2] += gaps

    def ended(self, request: RequestId) -> None:
        """It gets no more."""
        self._last.pop(request, None)


@dataclass(slots=True)
class Moments:
    """Times (ns) that the report names; None: not yet."""

    knee: int | None = (
        None  # First row at or above the threshold, of the stretch that brought help.
    )
    high_last: int | None = None
    relief: int | None = None
    full: int | None = None
    contracted: int | None = None
    online_max: int = 0
    covering_max: int = 0
    target_max: int = 0

    def between(self, start: int | None, stop: int | None) -> float | None:
        """Seconds; None if either did not come."""
        if start is None or stop is None:
            return None
        return (stop - start) / NANOS_PER_SECOND

    def note(
        self, now: Nanos, running: int, remote: int, reached: float, surplus: int, online: int,
        covering: int, target: int, threshold: int, base: int,
    ) -> None:  # fmt: skip
        """A look at the swarm.

        Args:
            now: When.
            running: Busy slots.
            remote: Pairs accepted from workers since the last look.
            reached: Share of the wanted replicas that there are.
            surplus: Replicas above the target.
            online: Workers.
            covering: Of them, with coverage.
            target: Replicas wanted of each expert.
            threshold: Busy slots that saturate.
            base: The target at rest.
        """
        self.online_max = max(self.online_max, online)
        self.covering_max = max(self.covering_max, covering)
        self.target_max = max(self.target_max, target)
        if running >= threshold:
            self.knee = now if self.knee is None else self.knee
            self.high_last = now
            self.contracted = None
        elif self.relief is None and self.full is None and target <= base:
            self.knee = None  # A spike that nobody came for.
        if self.knee is None:
            return
        if remote and self.relief is None:
            self.relief = now
        if target > base and reached >= 1 and self.full is None:
            self.full = now
        is_low = running < threshold and target <= base
        if is_low and not surplus and self.contracted is None:
            self.contracted = now


def period_s(horizon_s: float | None) -> float:
    """Between two rows."""
    if horizon_s is None:
        return PERIOD_UNKNOWN_S
    return min(max(horizon_s / ROWS, PERIOD_S[0]), PERIOD_S[1])


def write_rows(rows: Sequence[Row], directory: Path, *, csv: bool) -> None:
    """`swarm.parquet`."""
    kinds = [field.type.to_pandas_dtype() for field in tables.SWARM]
    with TableWriter(directory / "swarm", tables.SWARM, csv=csv) as writer:
        if not rows:
            return
        columns: list[object] = []
        for index, (column, kind) in enumerate(zip(zip(*rows, strict=True), kinds, strict=True)):
            if not index:
                columns.append(tables.seconds(np.array(column, np.int64)))
                continue
            values = np.array(column, kind)
            absent = np.isnan(values) if values.dtype == np.float64 else None
            columns.append(tables.numbers(values, absent))
        writer.write(columns)


def spans_part(tokens: TokenClock, spans: Spans, end_ns: int) -> list[SpanPart]:
    """What the ring gave in each span, cut at the run's end."""
    parts = []
    for (start, until), (count, gap_ns, gaps) in zip(spans, tokens.by_span, strict=True):
        stop = min(until, end_ns)
        length_s = (stop - start) / NANOS_PER_SECOND
        parts.append(
            SpanPart(
                start_s=start / NANOS_PER_SECOND,
                stop_s=max(start, stop) / NANOS_PER_SECOND,
                output_tokens_per_s=count / length_s if length_s > 0 else None,
                tpot_s=gap_ns / gaps / NANOS_PER_SECOND if gaps else None,
            )
        )
    return parts


def peak_phase(scenario: Scenario) -> tuple[float, float, float] | None:
    """Start, stop (s) and rate of the busiest phase, where phases have fixed lengths."""
    workload = scenario.workload
    if isinstance(workload, ClosedWorkload | TraceWorkload):
        return None
    profile = workload.rate_per_s
    if not isinstance(profile, RateProfile) or profile.repeat:
        return None
    at, best = 0.0, (0.0, 0.0, -1.0)
    for phase in profile.phases:
        if not isinstance(phase.for_s, float | int):
            return None
        if phase.rate_per_s > best[2]:
            best = at, at + phase.for_s, phase.rate_per_s
        at += phase.for_s
    return best


def spans_of(scenario: Scenario, speed: float = 1.0) -> Spans:
    """The peak, and what comes before it; `speed` times as early."""
    phase = peak_phase(scenario)
    if phase is None:
        return ((round(nanos(scenario.run.warmup_s) / speed), FOR_EVER),)
    start, stop = (round(nanos(at) / speed) for at in phase[:2])
    return ((start, stop), (0, start)) if start else ((start, stop),)
