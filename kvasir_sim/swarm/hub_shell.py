"""The hub's shell: carries the core's orders over a network that loses, doubles and delays.

It can crash (and restart with what it keeps on disk), stop and go on, and have its clock set.
"""

from collections.abc import Callable
from random import Random
from typing import TextIO, assert_type

from kvasir_core import IllegalEvent, Nanos, TimePassed
from kvasir_core.swarm import Hub, Refused, SwarmPolicy, encode
from kvasir_core.swarm.decisions import (
    Acknowledge,
    AdmitRelay,
    Assign,
    Decline,
    HubDecision,
    LapseClaim,
    LoseWorker,
    PollCoordinator,
    RefuseRelay,
    SetTarget,
)
from kvasir_core.swarm.events import (
    CoordinatorAttached,
    CoverageReported,
    HubEvent,
    MapRow,
    ModelRegistered,
    RelayClosed,
    ServedRow,
    ServingReported,
    SlotsPolled,
)
from kvasir_core.swarm.words import CoordinatorId, PollId, Session, WorkerId
from kvasir_sim.pipeline import Clock
from kvasir_sim.swarm.laws import Watch
from kvasir_sim.swarm.network import Line, after
from kvasir_sim.swarm.numbers import ExpertNumbers

COORDINATOR = CoordinatorId("coordinator")
FULL_CHECK_EVERY = 1000  # Events between full O(n) checks of the core's invariants.
Slots = Callable[[], tuple[int, int] | None]
"""Busy and all slots of the coordinator's ring now; None: the poll hangs."""


