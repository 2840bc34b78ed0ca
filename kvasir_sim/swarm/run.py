"""A ring with a swarm, from its start to its report: what `simulate.py` drives."""

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import simpy

from kvasir_core import Nanos, Plan, Ring, TimePassed, nanos
from kvasir_scenario.recorder import Recorder
from kvasir_scenario.schema import Scenario
from kvasir_scenario.swarm_moments import TokenClock, spans_of
from kvasir_scenario.swarm_report import SwarmPart
from kvasir_sim.costs import CostModel
from kvasir_sim.links import LinkCost
from kvasir_sim.pipeline import Clock
from kvasir_sim.swarm.faults import SwarmFaults
from kvasir_sim.swarm.report import swarm_part
from kvasir_sim.swarm.shell import SwarmShell
from kvasir_sim.swarm.swarm import Swarm
from kvasir_sim.swarm.timeline import Timeline

STUCK_NS = nanos(3600)  # No lap and no outage takes so long.


class SwarmRun:
    """One run with section `experts`."""

    def __init__(
        self,
        env: Clock,
        scenario: Scenario,
        plan: Plan,
        costs: CostModel,
        logs: tuple[TextIO, TextIO] | None = None,
    ) -> None:
        assert scenario.experts is not None
        self._env = env
        self._scenario = scenario
        self._plan = plan
        self._costs = costs
        self.swarm = Swarm(env, scenario, scenario.experts, plan, costs, logs)
        self._spans = spans_of(scenario)
        self._tokens = TokenClock(self._spans)
        horizon_s = scenario.run.horizon_s
        self.timeline = Timeline(
            self.swarm, self._tokens, None if horizon_s is None else nanos(horizon_s)
        )
        self.faults = SwarmFaults(self.swarm, scenario.faults, scenario.run.seed)

    def predict(self, decodes: int, decode_context: int, chunk_rows: int, chunk_start: int) -> int:
        """The longest stage hold, with its routed experts while they are local."""
        hold = self._costs.predict(decodes, decode_context, chunk_rows, chunk_start)
        if self.swarm.coordinator.is_engaged:
            return hold
        return hold + self.swarm.work.predicted_ns(decodes + chunk_rows)

    def shell_of(
        self,
        links: list[LinkCost],
        ring: Ring,
        recorder: Recorder,
        log: TextIO | None,
        progress: Callable[[int, int], None] | None,
    ) -> SwarmShell:
        """The ring's shell, with this swarm as its stages' experts."""
        self.shell = SwarmShell(
            self._env, self._plan, self._costs, links, ring, recorder, self.swarm.coordinator,
            overlap=self.swarm.experts.overlap, cores=self.swarm.cores, tokens=self._tokens,
            event_log=log, progress=progress,
        )  # fmt: skip
        return self.shell

    def drive(self, horizon: int | None) -> int:
        """To the horizon, or until the last request has ended; returns that time (ns)."""
        env, shell = self._env, self.shell
        self.swarm.start(shell)
        if horizon is None:
            self._run_until_over()
            end = shell.last_end
        else:
            env.run(until=horizon + 1)  # SimPy leaves out what happens at the very end.
            shell.tell(TimePassed(), Nanos(horizon))
            end = horizon
        shell.cut(end)
        shell.overlapping.close(end)
        return end

    def _run_until_over(self) -> None:
        """The swarm's own events never end, so a stuck ring shows as one where nothing happens."""
        env, shell = self._env, self.shell
        told = -1
        while not shell.is_over():
            assert shell.told > told, "the ring is stuck: requests live, and nothing will happen"
            told = shell.told if shell.is_exhausted() else -1
            env.run(until=simpy.AnyOf(env, [shell.over, env.timeout(STUCK_NS)]))

    def describe(self, end_ns: int) -> tuple[str, ...]:
        """What a reader of the report must know besides."""
        cores = self.swarm.cores
        return () if cores is None else (cores.describe(end_ns),)

    def close(self, out: Path | None, end_ns: int, *, csv: bool) -> SwarmPart:
        """Check the cores in full, write the timeline, and say what the swarm was like."""
        self.timeline.look()
        self.swarm.coordinator.coordinator.check_invariants()
        if self.swarm.hub is not None:
            self.swarm.hub.hub.check_invariants()
        if out is not None:
            self.timeline.write(out, csv=csv)
        return swarm_part(
            self.swarm, self._plan, self._costs, self.timeline.moments, self._tokens,
            self._spans, end_ns,
        )  # fmt: skip
