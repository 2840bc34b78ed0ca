"""What the engine can say of itself at one moment: frozen values, named as in `report.json`."""

from dataclasses import dataclass

from kvasir_core.microbatch import BindingLimit
from kvasir_core.plan import Plan
from kvasir_core.statistics import RingStatistics
from kvasir_rt import wire
from kvasir_rt.crew import Crew
from kvasir_rt.laps import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSnapshot:
    """One stage. `holding` is the micro-batch in hand as of its last beat; counts are its own."""

    index: int
    layers: tuple[int, int]
    state: str  # absent | loading | loaded | idle | listening | wired
    pid: int | None
    host: str
    device: str
    restarts: int
    resident_bytes: int
    holding: int | None
    times: StageTimes
    traffic: dict[str, int]
    experts: wire.ExpertCounts | None = None  # None: it has no coordinator.


@dataclass(frozen=True, slots=True, kw_only=True)
class RingSnapshot:
    """The whole ring. Times are nanoseconds of the engine's clock, which starts with it.

    `down_why` is empty while the ring serves or recovers. `engine_cpu_ns` is the processor time of
    the bridge's engine thread, for all laps together.
    """

    plan: Plan
    now_ns: int
    is_ready: bool
    down_why: str
    statistics: RingStatistics
    binding_limits: dict[BindingLimit, int]
    laps: int
    spans: int
    lap_ns_p50: int | None
    lap_ns_p95: int | None
    tokens: int
    engine_cpu_ns: int
    traffic: dict[str, int]
    stages: tuple[StageSnapshot, ...]


def stage_snapshots(crew: Crew, times: tuple[StageTimes, ...]) -> tuple[StageSnapshot, ...]:
    """The crew's members with their times."""
    compute = crew.options.compute
    snapshots = []
    has_experts = isinstance(compute, wire.ModelSpec) and compute.experts is not None
    nothing = wire.ExpertCounts() if has_experts else None
    for member, layers, own in zip(crew.members, crew.options.plan.layers, times, strict=True):
        device = compute.devices[member.stage] if isinstance(compute, wire.ModelSpec) else "none"
        snapshots.append(
            StageSnapshot(
                index=member.stage,
                layers=layers,
                state=member.step.name.lower(),
                pid=member.pid,
                host=member.join.host if member.join is not None else "",
                device=device,
                restarts=member.restarts,
                resident_bytes=member.resident_bytes,
                holding=member.beat.holding if member.beat is not None else None,
                times=own,
                traffic=dict(member.beat.traffic) if member.beat is not None else {},
                experts=(member.beat.experts if member.beat is not None else None) or nothing,
            )
        )
    return tuple(snapshots)
