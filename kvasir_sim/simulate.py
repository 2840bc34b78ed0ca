"""One scenario, one simulated run: from the plan to the report and its tables."""

from collections.abc import Callable
from pathlib import Path

import simpy

from kvasir_core import Nanos, Ring, TimePassed, nanos
from kvasir_scenario.planning import plan_of
from kvasir_scenario.recorder import Recorder
from kvasir_scenario.report import Labels
from kvasir_scenario.report_schema import Report
from kvasir_scenario.schema import Scenario
from kvasir_scenario.workload import ClosedLoop, Requests, WorkloadFacts, build_workload
from kvasir_sim.arrivals import ClosedUsers, OpenLoop
from kvasir_sim.costs import build_costs
from kvasir_sim.faults import RingFaults
from kvasir_sim.links import build_links
from kvasir_sim.shell import Shell

Progress = Callable[[int, int], None]
"""Called now and then with (virtual nanoseconds, requests ended)."""


def simulate(
    scenario: Scenario,
    out: Path | None = None,
    *,
    csv: bool = False,
    events: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Run a scenario in virtual time.

    Args:
        scenario: A valid scenario; its variants are not run here.
        out: A prepared run directory for the tables; None writes nothing.
        csv: Write each table as CSV too.
        events: Write the core's event log, `events.jsonl`.
        progress: See `Progress`.

    Raises:
        ScenarioError: A trace, cost table or plan is wrong.
    """
    plan = plan_of(scenario)
    costs = build_costs(scenario, plan)
    links = build_links(scenario, plan)
    workload, facts = build_workload(scenario)
    ring = Ring(plan, predict=costs.predict if scenario.policy.packer == "cohort" else None)
    env = simpy.Environment(initial_time=0)
    recorder = Recorder(out, plan, ring.causes, warmup_ns=nanos(scenario.run.warmup_s), csv=csv)
    log = (out / "events.jsonl").open("w") if events and out is not None else None
    try:
        shell = Shell(env, plan, costs, links, ring, recorder, event_log=log, progress=progress)
        end = _run(shell, scenario, workload, facts)
    finally:
        if log is not None:
            log.close()
    return recorder.close(
        end,
        ring.statistics(),
        facts,
        Labels(
            name=scenario.name,
            mode="simulated",
            seed=scenario.run.seed,
            slo_ttft_s=scenario.slo.ttft_s,
            slo_tpot_s=scenario.slo.tpot_s,
            provenance=costs.provenance,
            cost_notes=tuple(costs.describe()),
        ),
        link_busy_ns=[link.busy_ns for link in shell.pipeline.links],
    )


def _run(
    shell: Shell, scenario: Scenario, workload: Requests | ClosedLoop, facts: WorkloadFacts
) -> int:
    """Drive the ring to the horizon or to the last request's end; returns that time (ns)."""
    env, horizon_s = shell.env, scenario.run.horizon_s
    horizon = None if horizon_s is None else nanos(horizon_s)
    actor: OpenLoop | ClosedUsers
    if isinstance(workload, ClosedLoop):
        actor = ClosedUsers(shell, workload)
    else:
        actor = OpenLoop(shell, workload, horizon)
    if facts.failed_rows is not None:
        OpenLoop.record_failed(shell, facts.failed_rows, horizon)
    shell.is_exhausted = lambda: actor.is_exhausted
    RingFaults(shell, scenario.faults, scenario.run.seed)
    if horizon is None:
        env.run()
        assert shell.is_over(), "the ring is stuck: requests live, and nothing will happen"
        return shell.last_end
    env.run(until=horizon + 1)  # SimPy leaves out what happens at the very end; we do not.
    shell.tell(TimePassed(), Nanos(horizon))
    shell.cut(horizon)
    return horizon
