"""The core's coordinator, driven: facts in from both threads, orders carried out or passed on.

One lock guards the core, the calls and the flights. What an order needs of the network is handed
to `Network` after the lock is released.
"""

import itertools
import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol, assert_never

from torch import Tensor

from kvasir_core.swarm import Coordinator
from kvasir_core.swarm.decisions import (
    Accept,
    ComputeLocally,
    Conclude,
    CoordinatorDecision,
    Disengage,
    Dispatch,
    Engage,
    FetchMap,
    Hedge,
    PollSlots,
    Quarantine,
    Report,
    Verify,
)
from kvasir_core.swarm.events import (
    AnswerArrived,
    AnswerFailed,
    CoordinatorEvent,
    ExpertsRouted,
    MapFetched,
    MapFetchFailed,
)
from kvasir_core.swarm.refusal import Refused
from kvasir_core.swarm.statistics import CoordinatorStatistics
from kvasir_core.swarm.words import CallId, Failure, WorkerId
from kvasir_core.units import NANOS_PER_SECOND, Nanos
from kvasir_rt import wire
from kvasir_rt.experts.counts import counts_of
from kvasir_rt.experts.hub_link import CallerOptions
from kvasir_rt.experts.pairs import Routing
from kvasir_rt.experts.records import Answer, Flight, Key, RoutedCall, make_flight
from kvasir_rt.logs import log_event
from kvasir_rt.swarm.event_log import EventLog

logger = logging.getLogger("kvasir.experts")

FULL_CHECK_EVENTS = 1000

Errand = Callable[[], None]


class Network(Protocol):
    """Called from any thread, without the lock; each returns at once."""

    def send(self, flight: Flight) -> None: ...

    def check(self, flight: Flight) -> None:
        """Recompute a trial and compare."""
        ...

    def ask(self, order: PollSlots | FetchMap | Report) -> None: ...

    def wake_at(self, when: Nanos) -> None: ...


