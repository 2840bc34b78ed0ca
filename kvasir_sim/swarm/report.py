"""The report's `swarm` part, from what coordinator, hub, workers and timeline counted."""

from kvasir_core import NANOS_PER_SECOND, Plan
from kvasir_scenario.schema_experts import Experts
from kvasir_scenario.swarm_moments import Moments, TokenClock, spans_part
from kvasir_scenario.swarm_report import QuarantinePart, SwarmPart
from kvasir_sim.costs import CostModel
from kvasir_sim.swarm.bound import bound_of, peak_of, trips_of
from kvasir_sim.swarm.swarm import Swarm

SECONDS_PER_HOUR = 3600


def swarm_part(
    swarm: Swarm,
    plan: Plan,
    costs: CostModel,
    moments: Moments,
    tokens: TokenClock,
    spans: tuple[tuple[int, int], ...],
    end_ns: int,
) -> SwarmPart:
    """All that the report says of the swarm. `spans`: the peak, and what is before it if known."""
    hours = end_ns / NANOS_PER_SECOND / SECONDS_PER_HOUR
    tally, hub, shell = swarm.tally, swarm.hub, swarm.coordinator
    calls = shell.coordinator.statistics().calls
    served = shell.served
    flips = len(shell.switches)
    changes = 0 if hub is None else hub.count("target_changes")
    blocked_ns = sum(stage.experts_ns for stage in shell.stages)
    peak = peak_of(swarm, plan, costs)
    parts = spans_part(tokens, spans, end_ns)

    def hourly(count: int) -> float | None:
        return count / hours if hours else None

    return SwarmPart(
        policy=_policy(swarm.experts),
        workers=len(swarm.workers),
        workers_online_max=moments.online_max,
        workers_covering_max=moments.covering_max,
        target_base=None if hub is None else swarm.policy.base,
        target_max=moments.target_max,
        target_changes=changes,
        target_changes_per_hour=hourly(changes),
        flips_per_hour=hourly(flips),
        engaged_s=shell.engaged_s,
        downloads_per_hour=hourly(tally.downloads),
        warm_loads_per_hour=hourly(tally.warm_loads),
        wasted_downloads_per_hour=hourly(tally.wasted_downloads),
        **_counted(swarm),
        share_remote_pairs=served.remote_pairs / served.pairs if served.pairs else None,
        dispatches=calls.dispatches,
        trials=calls.trials,
        hedges=calls.hedges,
        local_fallbacks=calls.pairs_fallback,
        late_answers=calls.late,
        checks=calls.checks,
        mismatches=calls.mismatches,
        quarantined=_quarantined(swarm),
        wrong_answers_accepted=served.wrong_answers,
        output_error_mean=served.error_sum / served.pairs if served.pairs else None,
        time_to_first_relief_s=moments.between(moments.knee, moments.relief),
        time_to_full_coverage_s=moments.between(moments.knee, moments.full),
        time_to_contraction_s=moments.between(moments.high_last, moments.contracted),
        blocked_by_experts_share=blocked_ns / end_ns / plan.stages if end_ns else None,
        peak=parts[0],
        rest=parts[1] if len(parts) > 1 else None,
        bound=None if peak is None else bound_of(swarm, peak),
        trips=None if peak is None else trips_of(swarm, peak),
        control_decisions=shell.decisions + (0 if hub is None else hub.decisions),
        law_checks=swarm.watch.checks,
    )


def _policy(experts: Experts) -> str:
    """Coordinator and hub in a few words."""
    hub, rule = experts.hub, experts.coordinator.policy
    if hub is None:
        return f"{rule}, no market"
    market: str = hub.policy
    if market == "dwell" and hub.warm_rejoin:
        market = "dwell + warm rejoin"
    return market if rule == hub.policy else f"{market}, coordinator {rule}"


def _counted(swarm: Swarm) -> dict[str, int]:
    """What is reported as it was counted."""
    tally, hub = swarm.tally, swarm.hub
    counted = {
        name: 0 if hub is None else hub.count(name)
        for name in ("recruits_above_target", "claims_lapsed", "releases", "workers_lost")
    }
    return counted | {
        "downloads": tally.downloads,
        "download_bytes": tally.download_bytes,
        "warm_loads": tally.warm_loads,
        "wasted_downloads": tally.wasted_downloads,
        "slice_starts": tally.starts,
        "slice_stops": tally.stops,
    }


def _quarantined(swarm: Swarm) -> dict[str, QuarantinePart]:
    when = swarm.coordinator.quarantined
    parts: dict[str, QuarantinePart] = {}
    for honesty in sorted({worker.kind.honesty for worker in swarm.workers.values()}):
        workers = [w for w in swarm.workers.values() if w.kind.honesty == honesty]
        firsts = [when[worker.id][0] for worker in workers if worker.id in when]
        parts[honesty] = QuarantinePart(
            workers=len(workers),
            quarantined=len(firsts),
            first_s_max=max(firsts) / NANOS_PER_SECOND if firsts else None,
            wrong_accepted_max=max(worker.wrong_accepted_max for worker in workers),
        )
    return parts
