"""The coordinator's shell: asks it about every expert call, and carries out what it orders.

It is what the stages of the ring (`overlap.py`) know as their experts.
"""

from dataclasses import dataclass
from random import Random
from typing import TextIO, assert_type

from kvasir_core import NANOS_PER_SECOND, Nanos, TimePassed, nanos
from kvasir_core.swarm import Coordinator, SwarmPolicy, encode
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
    AnswerChecked,
    AnswerFailed,
    CoordinatorEvent,
    ExpertsRouted,
    MapFetched,
    MapFetchFailed,
    MapRow,
    SlotsPolled,
    StageMeasured,
)
from kvasir_core.swarm.words import CallId, Failure, PollId, Share, WorkerId
from kvasir_sim.pipeline import Clock
from kvasir_sim.swarm.calls import Call, Carrier, Trip
from kvasir_sim.swarm.honesty import Answer
from kvasir_sim.swarm.hub_shell import HubShell, Slots
from kvasir_sim.swarm.laws import Watch
from kvasir_sim.swarm.local import StageWork
from kvasir_sim.swarm.network import after
from kvasir_sim.swarm.numbers import ExpertNumbers
from kvasir_sim.swarm.overlap import OverlapStage, Visit
from kvasir_sim.swarm.routing import Routing
from kvasir_sim.swarm.worker import Worker

SELF_POLL_NS = nanos(0.001)  # The bridge's answer over the loopback.
FULL_CHECK_EVERY = 1000  # Events between full O(n) checks of the core's invariants.


@dataclass(slots=True)
class ServedTally:
    """What became of routed pairs, since the start; times `layers`, as the ring computed them."""

    pairs: int = 0
    remote_pairs: int = 0  # Accepted from workers.
    error_sum: float = 0.0  # Of accepted pairs, their relative errors.
    wrong_answers: int = 0  # Accepted, beyond tolerance.


