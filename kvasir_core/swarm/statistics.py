"""What both layers show. The hub's field names are the keys of its HTTP answers."""

from dataclasses import dataclass

from kvasir_core.swarm.words import (
    CoordinatorId,
    ModelName,
    Reading,
    Session,
    Standing,
    WorkerId,
)
from kvasir_core.units import Nanos


@dataclass(frozen=True, slots=True, kw_only=True)
class CallStatistics:
    """Counts since the start."""

    calls: int
    pairs: int
    pairs_accepted: int  # Entered the sum from a worker.
    pairs_verified: int  # Answered by a worker, recomputed, entered from the local result.
    pairs_fallback: int  # Dispatched, and in the end computed locally without a check.
    dispatches: int
    trials: int
    hedges: int
    checks: int
    mismatches: int
    late: int
    dropped: int  # Answers to what was settled, over, or never asked.


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceStatistics:
    """One slice of a worker: attached, or proven by one that is gone."""

    worker: WorkerId
    session: Session
    layer: int
    experts: tuple[int, int]
    standing: Standing
    last_serve_ms: int  # Of its last checked answer; 0 = it never served.
    pairs_per_s: int
    answers: int  # Of the worker, since its last quarantine.
    in_flight: int  # Of the worker.


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorStatistics:
    """Layer 1 now."""

    is_engaged: bool
    engagements: int  # Times it engaged or disengaged.
    threshold: int
    busy: int
    slots: int
    reading: Reading
    reading_age_ns: Nanos | None
    polls_missed: int
    map_age_ns: Nanos | None
    maps_missed: int
    workers_known: int
    workers_attached: int
    slices: tuple[SliceStatistics, ...]
    calls: CallStatistics
    clock_jumps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRecruitment:
    """One model of `GET /api/moe/recruitment`."""

    model: ModelName
    busy: int  # Over coordinators with a valid reading.
    slots: int
    saturated: bool  # Any valid reading at or above the threshold now, without the dwell.
    recruiting: bool  # With it.
    base_target: int
    effective_target: int
    workers: int
    age_s: float | None  # Of the newest good reading.
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recruitment:
    """`GET /api/moe/recruitment`."""

    threshold: int
    base: int
    boost: int
    models: tuple[ModelRecruitment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A maximal run of experts with equal counts."""

    experts: tuple[int, int]
    replicas: int
    claimed: int
    target: int
    scarcity: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDemand:
    layer: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDemand:
    model: ModelName
    recruiting: bool
    target: int
    layers: tuple[LayerDemand, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """`GET /api/expert-demand`."""

    recruiting: bool  # Any model is.
    models: tuple[ModelDemand, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatistics:
    """One worker with coverage."""

    worker: WorkerId
    model: ModelName
    session: Session
    is_connected: bool
    is_draining: bool
    age_s: float  # Of its last heartbeat, by the hub's own clock.
    segments: tuple[tuple[int, int, int], ...]
    last_serve_ms: int
    doubted_by: tuple[CoordinatorId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HubStatistics:
    """Counts since the start, and the workers now."""

    nodes: tuple[NodeStatistics, ...]
    claims_open: int
    claims_granted: int
    claims_confirmed: int
    claims_lapsed: int
    recruits_above_target: int
    target_changes: int
    releases: int
    workers_lost: int
    polls_missed: int
    clock_jumps: int
