"""The `swarm` part of `report.json`: workers, the market, and what remote experts cost and gave.

Undefined values are null, never 0. Rates are per hour of the whole run.
"""

from kvasir_scenario.report_part import Part


class SpanPart(Part):
    """What the ring gave between two moments of the run."""

    start_s: float
    stop_s: float
    output_tokens_per_s: float | None
    tpot_s: float | None
    """Mean time between two tokens of one request, over the tokens of this span."""


class BoundPart(Part):
    """Output tokens per second that the scenario's arithmetic allows during the peak."""

    output_tokens_per_s: float
    """The smallest of the terms."""
    limited_by: str
    terms: dict[str, float]
    """offered, stages (no routed expert left on them), overlap, workers, links: each alone."""
    alone_output_tokens_per_s: float
    """With every routed expert on the stages, or what is offered if that is less."""


class TripsPart(Part):
    """What a layer's call costs by distance alone, and what hides it."""

    layer_s: float
    """There and back, once a layer, to the farthest class of workers."""
    micro_batch_s: float
    """So long a micro-batch waits in the stage of the most layers."""
    computing_s: float
    """And so long that stage computes a full one meanwhile, its routed experts elsewhere."""
    overlap: int
    """Most micro-batches in a stage's hands."""
    overlap_needed: int
    """From so many on the stage is never idle for distance."""


class QuarantinePart(Part):
    """Workers of one honesty, over the whole run; in a measured run all are of the kind `real`."""

    workers: int
    quarantined: int
    first_s_max: float | None
    """When the last of those that were quarantined was so for the first time."""
    wrong_accepted_max: int | None
    """Most wrong answers of one worker that entered a sum before it was quarantined; null where
    nobody can know (a measured run)."""


class SwarmPart(Part):
    """A run's swarm."""

    policy: str
    """The market's: naive, dwell, or dwell with warm rejoin; and the coordinator's if another."""
    workers: int
    """Of all classes, whether they ever came or not; measured: those that ever covered anything."""
    workers_online_max: int
    workers_covering_max: int
    target_base: int | None
    """null: no market."""
    target_max: int | None
    target_changes: int
    target_changes_per_hour: float | None
    flips_per_hour: float | None
    """Times that the coordinator engaged or disengaged."""
    engaged_s: float
    downloads: int
    downloads_per_hour: float | None
    download_bytes: int
    warm_loads: int
    """Slices that came from the worker's own disk."""
    warm_loads_per_hour: float | None
    wasted_downloads: int
    """Downloaded, and given up before any checked or accepted pair was served."""
    wasted_downloads_per_hour: float | None
    recruits_above_target: int
    claims_lapsed: int
    releases: int
    workers_lost: int
    slice_starts: int
    slice_stops: int
    share_remote_pairs: float | None
    """Of all (row, expert) pairs, those whose result came from a worker."""
    dispatches: int
    trials: int
    hedges: int
    local_fallbacks: int
    """Pairs that were sent away and in the end computed by the stage, per layer decided."""
    late_answers: int
    checks: int
    mismatches: int
    quarantined: dict[str, QuarantinePart]
    """By honesty."""
    wrong_answers_accepted: int | None
    """null in a measured run: nobody knows."""
    output_error_mean: float | None
    """Relative error of all pairs' results, mean; those computed locally have none."""
    time_to_first_relief_s: float | None
    """From the first reading at the threshold to the first accepted remote pair after it."""
    time_to_full_coverage_s: float | None
    """From there to every expert having its raised target of replicas."""
    time_to_contraction_s: float | None
    """From the last reading at the threshold to no replica above the base target."""
    trips: TripsPart | None
    """null: no workers, or costs unknown."""
    blocked_by_experts_share: float | None
    """Of the stages' time."""
    rest: SpanPart | None
    """Before the workload's phase of the highest rate."""
    peak: SpanPart
    """That phase; where the workload has no phases, the measured window."""
    bound: BoundPart | None
    """null where costs or load are unknown."""
    control_decisions: int
    law_checks: int