class CallControl:
    """See the module.

    Args:
        options: Policy, seed, wire format.
        network: Carries out what leaves the process.
        events: The core's event log, open for writing.
        clock: Nanoseconds, monotonic.
    """

    def __init__(
        self,
        options: CallerOptions,
        network: Network,
        events: EventLog | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        chance = random.Random(options.seed)  # noqa: S311 - Which answers are checked; replayable.
        self._core = Coordinator(options.core_policy, chance)
        self._network = network
        self._events = events
        self._clock = clock
        self.changed = threading.Condition()
        self._calls: dict[CallId, RoutedCall] = {}
        self._flights: dict[Key, Flight] = {}
        self._ids = itertools.count()
        self._arriving: Flight | None = None
        self._told = 0
        self._layers: frozenset[int] = frozenset()
        self._failed: Counter[Failure] = Counter()
        self._quarantined: set[WorkerId] = set()
        self._decisions = self._turns = 0
        self._decided = ""
        self._engaged_ns = 0
        self._engaged_from = Nanos(0)

    @property
    def now(self) -> Nanos:
        return Nanos(self._clock())

    def has_workers(self, layer: int) -> bool:
        """Whether the last map named anybody for this layer; if not, there is nothing to decide."""
        return layer in self._layers

    def statistics(self) -> CoordinatorStatistics:
        with self.changed:
            return self._core.statistics()

    def counts(self, *, is_connected: bool, pairs_computed: int) -> wire.ExpertCounts:
        """What the bridge is told."""
        with self.changed:
            statistics = self._core.statistics()
            engaged_ns = self._engaged_ns
            if statistics.is_engaged:
                engaged_ns += self.now - self._engaged_from
            self._turns += 1
            return counts_of(
                statistics,
                self._failed,
                is_connected=is_connected,
                decided=self._decided,
                engaged_ns=Nanos(engaged_ns),
                pairs_computed=pairs_computed,
                quarantined=len(self._quarantined),
                decisions=self._decisions,
                law_checks=self._told // FULL_CHECK_EVENTS,
                turn=self._turns,
            )

    def route(self, layer: int, x: Tensor, routing: Routing) -> RoutedCall:
        """Open a call; what goes out has been handed to the network when this returns."""
        errands: list[Errand] = []
        with self.changed:
            call = RoutedCall(CallId(next(self._ids)), layer, x, routing, self.changed)
            self._calls[call.id] = call
            wakeup = self._handle(ExpertsRouted(call.id, layer, routing.counts), errands)
        self._run(errands, wakeup)
        return call

    def tell(self, event: CoordinatorEvent) -> None:
        """A fact. One that a peer is to blame for and that is refused changes nothing."""
        errands: list[Errand] = []
        try:
            with self.changed:
                wakeup = self._handle(event, errands)
        except Refused as refusal:
            log_event(
                logger, "refused", level=logging.WARNING, kind=type(event).__name__,
                why=str(refusal),
            )  # fmt: skip
            if isinstance(event, MapFetched):
                self.tell(MapFetchFailed(event.fetch))
            return
        self._run(errands, wakeup)

    def arrive(self, flight: Flight) -> None:
        """All of a flight's answer is here, or it has the wrong shape."""
        call, part, worker = flight.key
        ratio = flight.norm_ratio() if flight.is_shaped else None
        errands: list[Errand] = []
        with self.changed:
            if self._flights.pop(flight.key, None) is not flight:
                return  # It failed or was given up meanwhile.
            self._arriving = flight
            try:
                wakeup = self._handle(
                    AnswerArrived(call, part, worker, flight.session, flight.is_shaped, ratio),
                    errands,
                )
            finally:
                self._arriving = None
        self._run(errands, wakeup)

    def fail(self, flight: Flight, why: Failure) -> None:
        """A flight will not be answered."""
        call, part, worker = flight.key
        with self.changed:
            if self._flights.pop(flight.key, None) is not flight:
                return
            self._failed[why] += 1
        self.tell(AnswerFailed(call, part, worker, flight.session, why))

    def give_up(self) -> list[Flight]:
        """Flights past their deadline: the core has settled them; nobody waits any more."""
        with self.changed:
            now = self.now
            late = [flight for flight in self._flights.values() if flight.deadline < now]
            for flight in late:
                del self._flights[flight.key]
        return late

    def flights(self) -> list[Flight]:
        with self.changed:
            return list(self._flights.values())

    def flush(self) -> None:
        """Bring the event log to disk."""
        if self._events is not None:
            with self.changed:
                self._events.flush()

    def _handle(self, event: CoordinatorEvent, errands: list[Errand]) -> Nanos:
        """Under the lock: tell the core and note its orders. Returns its next wakeup."""
        now = self.now
        decisions = self._core.handle(event, now)
        if self._events is not None:
            self._events.write(event, now, decisions)
        self._told += 1
        self._decisions += len(decisions)
        if self._told % FULL_CHECK_EVENTS == 0:
            self._core.check_invariants()
        if isinstance(event, MapFetched):
            self._layers = frozenset(row.layer for row in event.rows)
        for decision in decisions:
            self._note(decision, errands)
        if decisions:
            self.changed.notify_all()
        return self._core.next_wakeup()

    def _run(self, errands: list[Errand], wakeup: Nanos) -> None:
        for errand in errands:
            errand()
        self._network.wake_at(wakeup)

    def _note(self, order: CoordinatorDecision, errands: list[Errand]) -> None:
        match order:
            case Dispatch():
                errands.append(self._fly(order, is_trial=order.is_trial))
            case Hedge():
                errands.append(self._fly(order, is_trial=False))
            case ComputeLocally(call, part, shares):
                routed = self._calls[call]
                routed.local.append((part, shares))
                errands += routed.on_news
            case Accept(call, part, _):
                self._calls[call].accepted[part] = self._answer()
            case Verify(call, part, _, _):
                assert self._arriving is not None
                if self._arriving.is_trial:
                    errands.append(partial(self._network.check, self._arriving))
                else:
                    self._calls[call].suspects.setdefault(part, []).append(self._answer())
            case Conclude(call):
                done = self._calls.pop(call)
                done.is_concluded = True
                errands += done.on_news
            case PollSlots() | FetchMap() | Report():
                errands.append(partial(self._network.ask, order))
            case Engage():
                self._decided, self._engaged_from = "engaged", self.now
                log_event(logger, "engaged")
            case Disengage(why):
                self._decided = why
                self._engaged_ns += self.now - self._engaged_from
                log_event(logger, "disengaged", why=why)
            case Quarantine(worker, duration):
                self._quarantined.add(worker)
                seconds = duration / NANOS_PER_SECOND
                log_event(logger, "quarantined: wrong numbers", level=logging.WARNING,
                          worker=worker, seconds=seconds)  # fmt: skip
            case _:
                assert_never(order)

    def _fly(self, order: Dispatch | Hedge, *, is_trial: bool) -> Errand:
        call = self._calls[order.call]
        key = order.call, order.part, order.worker
        flight = make_flight(
            call, key, order.session, order.shares, order.deadline, is_trial=is_trial
        )
        self._flights[key] = flight
        return partial(self._network.send, flight)

    def _answer(self) -> Answer:
        flight = self._arriving
        assert flight is not None
        assert flight.values is not None
        return Answer(flight.key[2], flight.session, flight.rows, flight.values)