class HubShell:
    """One hub."""

    def __init__(
        self,
        env: Clock,
        policy: SwarmPolicy,
        chance: Random,
        numbers: ExpertNumbers,
        line: Line,
        slots: Slots,
        watch: Watch,
        log: TextIO | None,
    ) -> None:
        self._env = env
        self._policy = policy
        self._chance = chance
        self._line = line
        self._slots = slots
        self._watch = watch
        self._log = log
        self._model = numbers.name
        self.hub = Hub(policy, chance)
        self.is_up = True
        self.is_paused = False
        self.has_relay = True
        self.clock_offset = 0  # Of its clock, by a fault.
        self.refused = 0  # Input that it refused.
        self.decisions = 0
        self.target = 0
        self.is_recruiting = False
        self.target_changes: list[tuple[int, int]] = []  # When, to what.
        self._closed_meanwhile: list[tuple[WorkerId, Session]] = []
        self.losses: list[tuple[int, WorkerId]] = []  # When it gave whom up.
        self._before: dict[str, int] = {}  # Counts of hubs that crashed.
        self._events = 0
        self._alarm_at: int | None = None
        self.tell(ModelRegistered(numbers.name, numbers.layers, numbers.experts, 1))
        self.tell(CoordinatorAttached(COORDINATOR, numbers.name))

    @property
    def heartbeat_ns(self) -> int:
        """What it tells workers."""
        return self._policy.heartbeat_ns

    @property
    def is_reachable(self) -> bool:
        return self.is_up and not self.is_paused

    def count(self, name: str) -> int:
        """One of the hub's counts, over all its lives."""
        value: int = getattr(self.hub.statistics(), name)
        return value + self._before.get(name, 0)

    def serve(self, event: HubEvent) -> HubDecision | None:
        """A peer's request; the answer, or None if there is none."""
        if not self.is_reachable:
            return None
        try:
            return self.tell(event)
        except Refused:
            self.refused += 1
            return None

    def tell_peer(self, event: HubEvent) -> None:
        """A peer's message that wants no answer."""
        self.serve(event)

    def tell(self, event: HubEvent) -> HubDecision | None:
        """Report a fact to the core, carry out what it orders, and return its answer."""
        now = Nanos(self._env.now + self.clock_offset)
        orders = self.hub.handle(event, now)
        if self._log is not None:
            self._log.write(encode(event, now) + "\n")
        if isinstance(event, CoverageReported):
            self._watch.heard(event.worker)
        answer = None
        for order in orders:
            answer = self._obey(order) or answer
        self.decisions += len(orders)
        self._events += 1
        if not self._events % FULL_CHECK_EVERY:
            self.hub.check_invariants()
        self._set_alarm()
        return answer

    def report(self, rows: tuple[ServedRow, ...]) -> None:
        """What the coordinator tells the hub, over the line."""
        event = ServingReported(COORDINATOR, rows)
        self._line.carry(lambda: self.tell_peer(event))

    def fetch_map(self, take: Callable[[tuple[MapRow, ...] | None], None]) -> None:
        """Ask for the dispatch map; `take` gets None if nobody listens."""
        if not self.is_up:  # Refused at once; one that is stopped lets the question hang.
            after(self._env, 1, lambda: take(None))
            return
        self._line.ask(self._map, take)

    def _map(self) -> tuple[MapRow, ...] | None:
        if not self.is_reachable:
            return None
        self.serve(CoordinatorAttached(COORDINATOR, self._model))  # A hub that restarted forgot it.
        return self.hub.dispatch_map(self._model)

    def crash(self) -> None:
        """It is gone; its disk keeps what a restart needs."""
        self.is_up = False
        self._closed_meanwhile.clear()
        self._kept = self.hub.snapshot()
        statistics = self.hub.statistics()
        for name in COUNTS:
            self._before[name] = self._before.get(name, 0) + getattr(statistics, name)

    def restart(self) -> None:
        """A new process with what was kept."""
        self.hub = Hub(self._policy, self._chance)
        self.is_up = True
        self._alarm_at = None
        self.tell(self._kept)

    def set_clock(self, by_ns: int) -> None:
        """Its clock steps, also the one it lives by: worse than a wall clock's step."""
        self.clock_offset += by_ns
        self._alarm_at = None
        if self.is_reachable:
            self.tell(TimePassed())

    def close_relay(self, worker: WorkerId, session: Session) -> None:
        """A connection ended. No message can be lost here: the relay's own socket says so."""
        if self.is_paused:
            self._closed_meanwhile.append((worker, session))
        elif self.is_up:
            self.tell(RelayClosed(worker, session))

    def pause(self) -> None:
        """Stopped: what is sent to it meanwhile is not answered."""
        self.is_paused = True

    def go_on(self) -> None:
        """It continues where it was."""
        self.is_paused = False
        if not self.is_up:
            return
        self._alarm_at = None
        self.tell(TimePassed())
        for worker, session in self._closed_meanwhile:
            self.tell(RelayClosed(worker, session))
        self._closed_meanwhile.clear()

    def _obey(self, order: HubDecision) -> HubDecision | None:
        match order:
            case PollCoordinator():
                self._poll(order.poll)
            case SetTarget():
                self.target = order.target
                self.is_recruiting = order.is_recruiting
                self.target_changes.append((self._env.now, order.target))
            case LoseWorker():
                self.losses.append((self._env.now, order.worker))
                self._watch.lost(order.worker, self._policy.coverage_ttl_ns)
            case LapseClaim():
                pass
            case Assign():
                self._watch.assigned(order)
                return order
            case Decline() | Acknowledge() | AdmitRelay() | RefuseRelay():
                return order
            case _:
                assert_type(order, HubDecision)
        return None

    def _poll(self, poll: PollId) -> None:
        hub = self.hub

        def answered(counts: tuple[int, int]) -> None:
            if self.hub is hub and self.is_reachable:
                self._read(poll, counts)

        self._line.ask(self._slots, answered)

    def _read(self, poll: PollId, counts: tuple[int, int]) -> None:
        try:
            self.tell(SlotsPolled(poll, *counts))
        except IllegalEvent:
            self.refused += 1

    def _set_alarm(self) -> None:
        due = self.hub.next_wakeup() - self.clock_offset
        if self._alarm_at is None or due < self._alarm_at:
            self._alarm_at = due
            hub = self.hub
            after(self._env, max(0, due - self._env.now), lambda: self._woken(hub, due))

    def _woken(self, hub: Hub, due: int) -> None:
        if self.hub is not hub or self._alarm_at != due or not self.is_reachable:
            return
        self._alarm_at = None
        if self.hub.next_wakeup() - self.clock_offset <= self._env.now:
            self.tell(TimePassed())
        else:
            self._set_alarm()


COUNTS = (
    "claims_granted", "claims_confirmed", "claims_lapsed", "recruits_above_target",
    "target_changes", "releases", "workers_lost", "polls_missed", "clock_jumps",
)  # fmt: skip
