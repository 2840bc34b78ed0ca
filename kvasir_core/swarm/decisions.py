"""All that the coordinator and the hub may ask of a shell: orders, as imperatives.

Nothing here opens a connection to a worker: workers dial, and are answered (law M9).
"""

from typing import NamedTuple

from kvasir_core.swarm.events import ServedRow
from kvasir_core.swarm.words import (
    CallId,
    ClaimId,
    CoordinatorId,
    ModelName,
    PollId,
    Session,
    Share,
    Slice,
    WorkerId,
)
from kvasir_core.units import Nanos

# The coordinator's.


class PollSlots(NamedTuple):
    """Ask the own bridge for its slots; report `SlotsPolled` or `SlotsPollFailed`."""

    poll: PollId


class FetchMap(NamedTuple):
    """Ask the hub for the dispatch map; report `MapFetched` or `MapFetchFailed`."""

    fetch: PollId


class Engage(NamedTuple):
    """For the record: expert work goes to proven workers from now on."""


class Disengage(NamedTuple):
    """For the record: it returns to the local path. `why`: drained, blind, no_gain."""

    why: str


class Dispatch(NamedTuple):
    """Send this part of a call to the worker; report its answer or failure.

    A trial is a copy: its pairs are computed elsewhere too, and its answer enters no sum.
    """

    call: CallId
    part: int
    worker: WorkerId
    session: Session
    layer: int
    shares: tuple[Share, ...]
    deadline: Nanos  # On the shell's clock; afterwards the answer is late.
    is_trial: bool


class Hedge(NamedTuple):
    """The part is overdue: send it to this worker as well; the first right answer counts."""

    call: CallId
    part: int
    worker: WorkerId
    session: Session
    layer: int
    shares: tuple[Share, ...]
    deadline: Nanos


class ComputeLocally(NamedTuple):
    """The part's local result enters the sum; any answer to it is dropped. Part 0 never left."""

    call: CallId
    part: int
    shares: tuple[Share, ...]


class Accept(NamedTuple):
    """This worker's answer enters the sum, and nothing else does for this part."""

    call: CallId
    part: int
    worker: WorkerId


class Verify(NamedTuple):
    """Recompute the part, compare with this worker's answer, report `AnswerChecked`."""

    call: CallId
    part: int
    worker: WorkerId
    session: Session


class Conclude(NamedTuple):
    """Every pair is local or accepted: when the local parts are computed, the call is done."""

    call: CallId


class Quarantine(NamedTuple):
    """This worker's numbers were wrong; nothing of it is used for so long."""

    worker: WorkerId
    duration: Nanos


class Report(NamedTuple):
    """Tell the hub (`ServingReported`)."""

    rows: tuple[ServedRow, ...]


CoordinatorDecision = (
    PollSlots
    | FetchMap
    | Engage
    | Disengage
    | Dispatch
    | Hedge
    | ComputeLocally
    | Accept
    | Verify
    | Conclude
    | Quarantine
    | Report
)

# The hub's.


class PollCoordinator(NamedTuple):
    """Ask this coordinator for its slots; report `SlotsPolled` or `SlotsPollFailed`."""

    poll: PollId
    coordinator: CoordinatorId


class SetTarget(NamedTuple):
    """For the record: the model's effective target is this from now on."""

    model: ModelName
    target: int
    is_recruiting: bool


class Assign(NamedTuple):
    """Answer the volunteer: this slice, claimed for it."""

    node: WorkerId
    claim: ClaimId
    lease: Nanos  # Left of the claim.
    model: ModelName
    slice: Slice
    scarcity: float
    replicas: int  # Claims counted, this one not.
    target: int


class Decline(NamedTuple):
    """Answer the volunteer: nothing now; ask again after a while."""

    node: WorkerId
    reason: str
    retry_after: Nanos


class Acknowledge(NamedTuple):
    """Answer the heartbeat: dial with this generation; stop serving what is released."""

    worker: WorkerId
    session: Session
    release: tuple[Slice, ...]


class AdmitRelay(NamedTuple):
    worker: WorkerId
    session: Session


class RefuseRelay(NamedTuple):
    """Close what was just dialled."""

    worker: WorkerId
    session: Session
    why: str


class LoseWorker(NamedTuple):
    """For the record: no heartbeat for the coverage TTL; its slices are uncovered."""

    worker: WorkerId


class LapseClaim(NamedTuple):
    """For the record: a claim was not confirmed in time and counts no longer."""

    claim: ClaimId
    node: WorkerId


HubDecision = (
    PollCoordinator
    | SetTarget
    | Assign
    | Decline
    | Acknowledge
    | AdmitRelay
    | RefuseRelay
    | LoseWorker
    | LapseClaim
)
