"""One scenario, one simulated run: from the plan to the report and its tables."""

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, TextIO

from kvasir_core import Nanos, Plan, Ring, ScenarioError, TimePassed, nanos
from kvasir_scenario.planning import plan_of
from kvasir_scenario.recorder import Recorder
from kvasir_scenario.report import Labels
from kvasir_scenario.report_schema import Report
from kvasir_scenario.run_dir import named_output
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_faults import RING_FAULTS
from kvasir_scenario.workload import ClosedLoop, Requests, WorkloadFacts, build_workload
from kvasir_sim.arrivals import ClosedUsers, OpenLoop
from kvasir_sim.costs import build_costs
from kvasir_sim.costs.base import CostModel
from kvasir_sim.faults import RingFaults
from kvasir_sim.links import LinkCost, build_links
from kvasir_sim.pipeline import Clock
from kvasir_sim.planner import auto_layers
from kvasir_sim.prefix_cache import cached_tokens
from kvasir_sim.shell import Shell
from kvasir_sim.swarm.run import SwarmRun

Progress = Callable[[int, int], None]
"""Called now and then with (virtual nanoseconds, requests ended)."""

TIME_MAX_NS = 10**18  # Times of a lap beyond it would no longer fit the tables.
NEW_OBJECTS_MAX = 500_000  # Between collections: some 50 MB, if all of them were garbage.


@contextmanager
def rare_collections() -> Iterator[None]:
    """Seldom look for cyclic garbage: a run makes hardly any, and looking costs 5 % of it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(NEW_OBJECTS_MAX, *thresholds[1:])
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a scenario names, read and checked; a run uses it up."""

    plan: Plan
    costs: CostModel
    workload: Requests | ClosedLoop
    facts: WorkloadFacts
    links: list[LinkCost]

    @classmethod
    def of(cls, scenario: Scenario) -> Self:
        """Read them.

        Raises:
            ScenarioError: A trace, cost table or plan is wrong.
        """
        plan = plan_of(scenario, auto_layers)
        costs = build_costs(scenario, plan)
        workload, facts = build_workload(scenario)
        return cls(plan, costs, workload, facts, build_links(scenario, plan))


