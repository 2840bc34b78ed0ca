"""Section `experts`: a swarm of workers that serve routed experts beside the ring."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from kvasir_scenario.schema_model import Layers
from kvasir_scenario.schema_ring import Link
from kvasir_scenario.schema_types import (
    AsTuple,
    Bytes,
    Count,
    CountOrZero,
    Name,
    PathText,
    PositiveSeconds,
    PositiveShare,
    Price,
    Rate,
    Seconds,
    Section,
    Share,
    Whole,
    broken,
)
from kvasir_scenario.schema_workload import Durations


class ExpertModel(Section):
    """What is routed; keys left out come from `model`."""

    layers: Layers | None = None
    """Layers that hold routed experts."""
    first_layer: Annotated[int, Field(ge=0, le=10_000)] = 0
    """The first of them."""
    experts: Annotated[int, Field(ge=1, le=4096)] | None = None
    top_k: Annotated[int, Field(ge=1, le=4096)] | None = None
    bytes_per_expert: Bytes | None = None


class Routing(Section):
    """How tokens choose experts."""

    kind: Literal["uniform", "zipf", "measured"] = "uniform"
    exponent: Annotated[float, Field(ge=0, le=10)] = 1.0
    """Kind zipf."""
    file: PathText | None = None
    """Kind measured: shares by layer."""

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if (self.kind == "measured") != (self.file is not None):
            raise broken("file", "kind measured needs a file, the others take none")
        return self


class LocalExperts(Section):
    """Time of the experts of one layer for one micro-batch, computed by the stage itself."""

    pass_s: Seconds = 0.0
    per_expert_s: Seconds = 6.3e-6
    """For each distinct expert touched."""
    per_row_s: Seconds = 0.0
    is_in_costs: bool = False
    """The times of `costs` hold it already (measured whole layers)."""


class Coordinator(Section):
    """Layer 1: when routed experts leave the local path."""

    policy: Literal["dwell", "naive"] = "dwell"
    """naive: the threshold alone, for comparison."""
    saturation_threshold: Count = 2
    """Busy slots."""
    period_s: PositiveSeconds = 3.0
    poll_timeout_s: PositiveSeconds = 1.0
    up_readings: Count = 2
    down_readings: Count = 10
    engaged_min_s: Seconds = 60.0
    idle_timeout_s: Seconds = 20.0
    grace_s: PositiveSeconds = 15.0
    unknown_limit_s: PositiveSeconds = 30.0
    map_period_s: PositiveSeconds = 5.0
    """How often it fetches the hub's dispatch map."""
    call_timeout_s: PositiveSeconds = 2.0
    """Of one layer's call in total; then what is left is computed locally."""
    hedge_s: PositiveSeconds = 0.01
    """No other replica is asked, and no part computed locally, sooner than this."""
    answers_checked_first: Count = 20
    check_share: PositiveShare = 0.02
    tolerance: Annotated[float, Field(gt=0, le=1)] = 5e-3
    """Relative L2 error of a checked answer's worst row."""
    quarantine_s: PositiveSeconds = 600.0
    no_gain_s: PositiveSeconds = 60.0
    """Remote help measured as no gain for so long: local."""
    call_s: Seconds = 0.0
    """A stage's own time to pack, send and add up the remote parts of one layer."""
    uplink_bytes_per_s: Rate | None = None
    """Each stage's connection to all its workers, each way; null: bytes take no time."""

    @model_validator(mode="after")
    def _check_polls(self) -> Self:
        if self.poll_timeout_s > self.period_s:
            raise broken(
                "poll_timeout_s",
                f"found {self.poll_timeout_s:g}; a poll is over before the next: at most period_s "
                f"({self.period_s:g})",
            )
        return self


