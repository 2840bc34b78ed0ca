"""The swarm's scalar types and the few values both layers speak of."""

from enum import StrEnum
from typing import NamedTuple, NewType, Protocol

WorkerId = NewType("WorkerId", str)
"""A node's identity: what it proved to the hub, the same over every reconnect."""

CoordinatorId = NewType("CoordinatorId", str)
ModelName = NewType("ModelName", str)

Session = NewType("Session", int)
"""A worker's relay generation: it rises with every new dial; older ones are never heard again."""

CallId = NewType("CallId", int)
"""One layer's expert work of one micro-batch; rises with every call and is never reused."""

ClaimId = NewType("ClaimId", int)
PollId = NewType("PollId", int)


class Chance(Protocol):
    """What the core needs of a seeded `random.Random`."""

    def random(self) -> float:
        """Uniform in [0, 1)."""
        ...


class Slice(NamedTuple):
    """Experts `[begin, end)` of one layer."""

    layer: int
    begin: int
    end: int


class Share(NamedTuple):
    """Of one expert's pairs in a call, in row order, those from `first` on, `pairs` of them."""

    expert: int
    first: int
    pairs: int


class Standing(StrEnum):
    """What the coordinator thinks of a worker's slice."""

    NEW = "new"  # Attached, never tried.
    TRIAL = "trial"  # Inside its grace window.
    PROVEN = "proven"  # The coordinator has checked a result of it.
    SUSPECT = "suspect"  # Late or failed; tried again by the coordinator's clock.
    QUARANTINED = "quarantined"  # Its numbers were wrong.
    GONE = "gone"  # Not attached.


TELLING = (
    Standing.QUARANTINED, Standing.SUSPECT, Standing.PROVEN, Standing.TRIAL, Standing.NEW,
)  # fmt: skip
"""A worker's standing is that of its slice that stands first here."""
RANK = {standing: rank for rank, standing in enumerate((*TELLING, Standing.GONE))}


class Reading(StrEnum):
    """What is known of a slot count now."""

    OK = "ok"
    STALE = "stale"  # The last good reading is older than it is valid for.
    FAILED = "failed"  # There was none yet.


class Failure(StrEnum):
    """Why a worker gave no answer."""

    BUSY = "busy"  # A full queue on the way: nobody's fault, computed locally.
    CLOSED = "closed"  # The worker or its relay connection went away.
    ERROR = "error"  # It said that it could not, or sent what cannot be read.
