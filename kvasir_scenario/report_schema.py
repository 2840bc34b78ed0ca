"""`report.json`: every key, its unit and when it is null. Programs rely on these names.

The schema version rises when a key changes its meaning or goes; new keys do not raise it.
Undefined values are null, never 0. All keys are always present.
"""

import json
from typing import Literal

from pydantic import Field

from kvasir_core.verdict import VerdictKind
from kvasir_scenario.report_part import Part
from kvasir_scenario.swarm_report import SwarmPart

SCHEMA_VERSION = 1
Mode = Literal["simulated", "measured"]
Provenance = Literal["assumed", "fitted", "measured"]


class VerdictPart(Part):
    """What the run was like; `kvasir_core.verdict` documents precedence and thresholds."""

    kind: VerdictKind
    stage: int | None
    """The stage that holds the others back, if one does."""
    evidence: list[str]


class PlanPart(Part):
    """The plan's numbers that bound every message."""

    row_width: int
    micro_batch_width: int
    boundary_bytes_max: int
    result_bytes_max: int
    window: int
    """Open micro-batches allowed; where it is computed, its last value."""
    digest: str


class CountsPart(Part):
    """Requests over the whole run: offered is the sum of the others."""

    offered: int
    finished: int
    running: int
    waiting: int
    refused: int
    cancelled: int
    """By the client or by a deadline."""
    failed: int
    """Failed in the ring, or already in the trace (`workload.trace_failed`)."""


class LittlePart(Part):
    """Little's law, exact: mean in system = arrival rate x mean residence, whole run."""

    in_system_mean: float | None
    arrival_rate_per_s: float | None
    """Requests that entered the system (not the refused, not those that failed in the trace)."""
    residence_mean_s: float | None
    """Unfinished requests count until the end of the run."""


class ThroughputPart(Part):
    """Per second of the measured window; null when the window is empty."""

    requests_per_s: float | None
    """Finished requests, credited when they finish."""
    output_tokens_per_s: float | None
    goodput_requests_per_s: float | None
    """Finished requests within every limit of `slo`; null without one."""


class LatencyPart(Part):
    """Seconds; percentiles by linear interpolation."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None
    n: int
    few_samples: list[str]
    """Percentiles on too few samples to be trusted: p50 needs 2, p90 10, p99 100."""


class LatenciesPart(Part):
    """Events of the measured window, credited when they happen."""

    ttft_s: LatencyPart
    """Arrival to first token."""
    tpot_s: LatencyPart
    """(End to end - TTFT) / (output tokens - 1), of requests that finished."""
    itl_s: LatencyPart
    """Between consecutive tokens of one request."""
    e2e_s: LatencyPart
    """Arrival to the end, of requests that finished."""


class BlockedPart(Part):
    """Seconds."""

    credit: float
    """The next stage had no free input slot."""
    experts: float
    """Expert results were outstanding."""


class StarvedPart(Part):
    """Seconds."""

    no_demand: float
    dependency: float
    capacity: float
    upstream: float


class StagePart(Part):
    """One stage over the whole run: busy + blocked + starved = elapsed."""

    index: int
    layers: tuple[int, int]
    """[start, stop)."""
    held_s: float
    """Busy + blocked."""
    busy_s: float
    blocked_s: float
    starved_s: float
    blocked_by: BlockedPart
    starved_by: StarvedPart
    micro_batches: int
    rows: int


class BindingPart(Part):
    """What stopped each composed micro-batch; window, dependency: how often one forbade another."""

    nothing_waiting: int
    row_width: int
    micro_batch_width: int
    cohort: int
    running_cap: int
    kv: int
    window: int
    dependency: int


class KvPart(Part):
    """KV blocks of the scarcest stage."""

    blocks_total: int
    blocks_peak: int
    preemptions: int
    recomputed_tokens: int


class WorkloadPart(Part):
    """What the input was like."""

    trace_span_s: float | None
    """From the first arrival to the last, as given; null for requests made up on the way."""
    out_of_order: int
    ties: int
    clipped: int
    trace_failed: int
    """Rows without output: counted as offered and failed, never as samples."""


class SloPart(Part):
    """Seconds; null where no limit is set."""

    ttft_s: float | None
    tpot_s: float | None


class CostsPart(Part):
    """Where the stage times come from."""

    provenance: Provenance
    notes: list[str]


class Variant(Part):
    """A what-if run beside the baseline."""

    name: str
    report: "Report"


class Report(Part):
    """All that a run says of itself."""

    schema_version: Literal[1]
    name: str
    mode: Mode
    seed: int | None
    verdict: VerdictPart
    notes: list[str]
    """What a reader must know before using the figures."""
    plan: PlanPart
    counts: CountsPart
    throughput: ThroughputPart
    latency: LatenciesPart
    stages: list[StagePart]
    binding_limits: BindingPart
    micro_batches: int
    """Micro-batches composed."""
    kv: KvPart
    workload: WorkloadPart
    little: LittlePart
    slo: SloPart
    costs: CostsPart
    elapsed_s: float
    measured_window_s: tuple[float, float]
    """(start, stop] of throughput and latency; a window that starts at 0 includes 0."""
    swarm: SwarmPart | None = Field()
    """Workers and the market; null without experts."""
    variants: list[Variant]

    def to_json(self) -> str:
        """Strict JSON with a fixed order of keys and a final line end."""
        document = self.model_dump(mode="json")
        return json.dumps(document, indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def parse_report(text: str) -> Report:
    """Read a report back.

    Raises:
        pydantic.ValidationError: It is not one.
    """
    return Report.model_validate_json(text)
