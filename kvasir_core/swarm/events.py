"""All that a shell may tell the coordinator and the hub: facts, in the past tense.

Ranges are half-open. What peers sent is passed on as it came: the core checks it.
"""

from typing import NamedTuple

from kvasir_core.events import TimePassed
from kvasir_core.swarm.words import (
    CallId,
    ClaimId,
    CoordinatorId,
    Failure,
    ModelName,
    PollId,
    Session,
    Slice,
    Standing,
    WorkerId,
)
from kvasir_core.units import Nanos

# To both.


class SlotsPolled(NamedTuple):
    """A `GET /slots` was answered: so many slots, so many of them busy."""

    poll: PollId
    busy: int
    slots: int


class SlotsPollFailed(NamedTuple):
    """It failed, or its answer was no list of slots."""

    poll: PollId


# To the coordinator.


class MapRow(NamedTuple):
    """A worker's slice, and the relay generation under which it is reached."""

    worker: WorkerId
    session: Session
    layer: int
    begin: int
    end: int


class MapFetched(NamedTuple):
    """The hub's dispatch map for this model, whole."""

    fetch: PollId
    rows: tuple[MapRow, ...]


class MapFetchFailed(NamedTuple):
    fetch: PollId


class WorkerAttached(NamedTuple):
    """A worker can be reached (and was not found by the map)."""

    worker: WorkerId
    session: Session
    slices: tuple[Slice, ...]


class WorkerDetached(NamedTuple):
    """It can no longer be reached under this generation."""

    worker: WorkerId
    session: Session


class ExpertsRouted(NamedTuple):
    """A micro-batch's router chose: `(expert, pairs)` with experts ascending, pairs at least 1.

    A pair is one row and one of its experts.
    """

    call: CallId
    layer: int
    pairs: tuple[tuple[int, int], ...]


class AnswerArrived(NamedTuple):
    """A worker answered. `norm_ratio`: largest output row norm over largest input row norm."""

    call: CallId
    part: int
    worker: WorkerId
    session: Session
    is_shaped: bool  # As many rows and columns as were asked for, of the right type.
    norm_ratio: float | None  # Not finite if any number is not; None says the same.


class AnswerFailed(NamedTuple):
    call: CallId
    part: int
    worker: WorkerId
    session: Session
    why: Failure


class AnswerChecked(NamedTuple):
    """What `Verify` asked for: the relative L2 error of the worst row; None is "not finite"."""

    call: CallId
    part: int
    worker: WorkerId
    session: Session
    error: float | None


class StageMeasured(NamedTuple):
    """What the stage did with its time since the last such report."""

    local_pairs: int  # Pairs it computed itself...
    local_ns: Nanos  # ...in so much time.
    blocked_ns: Nanos  # Every held micro-batch waited for experts.


CoordinatorEvent = (
    SlotsPolled
    | SlotsPollFailed
    | MapFetched
    | MapFetchFailed
    | WorkerAttached
    | WorkerDetached
    | ExpertsRouted
    | AnswerArrived
    | AnswerFailed
    | AnswerChecked
    | StageMeasured
    | TimePassed
)

# To the hub.


class ModelRegistered(NamedTuple):
    """A model's metadata was read. `layers` are those that hold experts; dense models have none."""

    model: ModelName
    layers: tuple[int, ...]
    experts: int
    hidden_size: int


class CoordinatorAttached(NamedTuple):
    """A coordinator serves this model and can be polled.

    Each stage of a ring has one, and all of them read one bridge's slots: coordinators with the
    same `slots_of` are shown as one load, though each has a gauge of its own.
    """

    coordinator: CoordinatorId
    model: ModelName
    slots_of: str = ""  # Empty: its own.


class CoordinatorGone(NamedTuple):
    """It said goodbye. One that only fails to answer stays, and goes blind."""

    coordinator: CoordinatorId


class Held(NamedTuple):
    """A slice on a volunteer's disk."""

    model: ModelName
    layer: int
    begin: int
    end: int


class VolunteerAsked(NamedTuple):
    """A node offers room for so many experts, for one model or any."""

    node: WorkerId
    model: ModelName | None
    experts_max: int
    holds: tuple[Held, ...] = ()


class CoverageReported(NamedTuple):
    """A worker's heartbeat: all that it serves now. Nothing at all is its goodbye."""

    worker: WorkerId
    model: ModelName
    segments: tuple[Slice, ...]
    claim: ClaimId | None = None
    is_draining: bool = False


class RelayOpened(NamedTuple):
    """A worker dialled the relay and showed this generation."""

    worker: WorkerId
    session: Session


class RelayClosed(NamedTuple):
    worker: WorkerId
    session: Session


class ServedRow(NamedTuple):
    """What a coordinator says of one worker's slice."""

    worker: WorkerId
    layer: int
    begin: int
    end: int
    standing: Standing
    last_serve_ms: int  # Of its last checked answer; 0 = never served.
    pairs: int  # Dispatched since the last report.


class ServingReported(NamedTuple):
    coordinator: CoordinatorId
    rows: tuple[ServedRow, ...]


class ClaimRow(NamedTuple):
    claim: ClaimId
    node: WorkerId
    model: ModelName
    layer: int
    begin: int
    end: int
    remaining_ns: Nanos


class BanRow(NamedTuple):
    node: WorkerId
    remaining_ns: Nanos


class ProvenRow(NamedTuple):
    worker: WorkerId
    model: ModelName
    layer: int
    begin: int
    end: int
    last_serve_ms: int


class StateRestored(NamedTuple):
    """The hub restarted with what it had kept. Legal only as its first event."""

    models: tuple[ModelRegistered, ...]
    recruiting: tuple[ModelName, ...]
    claims: tuple[ClaimRow, ...]
    bans: tuple[BanRow, ...]
    proven: tuple[ProvenRow, ...]
    claim_next: ClaimId
    session_next: Session


HubEvent = (
    SlotsPolled
    | SlotsPollFailed
    | ModelRegistered
    | CoordinatorAttached
    | CoordinatorGone
    | VolunteerAsked
    | CoverageReported
    | RelayOpened
    | RelayClosed
    | ServingReported
    | StateRestored
    | TimePassed
)
