"""The coordinators the hub polls: each with its own question, limit and gauge.

One that hangs costs its own readings and nobody else's.
"""

from collections.abc import Iterator

from kvasir_core.swarm.decisions import PollCoordinator
from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.polling import Poller, PollIds
from kvasir_core.swarm.saturation import Gauge
from kvasir_core.swarm.words import CoordinatorId, ModelName, PollId, Reading
from kvasir_core.units import Nanos


class Polled:
    """One coordinator."""

    __slots__ = ("gauge", "id", "model", "poller", "slots_of")

    def __init__(
        self, coordinator: CoordinatorId, model: ModelName, gauge: Gauge, poller: Poller,
        slots_of: str,
    ) -> None:  # fmt: skip
        self.id = coordinator
        self.model = model
        self.gauge = gauge
        self.poller = poller
        self.slots_of = slots_of or coordinator


class Load:
    """All of them."""

    __slots__ = ("_asked", "_policy", "ids", "missed_before", "polled")

    def __init__(self, policy: SwarmPolicy) -> None:
        self._policy = policy
        self.ids = PollIds()
        self._asked: dict[PollId, Polled] = {}  # The open question of each.
        self.polled: dict[CoordinatorId, Polled] = {}
        self.missed_before = 0  # By coordinators that are gone.

    def attach(
        self, coordinator: CoordinatorId, model: ModelName, at: Nanos, *, is_resumed: bool,
        slots_of: str = "",
    ) -> None:  # fmt: skip
        gauge = Gauge.of_hub(self._policy)
        if is_resumed:
            gauge.resume(at)
        poller = Poller(self.ids, self._policy.poll_period_ns, self._policy.poll_max_ns, at)
        self.polled[coordinator] = Polled(coordinator, model, gauge, poller, slots_of)

    def detach(self, coordinator: CoordinatorId) -> None:
        gone = self.polled.pop(coordinator)
        self.missed_before += gone.poller.missed
        if gone.poller.open is not None:
            self._asked.pop(gone.poller.open, None)

    def ask(self, at: Nanos) -> Iterator[PollCoordinator]:
        """Questions that are due."""
        for polled in self.polled.values():
            if polled.poller.due_at <= at:
                if polled.poller.open is not None:
                    del self._asked[polled.poller.open]
                poll = polled.poller.ask(at)
                self._asked[poll] = polled
                yield PollCoordinator(poll, polled.id)

    def answer(self, poll: PollId, counts: tuple[int, int] | None, at: Nanos) -> None:
        """An answer `(busy, slots)`, or None for a failure; a late one counts as that."""
        polled = self._asked.pop(poll, None)
        if polled is None:
            return
        if polled.poller.take(poll, at, is_good=counts is not None) is not None and counts:
            polled.gauge.read(*counts, at)

    def of_model(self, model: ModelName) -> list[Polled]:
        return [polled for polled in self.polled.values() if polled.model == model]

    def readings(self, model: ModelName, at: Nanos) -> list[Gauge]:
        """Valid readings, one of each bridge: the latest."""
        latest: dict[str, Gauge] = {}
        for polled in self.of_model(model):
            gauge = polled.gauge
            if gauge.reading(at) is Reading.OK and gauge.read_at is not None:
                known = latest.get(polled.slots_of)
                if known is None or known.read_at is None or known.read_at < gauge.read_at:
                    latest[polled.slots_of] = gauge
        return list(latest.values())

    def is_saturated(self, model: ModelName, at: Nanos) -> bool:
        """With the dwell: any coordinator's state; a frozen one keeps its last."""
        looks = [polled.gauge.look(at) for polled in self.of_model(model)]
        return any(looks)

    def reason(self, model: ModelName, at: Nanos) -> str:
        """Why the model's state is what it is, in a few words."""
        polled = self.of_model(model)
        readings = [p.gauge.reading(at) for p in polled]
        if not polled:
            return "no coordinator"
        if Reading.OK in readings:
            return "saturated" if any(p.gauge.is_saturated for p in polled) else "not saturated"
        return "frozen: no valid reading" if Reading.STALE in readings else "no reading yet"

    @property
    def missed(self) -> int:
        return self.missed_before + sum(p.poller.missed for p in self.polled.values())

    @property
    def due_at(self) -> Nanos | None:
        return min((polled.poller.due_at for polled in self.polled.values()), default=None)