class CoordinatorShell:
    """One coordinator, and the calls of all stages."""

    def __init__(
        self,
        env: Clock,
        policy: SwarmPolicy,
        chance: Random,
        numbers: ExpertNumbers,
        routing: Routing,
        work: StageWork,
        carrier: Carrier,
        workers: dict[WorkerId, Worker],
        slots: Slots,
        watch: Watch,
        *,
        call_ns: int,
        log: TextIO | None = None,
    ) -> None:
        self.env = env
        self.coordinator = Coordinator(policy, chance)
        self.hub: HubShell | None = None
        self.stages: list[OverlapStage] = []
        self.served = ServedTally()
        self.is_engaged = False
        self.engaged_ns = 0
        self.decisions = 0
        self.switches: list[tuple[int, str]] = []  # When it engaged, or why it disengaged.
        self.quarantined: dict[WorkerId, list[int]] = {}  # When.
        self.may_remote = False  # Somebody was ever attached.
        self._policy = policy
        self._numbers = numbers
        self._routing = routing
        self._work = work
        self._carrier = carrier
        self._workers = workers
        self._slots = slots
        self._watch = watch
        self._call_ns = call_ns
        self._log = log
        self._calls: dict[CallId, Call] = {}
        self._call_next = 0
        self._routing_call: Call | None = None  # The one being routed now.
        self._touched: list[Visit] = []
        self._engaged_from = 0
        self._events = 0
        self._alarm_at: int | None = None
        self._measured = (0, 0, 0)
        carrier.on_answer = self._answered
        carrier.on_closed = self._closed

    def start(self, hub: HubShell | None) -> None:
        """Begin to poll; without a hub it has no map to fetch."""
        self.hub = hub
        self.tell(TimePassed())
        self._measure()

    # ------------------------------------------------------------------ what stages ask

    def begin(self, visit: Visit) -> tuple[int, bool]:
        """Time of a visit's first piece; with the experts where nobody else can have them."""
        flight, stage = visit.flight, visit.stage.index
        rows = flight.batch.row_count
        hold = flight.holds[stage]
        layers = self._work.layers[stage]
        if not layers:
            return hold, True
        rest = self._work.rest_ns(stage, rows, hold)
        if self.may_remote:
            return rest, False
        local = self._work.all_local_ns(stage, rows)
        pairs = rows * self._numbers.top_k
        visit.stage.local_pairs += pairs
        visit.stage.local_ns += local
        self.served.pairs += layers * pairs
        return rest + local, True

    def route(self, visit: Visit) -> None:
        """The router chose: one layer's call stands for those of the stage."""
        layers = self._numbers.layers_of[visit.stage.index]
        rows = visit.flight.batch.row_count
        layer = layers[visit.flight.batch.id % len(layers)]
        pairs = self._routing.draw(layer, rows)
        id_ = CallId(self._call_next)
        self._call_next += 1
        call = Call(visit, rows, layer, len(layers), routed=rows * self._numbers.top_k)
        self._calls[id_] = self._routing_call = call
        self.served.pairs += call.layers * call.routed
        self.tell(ExpertsRouted(id_, layer, pairs))
        self._routing_call = None

    # ------------------------------------------------------------------ facts and orders

    def tell(self, event: CoordinatorEvent) -> None:
        """Report a fact to the core and carry out what it orders."""
        now = self.env.now
        if self._log is not None:
            self._log.write(encode(event, now) + "\n")
        orders = self.coordinator.handle(event, now)
        for order in orders:
            self._obey(order)
        self.decisions += len(orders)
        if self._touched and self._routing_call is None:
            touched, self._touched = self._touched, []
            for visit in touched:
                visit.stage.resume(visit)
        self._events += 1
        if not self._events % FULL_CHECK_EVERY:
            self.coordinator.check_invariants()
        self._set_alarm()

    def _obey(self, order: CoordinatorDecision) -> None:
        match order:
            case ComputeLocally():
                self._compute(order.call, order.part, order.shares)
            case Dispatch() | Hedge():
                self._send(order)
            case Accept():
                self._accept(self._carrier.trips[order.call, order.part, order.worker])
            case Conclude():
                self._conclude(order.call)
            case Verify():
                self._verify(self._carrier.trips[order.call, order.part, order.worker])
            case PollSlots():
                self._poll(order.poll)
            case FetchMap():
                self._fetch(order.fetch)
            case Report():
                if self.hub is not None:
                    self.hub.report(order.rows)
            case Quarantine():
                self.quarantined.setdefault(order.worker, []).append(self.env.now)
                self._workers[order.worker].wrong_accepted = 0
                self._watch.condemned(order.worker)
            case Engage():
                self._switch("engaged")
            case Disengage():
                self._switch(order.why)
            case _:
                assert_type(order, CoordinatorDecision)

    def _switch(self, why: str) -> None:
        now = self.env.now
        if self.is_engaged:
            self.engaged_ns += now - self._engaged_from
        self.is_engaged = why == "engaged"
        self._engaged_from = now
        self.switches.append((now, why))

    def _compute(self, id_: CallId, part: int, shares: tuple[Share, ...]) -> None:
        call = self._calls[id_]
        pairs = sum([share.pairs for share in shares])
        call.summed += pairs
        visit = call.visit
        stage = visit.stage
        once = self._work.times.layer_ns(stage.index, pairs / self._numbers.top_k, len(shares))
        piece = call.layers * once
        stage.local_pairs += pairs
        stage.local_ns += piece
        then = call.checks.pop(part, None)
        is_routing = call is self._routing_call
        stage.compute(visit, piece, then, is_first=is_routing)
        if not is_routing:
            self._touched.append(visit)

    def _send(self, order: Dispatch | Hedge) -> None:
        call = self._calls[order.call]
        trip = self._carrier.send(order, call, self._workers[order.worker])
        self._watch.dispatched(trip.worker.id, trip.slice, is_trial=trip.is_trial)
        if trip.is_trial:
            after(self.env, self._policy.call_deadline_ns, lambda: self._trial_is_late(trip))
        elif call is self._routing_call and not call.is_remote:
            call.is_remote = True
            call.visit.stage.compute(call.visit, call.layers * self._call_ns, is_first=True)

    def _accept(self, trip: Trip) -> None:
        call, answer = trip.call, trip.answer
        assert answer is not None
        call.summed += trip.pairs
        self._carrier.accept(trip)
        pairs = call.layers * trip.pairs
        self.served.remote_pairs += pairs
        self.served.error_sum += pairs * answer.error
        if answer.error > self._policy.tolerance:
            self.served.wrong_answers += 1
            worker = trip.worker
            worker.wrong_accepted += 1
            worker.wrong_accepted_max = max(worker.wrong_accepted_max, worker.wrong_accepted)
        self._note_served(trip, trip.pairs)

    def _conclude(self, id_: CallId) -> None:
        call = self._calls.pop(id_)
        call.visit.is_concluded = True
        self._watch.settled(id_, call.routed, call.summed)
        if call is not self._routing_call:
            self._touched.append(call.visit)

    def _verify(self, trip: Trip) -> None:
        """Recompute and compare: a part with its local result, a trial aside."""
        trip.is_checked = True

        def check() -> None:
            self._checked(trip)

        if not trip.is_trial:
            trip.call.checks[trip.key[1]] = check
            return
        stage = trip.call.visit.stage
        rows = trip.pairs / self._numbers.top_k
        stage.compute(None, self._work.times.layer_ns(stage.index, rows, len(trip.shares)), check)
        self._touched.append(trip.call.visit)

    def _checked(self, trip: Trip) -> None:
        assert trip.answer is not None
        error = trip.answer.error
        is_right = error <= self._policy.tolerance
        if trip.is_trial:
            self._watch.trial_ended(trip.worker.id, is_failed=not is_right)
        self._watch.checked(trip.worker.id, trip.slice, is_right=is_right)
        if is_right:
            self._note_served(trip, trip.pairs)
        self._carrier.end(trip)
        self.tell(AnswerChecked(*trip.key, trip.session, error))

    @staticmethod
    def _note_served(trip: Trip, pairs: int) -> None:
        found = trip.worker.find(trip.slice.layer, trip.slice.begin, trip.slice.end - 1)
        if found is not None:
            found[1].served += pairs

    # ------------------------------------------------------------------ what comes back

    def _answered(self, trip: Trip, answer: Answer) -> None:
        self.tell(AnswerArrived(*trip.key, trip.session, True, answer.norm_ratio))
        if not trip.is_checked:
            self._carrier.end(trip)

    def _trial_is_late(self, trip: Trip) -> None:
        if trip.answer is None and not trip.is_over:
            trip.is_late = True
            self._watch.trial_ended(trip.worker.id, is_failed=True)

    def _closed(self, trip: Trip) -> None:
        if trip.is_trial and not trip.is_late:
            self._watch.trial_ended(trip.worker.id, is_failed=True)
        self.tell(AnswerFailed(*trip.key, trip.session, Failure.CLOSED))

    # ------------------------------------------------------------------ its own clock

    def _poll(self, poll: PollId) -> None:
        def answer() -> None:
            counts = self._slots()
            if counts is not None:
                self._watch.polled(counts[0])
                self.tell(SlotsPolled(poll, *counts))

        after(self.env, SELF_POLL_NS, answer)

    def _fetch(self, fetch: PollId) -> None:
        if self.hub is None:
            return  # It fetches from nobody, and hears of workers when they attach.

        def take(rows: tuple[MapRow, ...] | None) -> None:
            if rows is None:
                self.tell(MapFetchFailed(fetch))
            else:
                self.may_remote = self.may_remote or bool(rows)
                self.tell(MapFetched(fetch, rows))

        self.hub.fetch_map(take)

    def _measure(self) -> None:
        """Report what the stages did with their time."""
        pairs = sum(stage.local_pairs for stage in self.stages)
        local_ns = sum(stage.local_ns for stage in self.stages)
        blocked_ns = sum(stage.experts_ns for stage in self.stages)
        before = self._measured
        self._measured = pairs, local_ns, blocked_ns
        self.tell(
            StageMeasured(
                pairs - before[0], Nanos(local_ns - before[1]), Nanos(blocked_ns - before[2])
            )
        )
        after(self.env, self._policy.decision_period_ns, self._measure)

    def _set_alarm(self) -> None:
        due = self.coordinator.next_wakeup()
        if self._alarm_at is None or due < self._alarm_at:
            self._alarm_at = due
            after(self.env, max(0, due - self.env.now), lambda: self._woken(due))

    def _woken(self, due: int) -> None:
        if self._alarm_at != due:
            return
        self._alarm_at = None
        if self.coordinator.next_wakeup() <= self.env.now:
            self.tell(TimePassed())
        else:
            self._set_alarm()

    @property
    def engaged_s(self) -> float:
        """How long it was engaged, up to now."""
        now = self.env.now - self._engaged_from if self.is_engaged else 0
        return (self.engaged_ns + now) / NANOS_PER_SECOND
