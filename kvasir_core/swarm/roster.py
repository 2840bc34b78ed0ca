"""Who is attached, under which generation, with which slices; and everyone's record.

A generation rises with every dial. What carries an older one (a late map, a doubled goodbye, an
answer from before) is about a connection that is over, and is dropped.
"""

from collections.abc import Mapping, Sequence

from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.refusal import Refused
from kvasir_core.swarm.standing import NEVER, Worker
from kvasir_core.swarm.words import Session, Slice, WorkerId
from kvasir_core.units import Nanos


class Roster:
    """Records by identity, and attached slices by layer."""

    __slots__ = ("_layers", "_policy", "workers")

    def __init__(self, policy: SwarmPolicy) -> None:
        self._policy = policy
        self.workers: dict[WorkerId, Worker] = {}
        self._layers: dict[int, list[tuple[Slice, Worker]]] = {}

    def holders(self, layer: int) -> Sequence[tuple[Slice, Worker]]:
        """Attached slices of a layer, by range and then identity."""
        return self._layers.get(layer, ())

    def check_room(self, workers: Sequence[WorkerId], at: Nanos) -> None:
        """Raises Refused if some are new and not enough others can be forgotten for them."""
        names = dict.fromkeys(workers)
        new = sum(name not in self.workers for name in names)
        if new > self._policy.workers_max - len(self.workers) + len(self._blameless(names, at)):
            raise Refused(
                "full",
                f"{len(self.workers)} workers are known, of at most {self._policy.workers_max}; "
                f"no room for {new} more",
            )

    def make_room(self, workers: Sequence[WorkerId], at: Nanos) -> None:
        """Forget the oldest who left without blame, as far as these need it (checked before)."""
        names = dict.fromkeys(workers)
        new = sum(name not in self.workers for name in names)
        excess = len(self.workers) + new - self._policy.workers_max
        if excess > 0:
            for name in self._blameless(names, at)[:excess]:
                del self.workers[name]

    def attach(self, worker: WorkerId, session: Session, slices: Sequence[Slice]) -> bool:
        """Take up a connection; False if this generation is over or nothing changed."""
        record = self.workers.get(worker)
        if record is None:
            record = self.workers[worker] = Worker(worker, self._policy)
        ordered = tuple(sorted(slices))
        if session <= record.session_closed or session < record.session:
            return False
        if record.is_attached and (record.session, record.slices) == (session, ordered):
            return False
        self._unlist(record)
        record.is_attached = True
        record.session = session
        record.slices = ordered
        for slice_ in ordered:
            holders = self._layers.setdefault(slice_.layer, [])
            holders.append((slice_, record))
            holders.sort(key=lambda entry: (entry[0], entry[1].id))
        return True

    def detach(self, worker: WorkerId, session: Session) -> Worker | None:
        """End a connection; None if that generation is over already, or nobody was attached."""
        record = self.workers.get(worker)
        if record is None or session < record.session:
            return None
        was_attached = record.is_attached
        self._unlist(record)
        record.is_attached = False
        record.session = record.session_closed = session
        return record if was_attached else None

    def drop(self, worker: WorkerId, session: Session) -> Worker | None:
        """Take no account of a connection any more that may still be there.

        Unlike `detach`: if the same generation is named again, it is attached again.
        """
        record = self.workers.get(worker)
        if record is None or not record.is_attached or record.session != session:
            return None
        self._unlist(record)
        record.is_attached = False
        return record

    def check_layers(self) -> None:
        """Every attached slice is listed exactly once (the O(n) invariant)."""
        listed = sorted((s, w.id) for holders in self._layers.values() for s, w in holders)
        attached = sorted((s, w.id) for w in self.workers.values() for s in w.slices)
        assert listed == attached
        assert all(w.is_attached or not w.slices for w in self.workers.values())
        assert all(NEVER <= w.session_closed <= w.session for w in self.workers.values())

    def _unlist(self, record: Worker) -> None:
        for slice_ in record.slices:
            self._layers[slice_.layer].remove((slice_, record))
        record.slices = ()

    def _blameless(self, names: Mapping[WorkerId, None], at: Nanos) -> list[WorkerId]:
        return [n for n, w in self.workers.items() if n not in names and w.is_blameless(at)]
