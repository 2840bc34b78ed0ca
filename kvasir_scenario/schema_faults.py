"""Section `faults`: what breaks, when, and for how long."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag, model_validator

from kvasir_core.plan import STAGES_MAX
from kvasir_scenario.schema_types import (
    Factor,
    Name,
    Seconds,
    Section,
    Share,
    broken,
    choose,
    is_number,
)
from kvasir_scenario.schema_workload import Durations


def _index_or_any(value: Any) -> str | None:
    if is_number(value):
        return "number"
    return "any" if value == "any" else None


_Index = Annotated[
    Annotated[int, Field(ge=0, lt=STAGES_MAX), Tag("number")]
    | Annotated[Literal["any"], Tag("any")],
    choose(_index_or_any, "it must be an index from 0, or any (drawn each time)"),
]


class _Fault(Section):
    at_s: Seconds | None = None
    """Once, at this time."""
    rate_per_h: Annotated[float, Field(gt=0, le=3.6e6)] | None = None
    """Again and again, at random times with this mean rate."""

    @model_validator(mode="after")
    def _check_when(self) -> Self:
        if (self.at_s is None) == (self.rate_per_h is None):
            found = "neither" if self.at_s is None else "both"
            raise broken("", f"found {found} of at_s and rate_per_h; give exactly one")
        return self


class _LastingFault(_Fault):
    for_s: Durations
    """How long until all is well again."""


class StageLost(_LastingFault):
    """A stage dies, its KV with it; a replacement is ready after for_s."""

    kind: Literal["stage_lost"]
    stage: _Index


class StageSlow(_LastingFault):
    """A stage computes slower."""

    kind: Literal["stage_slow"]
    stage: _Index
    factor: Factor
    """Multiplies its hold times."""


class LinkSlow(_LastingFault):
    """A link has more latency, less bandwidth, or both. Hop k leaves stage k."""

    kind: Literal["link_slow"]
    hop: _Index
    factor: Factor = 1.0
    """Multiplies latency and transfer time."""
    add_s: Seconds = 0.0
    """Added to the latency."""

    @model_validator(mode="after")
    def _check_changes_something(self) -> Self:
        if self.factor == 1 and self.add_s == 0:
            raise broken("factor", "neither factor nor add_s changes anything; set one")
        return self


class LinkStop(_LastingFault):
    """Nothing passes a link; what was sent arrives afterwards, in order."""

    kind: Literal["link_stop"]
    hop: _Index


class WorkerLost(_LastingFault):
    """Workers crash and come back after for_s."""

    kind: Literal["worker_lost"]
    workers: Name | None = None
    """Name of a class; null: any worker."""
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the class; null: one worker."""


class WorkerStalled(_LastingFault):
    """Workers accept calls and do not answer."""

    kind: Literal["worker_stalled"]
    workers: Name | None = None
    share: Annotated[float, Field(gt=0, le=1)] | None = None


class WorkerSlow(_LastingFault):
    """Workers compute slower."""

    kind: Literal["worker_slow"]
    workers: Name | None = None
    share: Annotated[float, Field(gt=0, le=1)] | None = None
    factor: Factor


class HubLost(_LastingFault):
    """The hub crashes; it restarts after for_s with what it keeps on disk."""

    kind: Literal["hub_lost"]


class HubPaused(_LastingFault):
    """The hub's process stops (SIGSTOP) and goes on after for_s, its memory intact."""

    kind: Literal["hub_paused"]


class RelayLost(_LastingFault):
    """The relay is gone; workers dial again."""

    kind: Literal["relay_lost"]


class PollHangs(_LastingFault):
    """Polls of the coordinator's slots get no answer."""

    kind: Literal["poll_hangs"]


class MessagesLost(_LastingFault):
    """Control messages are lost, doubled or delayed."""

    kind: Literal["messages_lost"]
    lost_share: Share = 0.0
    doubled_share: Share = 0.0
    delay_s: Seconds = 0.0


class ClockJump(_Fault):
    """A wall clock steps; monotonic time goes on."""

    kind: Literal["clock_jump"]
    where: Literal["hub", "worker"]
    by_s: Annotated[float, Field(ge=-1e9, le=1e9)]


Fault = Annotated[
    StageLost
    | StageSlow
    | LinkSlow
    | LinkStop
    | WorkerLost
    | WorkerStalled
    | WorkerSlow
    | HubLost
    | HubPaused
    | RelayLost
    | PollHangs
    | MessagesLost
    | ClockJump,
    Field(discriminator="kind"),
]
RING_FAULTS = (StageLost, StageSlow, LinkSlow, LinkStop)
WORKER_FAULTS = (WorkerLost, WorkerStalled, WorkerSlow)
