"""Expert calls in virtual time: parts travel to workers, and what stays is computed by the stage.

One call stands for all layers of a stage (`docs/decisions/0005`): the coordinator decides about one
layer, another one each time, and what it decides holds for the micro-batch's other layers there.
So a part's bytes, work and latency count `layers` times; the coordinator is told the answer after
the time of *one* layer, and the micro-batch has it after the time of all. A trial is one call.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from kvasir_core import nanos
from kvasir_core.swarm.decisions import Dispatch, Hedge
from kvasir_core.swarm.words import CallId, Session, Share, Slice, WorkerId
from kvasir_sim.pipeline import Clock
from kvasir_sim.swarm.cores import Cores
from kvasir_sim.swarm.honesty import Answer
from kvasir_sim.swarm.network import Weather, Wire, after
from kvasir_sim.swarm.overlap import Visit
from kvasir_sim.swarm.routing import Routing
from kvasir_sim.swarm.worker import Worker

Key = tuple[CallId, int, WorkerId]


@dataclass(slots=True)
class Call:
    """A micro-batch's routed experts in one stage."""

    visit: Visit
    rows: int
    layer: int
    layers: int
    routed: int  # Pairs,
    summed: int = 0  # and those that entered the sum so far.
    is_remote: bool = False  # A part of it left.
    checks: dict[int, Callable[[], None]] = field(default_factory=dict)
    # By part: what to report once its local result is there to compare with.


@dataclass(slots=True)
class Trip:
    """A part, or a trial, on its way to one worker and back."""

    number: int
    call: Call
    key: Key
    worker: Worker
    session: Session
    slice: Slice
    shares: tuple[Share, ...]
    pairs: int
    is_trial: bool
    end_at: int | None = None  # When the micro-batch has the results of all layers; if known.
    stalled_ns: int = 0  # It is later than that by so much.
    is_awaited: bool = False  # Accepted, and the end not known.
    answer: Answer | None = None
    is_checked: bool = False  # The coordinator has it recomputed.
    is_late: bool = False  # A trial whose time is over.
    is_over: bool = False


class Uplink:
    """A stage's own connection to all workers."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self.out = Wire(bytes_per_s)
        self.back = Wire(bytes_per_s)


class Carrier:
    """Takes parts to workers and brings answers back."""

    def __init__(
        self,
        env: Clock,
        routing: Routing,
        row_bytes: int,
        uplinks: list[Uplink],
        weather: Weather,
        deadline_ns: int,
        cores: Cores | None,
    ) -> None:
        """`cores`: those that stages and workers share; None: each worker has its own."""
        self._env = env
        self._routing = routing
        self._row_bytes = row_bytes
        self._uplinks = uplinks
        self._weather = weather
        self._deadline_ns = deadline_ns
        self._cores = cores
        self._number = 0
        self.trips: dict[Key, Trip] = {}
        self.on_answer: Callable[[Trip, Answer], None]
        self.on_closed: Callable[[Trip], None]

    def send(self, order: Dispatch | Hedge, call: Call, worker: Worker) -> Trip:
        """Carry a part to its worker; the answer, or that there is none, is told later."""
        self._number += 1
        first, last = order.shares[0].expert, order.shares[-1].expert
        found = worker.find(order.layer, first, last)
        slice_ = found[0] if found else Slice(order.layer, first, last + 1)
        pairs = sum([share.pairs for share in order.shares])
        is_trial = isinstance(order, Dispatch) and order.is_trial
        trip = Trip(
            self._number, call, (order.call, order.part, order.worker), worker, order.session,
            slice_, order.shares, pairs, is_trial,
        )  # fmt: skip
        self.trips[trip.key] = trip
        if not (worker.is_connected and found and worker.session == order.session):
            after(self._env, 2 * self._latency(worker), lambda: self._close(trip))
            return trip
        layers = 1 if is_trial else call.layers
        rows = self._routing.rows_of(pairs, call.rows)
        size = layers * rows * self._row_bytes
        now, uplink = self._env.now, self._uplinks[call.visit.stage.index]
        work = nanos(worker.layers_s(len(order.shares), rows, layers))
        travel = worker.travel_ns(layers, size)
        travel += uplink.out.send(size, now) + uplink.back.send(size, now)
        worker.trips[trip.number] = trip
        if self._cores is None:
            all_ns = worker.queue_ns(work) + travel
            trip.end_at = now + all_ns
            self._answer(trip, rows, all_ns // layers)
            return trip
        once = work // layers
        worker.queue_on(self._cores, once, lambda: self._answer(trip, rows, travel // layers))
        worker.queue_on(self._cores, work - once, lambda: self._computed(trip, travel))
        return trip

    def _answer(self, trip: Trip, rows: int, delay_ns: int) -> None:
        copies = self._weather.copies(trip.worker.kind.lost_share)
        for _ in range(copies):
            delay = delay_ns + self._weather.delay()
            after(self._env, delay, lambda: self._arrive(trip, rows))
        if not copies:
            after(self._env, self._deadline_ns + 1, lambda: self.end(trip))

    def _computed(self, trip: Trip, travel_ns: int) -> None:
        """All layers, on shared cores; their answers travelled in between."""
        trip.end_at = self._env.now + travel_ns
        if trip.is_awaited:
            visit = trip.call.visit
            visit.awaited -= 1
            self.accept(trip)
            visit.stage.resume(visit)

    @staticmethod
    def accept(trip: Trip) -> None:
        """Its micro-batch waits for it: until it is there, if that is known."""
        visit = trip.call.visit
        if trip.end_at is None:
            trip.is_awaited = True
            visit.awaited += 1
        else:
            visit.ready_at = max(visit.ready_at, trip.end_at + trip.stalled_ns)

    def close_all(self, worker: Worker) -> None:
        """Its connection is over: none of what it was asked is answered."""
        for trip in list(worker.trips.values()):
            after(self._env, self._latency(worker), partial(self._close, trip))
        worker.trips.clear()

    def end(self, trip: Trip) -> None:
        """Nothing more will be said about it."""
        if not trip.is_over:
            trip.is_over = True
            trip.worker.trips.pop(trip.number, None)
            if self.trips.get(trip.key) is trip:
                del self.trips[trip.key]

    def _arrive(self, trip: Trip, rows: int) -> None:
        worker, now = trip.worker, self._env.now
        if worker.trips.get(trip.number) is not trip and trip.answer is None:
            return  # Its connection ended meanwhile.
        if worker.stalled_until > now:
            trip.stalled_ns += worker.stalled_until - now
            after(self._env, worker.stalled_until - now, lambda: self._arrive(trip, rows))
            return
        if trip.answer is None:
            trip.answer = worker.conscience.answer(rows)
            worker.trips.pop(trip.number, None)
        self.on_answer(trip, trip.answer)

    def _close(self, trip: Trip) -> None:
        if not trip.is_over:
            self.on_closed(trip)
            self.end(trip)

    @staticmethod
    def _latency(worker: Worker) -> int:
        return round(worker.kind.link.latency_s * 1e9)