class Hub(Section):
    """Layer 2: how many replicas are wanted, and who is offered what."""

    policy: Literal["dwell", "naive"] = "dwell"
    """naive: the threshold alone, claims do not count, and who is not needed leaves at once."""
    warm_rejoin: bool = True
    """A slice on a volunteer's disk is offered to it before any download."""
    latency_s: Seconds = 0.001
    """Between coordinator and hub, one way."""
    poll_s: PositiveSeconds = 10.0
    poll_timeout_s: PositiveSeconds = 4.0
    reading_valid_s: PositiveSeconds = 45.0
    up_s: Seconds = 30.0
    down_s: Seconds = 300.0
    base: CountOrZero = 2
    boost: CountOrZero = 1
    coverage_ttl_s: PositiveSeconds = 120.0
    heartbeat_s: PositiveSeconds = 15.0
    claim_ttl_s: PositiveSeconds = 120.0
    volunteer_poll_s: PositiveSeconds = 45.0
    idle_exit_s: PositiveSeconds = 600.0
    release_period_s: PositiveSeconds = 30.0
    """At most a quarter of the surplus leaves in one."""
    slice_experts_max: Count = 64

    @model_validator(mode="after")
    def _check_polls(self) -> Self:
        if self.poll_timeout_s > self.poll_s:
            raise broken(
                "poll_timeout_s",
                f"found {self.poll_timeout_s:g}; a poll is over before the next: at most poll_s "
                f"({self.poll_s:g})",
            )
        if self.reading_valid_s < self.poll_s:
            raise broken(
                "reading_valid_s",
                f"found {self.reading_valid_s:g}; at least poll_s ({self.poll_s:g}), or no reading "
                "is ever valid until the next",
            )
        return self


class Sessions(Section):
    """A worker's owner comes and goes."""

    on_s: Durations
    off_s: Durations


class WorkerClass(Section):
    """So many workers of one kind."""

    name: Name
    count: Annotated[int, Field(ge=1, le=100_000), Whole]
    price_per_hour: Price | None = None
    """US dollars for one of them, for `kvasir-sim capacity`; `--price` goes before it."""
    per_expert_s: PositiveSeconds
    """Time for one distinct expert of one call."""
    per_row_s: Seconds = 0.0
    link: Link
    """Between worker and ring, one way."""
    jitter_s: Seconds = 0.0
    """Mean of what a round trip takes more (exponential)."""
    lost_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of its calls and messages that get lost."""
    download_bytes_per_s: Rate
    load_bytes_per_s: Rate = 2e9
    """From its disk into memory."""
    memory_bytes: Bytes | None = None
    """What it gives; null: no limit of its own."""
    experts_max: Count | None = None
    arrival_s: Durations = 0.0
    """When each comes to the market for the first time."""
    sessions: Sessions | None = None
    """null: stays for ever."""
    keeps_slices: bool = True
    """Finds on disk what it served before; else it downloads anew whatever it gave up."""
    honesty: Literal[
        "honest",
        "nan",
        "zeros",
        "swapped_rows",
        "stale",
        "scaled",
        "noise",
        "turncoat",
        "sometimes",
    ] = "honest"
    wrong_share: Share = 0.05
    """Honesty sometimes: share of wrong answers."""
    honest_answers: Count = 40
    """Honesty turncoat: so many right answers first."""


class Experts(Section):
    """Routed experts: local at rest, shared with workers under load."""

    model: ExpertModel = ExpertModel()
    routing: Routing = Routing()
    local: LocalExperts | None = None
    """null: as `costs` of kind roofline have it; for other kinds the defaults of this section."""
    overlap: Annotated[int, Field(ge=1, le=1024)] = 2
    """Most micro-batches that a stage holds at once; 1 blocks."""
    cores: Count | None = None
    """Cores of one machine on which all stages and workers compute, one thread each; null: each
    has a core of its own."""
    coordinator: Coordinator = Coordinator()
    hub: Hub | None = Hub()
    """null: no market; slices are dealt out to the workers, who attach when they arrive."""
    workers: Annotated[tuple[WorkerClass, ...], AsTuple, Field(max_length=256)] = ()

    @model_validator(mode="after")
    def _check_market(self) -> Self:
        hub = self.hub
        if hub is not None and hub.heartbeat_s >= hub.coverage_ttl_s:
            raise broken(
                "hub.heartbeat_s",
                f"found {hub.heartbeat_s:g}; it must be less than coverage_ttl_s "
                f"({hub.coverage_ttl_s:g}), or everyone is lost between two heartbeats",
            )
        return self

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [worker.name for worker in self.workers]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise broken(f"workers.{index}.name", f"found {name} a second time")
        return self
