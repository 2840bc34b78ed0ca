"""The records of a call: its parts, their flights, and checks that are being computed."""

from kvasir_core.swarm.standing import Worker
from kvasir_core.swarm.words import CallId, Session, Share, Slice, WorkerId
from kvasir_core.units import Nanos


class Part:
    """Pairs of a call that left, and are not settled yet."""

    __slots__ = (
        "call", "deadline", "flights", "is_hedged", "layer", "number", "pairs", "shares", "tried",
    )  # fmt: skip

    def __init__(
        self, call: CallId, number: int, layer: int, shares: tuple[Share, ...], pairs: int,
        deadline: Nanos,
    ) -> None:  # fmt: skip
        self.call = call
        self.number = number
        self.layer = layer
        self.shares = shares
        self.pairs = pairs
        self.deadline = deadline
        self.flights = 0  # In the air now.
        self.is_hedged = False
        self.tried: list[WorkerId] = []

    @property
    def key(self) -> tuple[CallId, int]:
        return self.call, self.number


class Flight:
    """A part, or a trial, on its way to one worker and back."""

    __slots__ = (
        "call", "is_open", "is_overdue", "is_trial", "pairs", "part", "sent_at", "session",
        "slice", "worker",
    )  # fmt: skip

    def __init__(
        self, call: CallId, part: int, worker: Worker, session: Session, slice_: Slice,
        pairs: int, sent_at: Nanos, is_trial: bool,
    ) -> None:  # fmt: skip
        self.call = call
        self.part = part
        self.worker = worker
        self.session = session
        self.slice = slice_
        self.pairs = pairs
        self.sent_at = sent_at
        self.is_trial = is_trial
        self.is_open = True
        self.is_overdue = False

    @property
    def key(self) -> tuple[CallId, int, WorkerId]:
        return self.call, self.part, self.worker.id


class Check:
    """An answer whose recomputation was ordered and not yet reported."""

    __slots__ = ("elapsed_ns", "expires_at", "is_trial", "key", "session", "slice", "worker")

    def __init__(self, flight: Flight, elapsed_ns: int, expires_at: Nanos) -> None:
        self.key = flight.key
        self.worker = flight.worker
        self.session = flight.session
        self.slice = flight.slice
        self.is_trial = flight.is_trial
        self.elapsed_ns = elapsed_ns
        self.expires_at = expires_at
