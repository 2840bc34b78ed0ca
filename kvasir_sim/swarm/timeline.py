"""The swarm over time: one row every few seconds, looked at in virtual time."""

from collections import Counter
from pathlib import Path

import numpy as np

from kvasir_core import NANOS_PER_SECOND, Nanos, nanos
from kvasir_core.swarm.words import RANK, TELLING, Standing, WorkerId
from kvasir_scenario.swarm_moments import (
    Moments,
    Row,
    TokenClock,
    period_s,
    write_rows,
)
from kvasir_sim.swarm.network import after
from kvasir_sim.swarm.swarm import Swarm


class Timeline:
    """Looks at the swarm every few seconds."""

    def __init__(self, swarm: Swarm, tokens: TokenClock, horizon_ns: int | None) -> None:
        self.moments = Moments()
        self._swarm = swarm
        self._tokens = tokens
        horizon_s = None if horizon_ns is None else horizon_ns / NANOS_PER_SECOND
        self._period_ns = nanos(period_s(horizon_s))
        self.rows: list[Row] = []
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
            *(standing[s] for s in reversed(TELLING)), covered, reached, swarm.tally.downloads,
            min(1.0, remote / pairs) if pairs else np.nan, given * NANOS_PER_SECOND / spent,
            gap_ns / gaps / NANOS_PER_SECOND if gaps else np.nan,
        ))  # fmt: skip
        policy = swarm.policy
        self.moments.note(
            Nanos(now), running, remote, reached, surplus, online, covering, target,
            policy.threshold, policy.base,
        )  # fmt: skip

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
        write_rows(self.rows, directory, csv=csv)
