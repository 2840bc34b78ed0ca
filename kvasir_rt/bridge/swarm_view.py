"""What the stages' coordinators say of remote experts: `swarm` of `/api/ring`, and its metrics.

Counts of a stage begin anew with its process. Workers are counted, never named.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvasir_core.swarm.words import Failure, Standing
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_rt.snapshot import StageSnapshot
from kvasir_rt.wire import ExpertCounts

Json = dict[str, Any]
Counted = tuple[int, ExpertCounts]  # A stage's index, and what its coordinator says.

PAIRS = {
    "remote": "pairs_remote", "computed": "pairs_computed", "verified": "pairs_verified",
    "fallback": "pairs_fallback",
}  # fmt: skip
COUNTS = {
    "calls": "Layers of micro-batches that were decided.",
    "dispatches": "Parts sent to workers.",
    "trials": "Parts sent to see what a worker can do.",
    "hedges": "Second copies of late parts.",
    "checks": "Answers computed here too.",
    "mismatches": "Answers that were wrong.",
    "late": "Answers that did not come before their deadline.",
    "dropped": "Answers that nobody waited for any more.",
    "polls_missed": "Questions for the bridge's slots that got no answer.",
    "maps_missed": "Questions for the hub's dispatch map that got no answer.",
    "engagements": "Changes between local and remote experts.",
    "clock_jumps": "Jumps of the coordinator's clock.",
}


def swarm_view(stages: Sequence[StageSnapshot]) -> Json | None:
    """All coordinators together, and each; None where the ring has none."""
    found = counted(stages)
    if not found:
        return None
    every = [counts for _, counts in found]
    pairs = {where: sum(getattr(c, name) for c in every) for where, name in PAIRS.items()}
    entered_here = pairs["computed"]  # The core counts no pairs of layers that nobody serves.
    total = pairs["remote"] + entered_here
    return {
        "is_engaged": any(c.is_engaged for c in every),
        "workers_known": max(c.workers_known for c in every),
        "workers_attached": max(c.workers_attached for c in every),
        "pairs": pairs,
        "share_remote_pairs": pairs["remote"] / total if total else None,
        **{name: sum(getattr(c, name) for c in every) for name in COUNTS},
        "refused": _sums([c.refused for c in every]),
        "coordinators": [_coordinator(stage, counts) for stage, counts in found],
    }


def counted(stages: Sequence[StageSnapshot]) -> list[Counted]:
    """The stages that have a coordinator."""
    return [(stage.index, stage.experts) for stage in stages if stage.experts is not None]


def _coordinator(stage: int, counts: ExpertCounts) -> Json:
    return {
        "stage": stage,
        "is_connected": counts.is_connected,
        "is_engaged": counts.is_engaged,
        "decided": counts.decided or None,
        "engaged_s": counts.engaged_ns / NANOS_PER_SECOND,
        "saturation": {
            "busy": counts.busy,
            "slots": counts.slots,
            "threshold": counts.threshold,
            "reading": counts.reading,
        },
        "workers_known": counts.workers_known,
        "workers_attached": counts.workers_attached,
        "standings": {str(each): counts.standings.get(each, 0) for each in Standing},
        "pairs": {where: getattr(counts, name) for where, name in PAIRS.items()},
        **{name: getattr(counts, name) for name in COUNTS},
        "refused": {str(why): counts.refused.get(why, 0) for why in Failure},
    }


def _sums(each: Sequence[dict[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counts in each:
        total.update(counts)
    return {str(why): total[why] for why in Failure}


def swarm_metrics(stages: Sequence[StageSnapshot]) -> Iterator[Metric]:
    """`kvasir_swarm_*`, labelled by stage; nothing without coordinators."""
    found = counted(stages)
    if not found:
        return
    yield from _gauges(found)
    engaged = CounterMetricFamily(
        "kvasir_swarm_engaged_seconds", "Experts may be computed by workers.", labels=["stage"]
    )
    for stage, counts in found:
        engaged.add_metric([str(stage)], counts.engaged_ns / NANOS_PER_SECOND)
    yield engaged
    for name, text in COUNTS.items():
        family = CounterMetricFamily(f"kvasir_swarm_{name}", text, labels=["stage"])
        for stage, counts in found:
            family.add_metric([str(stage)], getattr(counts, name))
        yield family
    pairs = CounterMetricFamily(
        "kvasir_swarm_pairs", "Routed pairs, by what became of them.", labels=["stage", "where"]
    )
    refused = CounterMetricFamily(
        "kvasir_swarm_refused", "Parts that came back unanswered.", labels=["stage", "why"]
    )
    for stage, counts in found:
        for where, name in PAIRS.items():
            pairs.add_metric([str(stage), where], getattr(counts, name))
        for why in Failure:
            refused.add_metric([str(stage), str(why)], counts.refused.get(why, 0))
    yield from (pairs, refused)


def _gauges(found: Sequence[Counted]) -> Iterator[Metric]:
    for name, text in (
        ("is_connected", "Whether the coordinator's relay connection stands."),
        ("is_engaged", "Whether experts may be computed by workers."),
        ("busy", "Busy slots, as the coordinator last read."),
        ("slots", "All slots, as the coordinator last read."),
        ("threshold", "Busy slots from which the coordinator is saturated."),
    ):
        family = GaugeMetricFamily(
            f"kvasir_swarm_{name.removeprefix('is_')}", text, labels=["stage"]
        )
        for stage, counts in found:
            family.add_metric([str(stage)], int(getattr(counts, name)))
        yield family
    workers = GaugeMetricFamily(
        "kvasir_swarm_workers", "Workers, by what is thought of them.", labels=["stage", "standing"]
    )
    for stage, counts in found:
        for each in Standing:
            workers.add_metric([str(stage), str(each)], counts.standings.get(each, 0))
    yield workers
