"""What a stage remembers of expert calls: the call itself, and each part on its way to a worker."""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvasir_core.swarm.words import CallId, Session, Share, WorkerId
from kvasir_core.units import Nanos
from kvasir_rt.experts.pairs import Pairs, Routing

Key = tuple[CallId, int, WorkerId]


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's sums for some rows of a call."""

    worker: WorkerId
    session: Session
    rows: Tensor  # int64: of the call's rows.
    values: Tensor  # float32[len(rows), hidden].


class RoutedCall:
    """One layer's experts of one micro-batch. Fields change under the caller's lock only.

    Args:
        call: Its number.
        layer: In the model.
        x: `[rows, hidden]`, kept until the call is over.
        routing: Who is asked what.
        changed: Notified when there is local work, or the call is concluded.
    """

    def __init__(
        self, call: CallId, layer: int, x: Tensor, routing: Routing, changed: threading.Condition
    ) -> None:
        self.id = call
        self.layer = layer
        self.x = x
        self.routing = routing
        self.changed = changed
        self.local: deque[tuple[int, tuple[Share, ...]]] = deque()  # Parts to compute here.
        self.accepted: dict[int, Answer] = {}
        self.suspects: dict[int, list[Answer]] = {}  # To compare with the local result.
        self.is_concluded = False
        self.on_news: list[Callable[[], None]] = []  # Called at local work, and when it is over.


@dataclass(slots=True, eq=False)
class Flight:
    """A part, or a copy of some pairs, on its way to one worker and back."""

    key: Key
    session: Session
    layer: int
    rows: Tensor  # int64: rows of the call that are sent, each once.
    pairs: Pairs  # Their rows count within `rows`.
    x: Tensor  # [len(rows), hidden]; a copy, so a trial can be checked after its call is over.
    is_trial: bool
    deadline: Nanos
    requests: dict[int, tuple[int, int]] = field(default_factory=dict)  # Number -> [start, stop).
    values: Tensor | None = None  # Grows as answers to its requests come.
    is_shaped: bool = True

    def norm_ratio(self) -> float:
        """Largest output row norm over largest input row norm; not finite if any number is not."""
        assert self.values is not None
        largest = float(torch.linalg.vector_norm(self.values, dim=1).max())
        given = float(torch.linalg.vector_norm(self.x.float(), dim=1).max())
        if given == 0.0:
            return 0.0 if largest == 0.0 else float("inf")
        return largest / given


def make_flight(
    call: RoutedCall, key: Key, session: Session, shares: tuple[Share, ...], deadline: Nanos,
    *, is_trial: bool,
) -> Flight:  # fmt: skip
    """Gather what is sent: each row once, pairs renumbered."""
    pairs = call.routing.pairs(shares)
    rows, numbers = torch.unique(pairs.rows, return_inverse=True)
    sent = Pairs(numbers, pairs.experts, pairs.weights)
    return Flight(key, session, call.layer, rows, sent, call.x[rows], is_trial, deadline)


def relative_error(values: Tensor, reference: Tensor) -> float:
    """Relative L2 error of the worst row; not finite if any number is not.

    Args:
        values: `float32[rows, hidden]`, a worker's.
        reference: The same, computed here.
    """
    off = torch.linalg.vector_norm(values - reference, dim=1)
    size = torch.linalg.vector_norm(reference, dim=1)
    smallest = torch.finfo(torch.float32).tiny  # A row of zeros must be answered with zeros.
    return float((off / size.clamp_min(smallest)).max())
