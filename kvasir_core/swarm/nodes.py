"""Workers with coverage, as the hub knows them: by heartbeats and what coordinators report.

A slice counts as a replica while its worker is alive, not draining, not told to release it, and no
coordinator reports it as suspect or quarantined: registration is not ability. Ages are the hub's
own awake time; a worker's clock is never compared with it.
"""

from kvasir_core.swarm.market import Market
from kvasir_core.swarm.words import CoordinatorId, Session, Slice, WorkerId
from kvasir_core.units import Nanos


class Covered:
    """One slice of a node's coverage."""

    __slots__ = ("doubted_by", "is_counted", "is_released", "last_serve_ms", "slice")

    def __init__(self, slice_: Slice, last_serve_ms: int) -> None:
        self.slice = slice_
        self.doubted_by: dict[CoordinatorId, None] = {}
        self.is_counted = False
        self.is_released = False
        self.last_serve_ms = last_serve_ms


class Node:
    """A worker and its coverage of one model."""

    __slots__ = (
        "covered", "heard_at", "id", "is_burned", "is_connected", "is_draining", "market",
        "segments", "session", "used_at",
    )  # fmt: skip

    def __init__(self, worker: WorkerId, market: Market, session: Session, at: Nanos) -> None:
        self.id = worker
        self.market = market
        self.session = session
        self.is_connected = False
        self.is_burned = (
            False  # This generation's connection has ended: the next dial needs another.
        )
        self.is_draining = False
        self.heard_at = self.used_at = at  # Used: last dispatch to it that was reported.
        self.segments: tuple[Slice, ...] = ()  # As last reported.
        self.covered: dict[Slice, Covered] = {}

    def cover(self, segments: tuple[Slice, ...], past: dict[Slice, int]) -> None:
        """Take up a heartbeat's list; `past` gives what a slice is known for from before."""
        self.segments = segments
        now = dict.fromkeys(segments)
        for slice_ in [s for s in self.covered if s not in now]:
            self._count(self.covered.pop(slice_), wanted=False)
        for slice_ in segments:
            if slice_ not in self.covered:
                self.covered[slice_] = Covered(slice_, past.get(slice_, 0))
        self.recount()

    def recount(self) -> None:
        """Let the market count what counts now."""
        for entry in self.covered.values():
            is_counted = not (self.is_draining or entry.is_released or entry.doubted_by)
            self._count(entry, wanted=is_counted)

    def leave(self) -> None:
        for entry in self.covered.values():
            self._count(entry, wanted=False)
        self.covered = {}
        self.segments = ()

    def own_ranges(self) -> dict[int, list[tuple[int, int]]]:
        """Its coverage by layer, ascending."""
        own: dict[int, list[tuple[int, int]]] = {}
        for layer, begin, end in sorted(self.covered):
            own.setdefault(layer, []).append((begin, end))
        return own

    def _count(self, entry: Covered, *, wanted: bool) -> None:
        if wanted != entry.is_counted:
            entry.is_counted = wanted
            self.market.add_replica(entry.slice, 1 if wanted else -1)
