"""The `swarm` part of a real run's report, from what its watch saw.

With several coordinators (one a stage) counts are sums, and what is said of one is their mean. What
only a simulator can know is null: bounds, and whose wrong answers were believed.
"""

from pathlib import Path

from kvasir_core.units import NANOS_PER_SECOND
from kvasir_rt.engine import Engine
from kvasir_rt.scenario_swarm import HubAccess
from kvasir_rt.swarm_watch import SwarmRecorder, SwarmWatch, mean_of
from kvasir_scenario.report_schema import Report, StagePart
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_experts import Experts
from kvasir_scenario.swarm_moments import (
    Moments,
    Spans,
    TokenClock,
    period_s,
    spans_of,
    spans_part,
)
from kvasir_scenario.swarm_report import QuarantinePart, SwarmPart

SECONDS_PER_HOUR = 3600
COUNTED = {
    "dispatches": "dispatches", "trials": "trials", "hedges": "hedges", "checks": "checks",
    "local_fallbacks": "pairs_fallback", "late_answers": "late", "mismatches": "mismatches",
    "control_decisions": "decisions", "law_checks": "law_checks",
}  # fmt: skip
OF_THE_HUB = ("recruits_above_target", "claims_lapsed", "releases", "workers_lost")


class SwarmMeasure:
    """The watch of one run, from its start to the report."""

    def __init__(
        self,
        engine: Engine,
        scenario: Scenario,
        access: HubAccess,
        recorder: SwarmRecorder,
        speed: float,
    ) -> None:
        self._scenario = scenario
        self._spans = spans_of(scenario, speed)
        self._tokens = recorder.tokens = TokenClock(self._spans)
        horizon_s = scenario.run.horizon_s
        self._watch = SwarmWatch(
            engine,
            str(access.hub),
            access.service_token,
            scenario.name,
            self._tokens,
            period_s(None if horizon_s is None else horizon_s / speed),
        )

    def begin(self) -> None:
        """The ring is about to start."""
        self._watch.begin()

    def start(self) -> None:
        """The run begins."""
        self._watch.start()

    def close(self) -> None:
        """It is over; the engine still answers."""
        self._watch.close()

    def into(self, report: Report, end_ns: int, out: Path | None, *, csv: bool) -> Report:
        """The report with its `swarm`; the table beside it."""
        watch, experts = self._watch, self._scenario.experts
        assert experts is not None
        if out is not None:
            watch.write(out, csv=csv)
        part = swarm_part(watch, experts, self._tokens, self._spans, end_ns, report.stages)
        notes = list(report.notes)
        if watch.missed:
            notes.append(
                f"the hub did not answer {watch.missed} of {watch.looks} looks at the swarm"
            )
        return report.model_copy(update={"swarm": part, "notes": notes})


def swarm_part(
    watch: SwarmWatch,
    experts: Experts,
    tokens: TokenClock,
    spans: Spans,
    end_ns: int,
    stages: list[StagePart],
) -> SwarmPart:
    """See `SwarmPart`; the watch is closed."""
    hours = end_ns / NANOS_PER_SECOND / SECONDS_PER_HOUR
    counts, moments, held = watch.counts, watch.moments, watch.holdings
    remote = sum(each.pairs_remote for each in counts)
    pairs = remote + sum(each.pairs_computed for each in counts)
    changes, flips = watch.since("target_changes"), mean_of([c.engagements for c in counts])
    elapsed_s = end_ns / NANOS_PER_SECOND
    parts = spans_part(tokens, spans, end_ns)
    blocked_s = sum(stage.blocked_by.experts for stage in stages)

    def hourly(count: float) -> float | None:
        return count / hours if hours else None

    return SwarmPart(
        policy=_policy(watch, experts),
        workers=len(held.nodes),
        workers_online_max=moments.online_max,
        workers_covering_max=moments.covering_max,
        target_base=None if watch.hub is None else watch.hub.base,
        target_max=moments.target_max,
        target_changes=changes,
        target_changes_per_hour=hourly(changes),
        flips_per_hour=hourly(flips),
        engaged_s=mean_of([min(c.engaged_ns, end_ns) for c in counts]) / NANOS_PER_SECOND,
        downloads=watch.downloads,
        downloads_per_hour=hourly(watch.downloads),
        download_bytes=watch.since("download_bytes"),
        warm_loads=watch.since("warm_loads"),
        warm_loads_per_hour=hourly(watch.since("warm_loads")),
        wasted_downloads=held.wasted,
        wasted_downloads_per_hour=hourly(held.wasted),
        slice_starts=held.starts,
        slice_stops=held.stops,
        share_remote_pairs=remote / pairs if pairs else None,
        **_counted(watch),
        quarantined={"real": _quarantined(watch)},
        wrong_answers_accepted=None,
        output_error_mean=None,
        **_times(moments),
        blocked_by_experts_share=blocked_s / elapsed_s / len(stages) if elapsed_s else None,
        peak=parts[0],
        rest=parts[1] if len(parts) > 1 else None,
        bound=None,
        trips=None,
    )


def _policy(watch: SwarmWatch, experts: Experts) -> str:
    rule = experts.coordinator.policy
    if watch.hub is None:
        return f"{rule}, the hub never answered"
    return rule if rule == watch.hub.policy else f"{watch.hub.policy}, coordinator {rule}"


def _counted(watch: SwarmWatch) -> dict[str, int]:
    """What is reported as it was counted."""
    own = {
        name: sum(getattr(each, count) for each in watch.counts) for name, count in COUNTED.items()
    }
    return own | {name: watch.since(name) for name in OF_THE_HUB}


def _quarantined(watch: SwarmWatch) -> QuarantinePart:
    when_ns = watch.quarantined_ns
    return QuarantinePart(
        workers=len(watch.holdings.nodes),
        quarantined=max((each.quarantined for each in watch.counts), default=0),
        first_s_max=None if when_ns is None else when_ns / NANOS_PER_SECOND,
        wrong_accepted_max=None,
    )


def _times(moments: Moments) -> dict[str, float | None]:
    return {
        "time_to_first_relief_s": moments.between(moments.knee, moments.relief),
        "time_to_full_coverage_s": moments.between(moments.knee, moments.full),
        "time_to_contraction_s": moments.between(moments.high_last, moments.contracted),
    }
