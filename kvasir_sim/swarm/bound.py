"""What the scenario's arithmetic allows during the peak: the bound that a run is compared with.

Four things limit output tokens per second, each alone:

- *offered*: arrivals of the busiest phase times mean output tokens.
- *stages*: all routed experts are elsewhere. A full micro-batch of w decodes (and, as prompts must
  be read too, w * prompt / output prompt rows) holds the slowest stage for what is not routed
  experts, plus its part in the calls; w tokens come of it.
- *workers*: each layer's experts of such a micro-batch read once, by all workers together as fast
  as they are, if every expert is everywhere.
- *links*: its rows to and from workers over the stage's uplink, in as many slices as a layer has.

Alone, the slowest stage also computes its routed experts.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvasir_core import NANOS_PER_SECOND, Plan
from kvasir_scenario.lengths import sampler_of
from kvasir_scenario.schema_workload import ClosedWorkload, RateProfile, TraceWorkload
from kvasir_scenario.swarm_report import BoundPart
from kvasir_sim.costs import CostModel

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario
    from kvasir_sim.swarm.swarm import Swarm

DRAWS = 4096  # For means of distributions.


def peak_phase(scenario: "Scenario") -> tuple[float, float, float] | None:
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


def mean_tokens(scenario: "Scenario") -> tuple[float, float] | None:
    """Prompt and output tokens of a request, mean; None for traces."""
    workload = scenario.workload
    if isinstance(workload, TraceWorkload):
        return None
    rng = np.random.default_rng(0)
    means = []
    for spec in (workload.prompt_tokens, workload.output_tokens):
        drawn = sampler_of(spec, is_whole=True).draw(rng, DRAWS)
        means.append(max(1.0, float(np.mean(drawn))))
    return means[0], means[1]


def bound_of(swarm: "Swarm", plan: Plan, costs: CostModel) -> BoundPart | None:
    """The bound, or None where the load is a trace."""
    scenario = swarm.scenario
    means = mean_tokens(scenario)
    if means is None:
        return None
    prompt, output = means
    width = min(plan.micro_batch_width, plan.running_max)
    chunk = min(round(width * prompt / output), plan.row_width - width)
    width = min(width, plan.row_width)
    rows = width + max(0, chunk)
    context = round(width * (prompt + output / 2))
    # Where the prompts do not fit beside the decodes, some micro-batches carry prompts alone.
    share = 1.0 if not chunk else min(1.0, chunk / (width * prompt / output))
    hold = costs.predict(width, context, max(0, chunk), round(prompt / 2))
    layers = max(swarm.work.layers)
    stage = swarm.work.layers.index(layers)
    rest = swarm.work.rest_ns(stage, rows, hold)
    calls = round(layers * scenario_call_s(swarm) * NANOS_PER_SECOND)
    tokens = width * share * NANOS_PER_SECOND
    terms = {"stages": tokens / max(1, rest + calls)}
    workers_ns = _workers_ns(swarm, rows)
    if workers_ns is not None:
        terms["workers"] = tokens / workers_ns
    link_ns = _link_ns(swarm, rows, layers)
    if link_ns:
        terms["links"] = tokens / link_ns
    phase = peak_phase(scenario)
    offered = None
    if phase is not None:
        offered = phase[2] * output
    elif not isinstance(scenario.workload, ClosedWorkload | TraceWorkload) and isinstance(
        scenario.workload.rate_per_s, float | int
    ):
        offered = scenario.workload.rate_per_s * output
    alone = tokens / max(1, rest + swarm.work.all_local_ns(stage, rows))
    if offered is not None:
        terms["offered"] = offered
        alone = min(alone, offered)
    limit = min(terms, key=lambda name: terms[name])
    return BoundPart(
        output_tokens_per_s=terms[limit],
        limited_by=limit,
        terms=terms,
        alone_output_tokens_per_s=alone,
    )


def scenario_call_s(swarm: "Swarm") -> float:
    """The stage's own time for one layer's call."""
    return swarm.experts.coordinator.call_s


def _workers_ns(swarm: "Swarm", rows: int) -> float | None:
    """Time of all workers together for one micro-batch's experts of all layers."""
    rate = 0.0  # Distinct experts a second.
    for kind in swarm.experts.workers:
        if kind.honesty == "honest":
            rate += kind.count / kind.per_expert_s
    if not rate:
        return None
    distinct = swarm.routing.distinct(rows) * len(swarm.numbers.layers)
    return distinct / rate * NANOS_PER_SECOND


def _link_ns(swarm: "Swarm", rows: int, layers: int) -> float:
    """Time of a stage's uplink for one micro-batch: each slice gets the rows that chose it."""
    uplink = swarm.experts.coordinator.uplink_bytes_per_s
    if uplink is None or not swarm.numbers.row_bytes:
        return 0.0
    numbers = swarm.numbers
    slices: Sequence[int] = range(0, numbers.experts, swarm.policy.slice_experts_max)
    pairs = rows * numbers.top_k // len(slices)
    per_slice = swarm.routing.rows_of(max(1, pairs), rows)
    size = layers * len(slices) * per_slice * numbers.row_bytes
    return size / uplink * NANOS_PER_SECOND