class Simulation:
    """A run that is ready to start."""

    def __init__(
        self,
        scenario: Scenario,
        out: Path | None,
        *,
        inputs: Inputs | None = None,
        csv: bool = False,
        log: TextIO | None = None,
        swarm_logs: tuple[TextIO, TextIO] | None = None,
        progress: Progress | None = None,
    ) -> None:
        self._scenario = scenario
        inputs = Inputs.of(scenario) if inputs is None else inputs
        plan, links, env = inputs.plan, inputs.links, Clock()
        self._costs = costs = inputs.costs
        self._workload, self._facts = inputs.workload, inputs.facts
        self.swarm = SwarmRun(env, scenario, plan, costs, swarm_logs) if scenario.experts else None
        predict = costs.predict if self.swarm is None else self.swarm.predict
        self._ring = ring = Ring(plan, predict=predict if plan.packer == "cohort" else None)
        recorder = self._recorder = Recorder(
            out, plan, ring.causes, warmup_ns=nanos(scenario.run.warmup_s), csv=csv,
            is_overlapping=self.swarm is not None,
        )  # fmt: skip
        self._shell: Shell
        if self.swarm is not None:
            self._shell = self.swarm.shell_of(links, ring, recorder, log, progress)
        else:
            self._shell = Shell(
                env, plan, costs, links, ring, recorder,
                is_faulty=any(isinstance(fault, RING_FAULTS) for fault in scenario.faults),
                event_log=log, progress=progress,
            )  # fmt: skip
        self.ring_faults = RingFaults(self._shell, scenario.faults, scenario.run.seed)
        self._out = out
        self._csv = csv

    def run(self) -> Report:
        """From the first event to the last; writes the tables."""
        with rare_collections():
            end = self._drive()
        scenario, costs = self._scenario, self._costs
        labels = Labels(
            name=scenario.name,
            mode="simulated",
            seed=scenario.run.seed,
            slo_ttft_s=scenario.slo.ttft_s,
            slo_tpot_s=scenario.slo.tpot_s,
            provenance=costs.provenance,
            cost_notes=tuple(costs.describe()),
            notes=() if self.swarm is None else self.swarm.describe(end),
        )
        if isinstance(self._workload, ClosedLoop):  # It cuts prompts as it draws them.
            self._facts = replace(self._facts, clipped=self._workload.clipped)
        report = self._recorder.close(
            end,
            self._ring.statistics(),
            self._facts,
            labels,
            link_busy_ns=self._shell.carrier.link_busy_ns,
        )
        if self.swarm is not None:
            part = self.swarm.close(self._out, end, csv=self._csv)
            report = report.model_copy(update={"swarm": part})
        return report

    def _drive(self) -> int:
        """To the horizon or to the last request's end; returns that time (ns)."""
        shell, workload, scenario = self._shell, self._workload, self._scenario
        env, horizon_s = shell.env, scenario.run.horizon_s
        horizon = None if horizon_s is None else nanos(horizon_s)
        cached = cached_tokens(scenario, workload)
        actor: OpenLoop | ClosedUsers
        if isinstance(workload, ClosedLoop):
            actor = ClosedUsers(shell, workload)
        else:
            actor = OpenLoop(shell, workload, horizon, cached)
        if self._facts.failed_rows is not None:
            OpenLoop.record_failed(shell, self._facts.failed_rows, horizon)
        shell.is_exhausted = lambda: actor.is_exhausted
        self.actor = actor
        if self.swarm is not None:
            return self.swarm.drive(horizon)
        if horizon is None:
            env.run(until=TIME_MAX_NS)
            if not shell.is_over() and env.peek() < float("inf"):
                raise ScenarioError(
                    f"{scenario.name}: the simulated time passed {TIME_MAX_NS / 1e9:g} seconds (31 "
                    "years) and requests were left: a cost, a link or a fault is in another unit "
                    "than meant; or give `run.horizon_s`"
                )
            assert shell.is_over(), "the ring is stuck: requests live, and nothing will happen"
            return shell.last_end
        env.run(until=horizon + 1)  # SimPy leaves out what happens at the very end; we do not.
        shell.tell(TimePassed(), Nanos(horizon))
        shell.cut(horizon)
        return horizon


def prepare(scenario: Scenario, out: Path | None) -> Simulation:
    """A run that is ready to start, for those who time it."""
    return Simulation(scenario, out)


def simulate(
    scenario: Scenario,
    out: Path | None = None,
    inputs: Inputs | None = None,
    *,
    csv: bool = False,
    events: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Run a scenario in virtual time.

    Args:
        scenario: A valid scenario; its variants are not run here.
        out: A prepared run directory for the tables; None writes nothing.
        inputs: The scenario's, if they have been read already.
        csv: Write each table as CSV too.
        events: Write the ring's event log, `events.jsonl`, and those of coordinator and hub.
        progress: See `Progress`.

    Raises:
        ScenarioError: A trace, cost table or plan is wrong.
        OutputError: A file cannot be written.
    """
    with ExitStack() as stack:
        log = None
        swarm_logs = None
        if events and out is not None:
            log = stack.enter_context(_log(out / "events.jsonl"))
            if scenario.experts is not None:
                coordinator, hub = (
                    stack.enter_context(_log(out / f"{name}_events.jsonl"))
                    for name in ("coordinator", "hub")
                )
                swarm_logs = coordinator, hub
        return Simulation(
            scenario, out, inputs=inputs, csv=csv, log=log, swarm_logs=swarm_logs,
            progress=progress,
        ).run()  # fmt: skip


@contextmanager
def _log(path: Path) -> Iterator[TextIO]:
    with named_output(path), path.open("w") as log:
        yield log
