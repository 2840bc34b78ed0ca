"""What the scenario's arithmetic allows during the peak: the bound that a run is compared with.

Six things limit output tokens per second, each alone:

- *offered*: arrivals of the busiest phase times mean output tokens.
- *stages*: all routed experts are elsewhere. A full micro-batch of w decodes (and, as prompts must
  be read too, w * prompt / output prompt rows) holds the slowest stage for what is not routed
  experts, plus its part in the calls; w tokens come of it.
- *overlap*: a stage holds so many such micro-batches at once, and each is in its hands for its
  computing and for the round trips of its layers to the nearest workers.
- *workers*: each layer's experts of such a micro-batch read once, by all workers together as fast
  as they are, if every expert is everywhere.
- *cores*: where stages and workers share them, all that they compute for such a micro-batch: with
  its routed experts at the quickest worker or all in the stages, whichever is less, and the bridge.
- *links*: its rows to and from workers over the stage's uplink, in as many slices as a layer has.

Alone, the slowest stage also computes its routed experts, and all stages share the cores.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from kvasir_core import NANOS_PER_SECOND, Plan, nanos
from kvasir_scenario.lengths import sampler_of
from kvasir_scenario.schema_workload import ClosedWorkload, TraceWorkload
from kvasir_scenario.swarm_moments import peak_phase
from kvasir_scenario.swarm_report import BoundPart, TripsPart
from kvasir_sim.costs import CostModel
from kvasir_sim.stage_costs import Reference

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario
    from kvasir_sim.swarm.swarm import Swarm

DRAWS = 4096  # For means of distributions.


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """One full micro-batch of the peak, in the stage with the most layers of routed experts.

    Attributes:
        rows: Decodes, and prompts beside them.
        tokens: Tokens that come of it, times nanoseconds per second.
        layers: Of routed experts.
        remote_ns: Computing, with every routed expert elsewhere;
        ring_ns: of all stages together.
        local_ns: Computing, with every routed expert here;
        ring_local_ns: of all stages together.
        output: Mean output tokens of a request.
    """

    rows: int
    tokens: float
    layers: int
    remote_ns: int
    ring_ns: int
    local_ns: int
    ring_local_ns: int
    output: float


def peak_of(swarm: "Swarm", plan: Plan, costs: CostModel) -> Peak | None:
    """The peak's micro-batch, or None where the load is a trace."""
    means = mean_tokens(swarm.scenario)
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
    call_ns = nanos(swarm.experts.coordinator.call_s)
    calls = layers * call_ns
    batch = Reference(
        decodes=width, context=round(prompt + output / 2), chunk_rows=max(0, chunk),
        chunk_start=round(prompt / 2),
    ).micro_batch  # fmt: skip
    ring_rest_ns = sum(
        swarm.work.rest_ns(number, rows, own_ns) for number, own_ns in enumerate(costs.holds(batch))
    )
    numbers = range(len(swarm.work.layers))
    return Peak(
        rows=rows,
        tokens=width * share * NANOS_PER_SECOND,
        layers=layers,
        remote_ns=max(1, rest + calls),
        ring_ns=ring_rest_ns + costs.turnaround_ns + sum(swarm.work.layers) * call_ns,
        local_ns=max(1, rest + swarm.work.all_local_ns(stage, rows)),
        ring_local_ns=ring_rest_ns
        + costs.turnaround_ns
        + sum(swarm.work.all_local_ns(each, rows) for each in numbers),
        output=output,
    )


def bound_of(swarm: "Swarm", peak: Peak) -> BoundPart:
    """The bound."""
    terms = {"stages": peak.tokens / peak.remote_ns}
    trips = _round_trips_s(swarm)
    if trips:
        held_ns = peak.remote_ns + peak.layers * nanos(min(trips))
        terms["overlap"] = swarm.experts.overlap * peak.tokens / held_ns
    workers_ns = _workers_ns(swarm, peak.rows)
    if workers_ns is not None:
        terms["workers"] = peak.tokens / workers_ns
    alone = peak.tokens / peak.local_ns
    cores = swarm.experts.cores
    if cores is not None:
        computed_ns = min(peak.ring_ns + _least_ns(swarm, peak.rows), peak.ring_local_ns)
        terms["cores"] = cores * peak.tokens / max(1, computed_ns)
        alone = min(alone, cores * peak.tokens / max(1, peak.ring_local_ns))
    link_ns = _link_ns(swarm, peak.rows, peak.layers)
    if link_ns:
        terms["links"] = peak.tokens / link_ns
    offered = _offered(swarm.scenario, peak.output)
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


def trips_of(swarm: "Swarm", peak: Peak) -> TripsPart | None:
    """What distance costs; None without honest workers."""
    trips = _round_trips_s(swarm)
    if not trips:
        return None
    layer_s = max(trips)
    waiting_s, computing_s = peak.layers * layer_s, peak.remote_ns / NANOS_PER_SECOND
    return TripsPart(
        layer_s=layer_s,
        micro_batch_s=waiting_s,
        computing_s=computing_s,
        overlap=swarm.experts.overlap,
        overlap_needed=1 + ceil(waiting_s / computing_s),
    )


def _round_trips_s(swarm: "Swarm") -> list[float]:
    """Of each class of honest workers."""
    return [
        2 * kind.link.latency_s + kind.jitter_s
        for kind in swarm.experts.workers
        if kind.honesty == "honest"
    ]


def _offered(scenario: "Scenario", output: float) -> float | None:
    """Output tokens per second that arrive during the peak, if the rate is known."""
    phase = peak_phase(scenario)
    if phase is not None:
        return phase[2] * output
    workload = scenario.workload
    if isinstance(workload, ClosedWorkload | TraceWorkload):
        return None
    rate = workload.rate_per_s
    return rate * output if isinstance(rate, float | int) else None


def _least_ns(swarm: "Swarm", rows: int) -> float:
    """Time of the quickest worker for one micro-batch's experts of all layers."""
    quickest = [kind.per_expert_s for kind in swarm.experts.workers if kind.honesty == "honest"]
    distinct = swarm.routing.distinct(rows) * len(swarm.numbers.layers)
    return distinct * min(quickest, default=0.0) * NANOS_PER_SECOND


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
