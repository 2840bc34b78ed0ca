"""The swarm over time: one row every few seconds, and the moments that the report names."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvasir_core import NANOS_PER_SECOND, Nanos, RequestId, nanos
from kvasir_core.swarm.words import Standing, WorkerId
from kvasir_scenario import tables
from kvasir_scenario.tables import TableWriter
from kvasir_sim.swarm.network import after
from kvasir_sim.swarm.swarm import Swarm

ROWS = 600  # About so many for a run with a horizon.
PERIOD_S = (1.0, 30.0)
PERIOD_UNKNOWN_S = 5.0
WORST = (
    Standing.QUARANTINED,
    Standing.SUSPECT,
    Standing.PROVEN,
    Standing.TRIAL,
    Standing.NEW,
)
RANK = {standing: rank for rank, standing in enumerate((*WORST, Standing.GONE))}
"""A worker's standing is that of its slice that stands first here."""


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


class Timeline:
    """Looks at the swarm every few seconds."""

    def __init__(self, swarm: Swarm, tokens: TokenClock, horizon_ns: int | None) -> None:
        self.moments = Moments()
        self._swarm = swarm
        self._tokens = tokens
        period_s = PERIOD_UNKNOWN_S
        if horizon_ns is not None:
            period_s = min(max(horizon_ns / NANOS_PER_SECOND / ROWS, PERIOD_S[0]), PERIOD_S[1])
        self._period_ns = nanos(period_s)
        self.rows: list[tuple[int | float | bool, ...]] = []
        self._before = (0, 0, 0, 0, 0, 0)  # Time, tokens, gap_ns, gaps, pairs, remote pairs.
        after(swarm.env, self._period_ns, self._again)

    def _again(self) -> None:
        self.look()
        after(self._swarm.env, self._period_ns, self._again)

    def look(self) -> None:
        """Add a row for the time since the last one."""
        swarm = self._swarm
        now = swarm.env.now
        if now == self._before[0]:
            return
        tokens, served = self._tokens, swarm.coordinator.served
        sums = now, tokens.tokens, tokens.gap_ns, tokens.gaps, served.pairs, served.remote_pairs
        spent, given, gap_ns, gaps, pairs, remote = (
            value - before for value, before in zip(sums, self._before, strict=True)
        )
        self._before = sums
        waiting, running = swarm.load
        covering, claims, covered, reached, surplus = self._market()
        online = sum(worker.is_online for worker in swarm.workers.values())
        standing = self._standings()
        hub = swarm.hub
        target = 0 if hub is None else hub.target
        self.rows.append((
            now, waiting, running, swarm.coordinator.is_engaged,
            hub is not None and hub.is_recruiting, target, claims, online, covering,
            *(standing[s] for s in reversed(WORST)), covered, reached, swarm.tally.downloads,
            min(1.0, remote / pairs) if pairs else np.nan, given * NANOS_PER_SECOND / spent,
            gap_ns / gaps / NANOS_PER_SECOND if gaps else np.nan,
        ))  # fmt: skip
        self._note(Nanos(now), running, remote, reached, surplus, online, covering, target)

    def _note(
        self, now: Nanos, running: int, remote: int, reached: float, surplus: int, online: int,
        covering: int, target: int,
    ) -> None:  # fmt: skip
        moments, policy = self.moments, self._swarm.policy
        moments.online_max = max(moments.online_max, online)
        moments.covering_max = max(moments.covering_max, covering)
        moments.target_max = max(moments.target_max, target)
        if running >= policy.threshold:
            moments.knee = now if moments.knee is None else moments.knee
            moments.high_last = now
            moments.contracted = None
        elif moments.relief is None and moments.full is None and target <= policy.base:
            moments.knee = None  # A spike that nobody came for.
        if moments.knee is None:
            return
        if remote and moments.relief is None:
            moments.relief = now
        if target > policy.base and reached >= 1 and moments.full is None:
            moments.full = now
        is_low = running < policy.threshold and target <= policy.base
        if is_low and not surplus and moments.contracted is None:
            moments.contracted = now

    def _market(self) -> tuple[int, int, float, float, int]:
        """Covering workers, claims, share of experts covered and of the target, surplus."""
        swarm = self._swarm
        if swarm.hub is None:
            return sum(worker.is_connected for worker in swarm.workers.values()), 0, 1.0, 1.0, 0
        core = swarm.hub.hub
        demand = core.demand()
        swarm.watch.demanded(demand, counts_claims=swarm.policy.counts_claims)
        cells = covered = wanted = reached = surplus = 0
        for model in demand.models:
            for layer in model.layers:
                for run in layer.segments:
                    width = run.experts[1] - run.experts[0]
                    cells += width
                    covered += width * (run.replicas > 0)
                    wanted += width * run.target
                    reached += width * min(run.replicas, run.target)
                    surplus += width * max(0, run.replicas - run.target)
        share = reached / wanted if wanted else 1.0
        covering = sum(model.workers for model in core.recruitment().models)
        return covering, core.claims_open, covered / cells, share, surplus

    def _standings(self) -> Counter[Standing]:
        """Attached workers by the most telling standing of their slices."""
        of: dict[WorkerId, Standing] = {}
        for worker, standing in self._swarm.coordinator.coordinator.standings():
            known = of.get(worker)
            if known is None or RANK[standing] < RANK[known]:
                of[worker] = standing
        return Counter(of.values())

    def write(self, directory: Path, *, csv: bool) -> None:
        """`swarm.parquet`."""
        kinds = [field.type.to_pandas_dtype() for field in tables.SWARM]
        with TableWriter(directory / "swarm", tables.SWARM, csv=csv) as writer:
            if not self.rows:
                return
            columns: list[object] = []
            for index, (column, kind) in enumerate(
                zip(zip(*self.rows, strict=True), kinds, strict=True)
            ):
                if not index:
                    columns.append(tables.seconds(np.array(column, np.int64)))
                    continue
                values = np.array(column, kind)
                absent = np.isnan(values) if values.dtype == np.float64 else None
                columns.append(tables.numbers(values, absent))
            writer.write(columns)
