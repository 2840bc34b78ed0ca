"""The virtual-time shell: SimPy owns time, the core owns every decision.

Micro-batches travel by callbacks (`pipeline.py`); arrivals, faults and users are slow actors. All
events enter the core through `Shell.tell`, which carries out the orders it gets back.
"""

from collections.abc import Callable
from typing import TextIO, assert_type

import simpy

from kvasir_core import (
    BeginEpoch,
    Deliver,
    Finish,
    FinishReason,
    LapEnded,
    Launch,
    MicroBatch,
    Nanos,
    Plan,
    Preempt,
    Refuse,
    Release,
    ReleaseEnded,
    RequestCancelled,
    RequestId,
    Ring,
    RingDecision,
    RingEvent,
    StageTimesMeasured,
    TimePassed,
)
from kvasir_core.eventlog import encode
from kvasir_core.units import make
from kvasir_scenario.recorder import Recorder
from kvasir_sim.conveyor import Conveyor
from kvasir_sim.costs.base import CostModel
from kvasir_sim.costs.profile import ProfileCosts
from kvasir_sim.links import LinkCost
from kvasir_sim.pipeline import NO_RELEASES, Clock, Flight, Pipeline, Recurring, Releases
from kvasir_sim.stage_times import StageTimeSampler

SAMPLED_LAPS = 2048  # Queue and KV are plotted lap by lap in short runs,
SAMPLE_EVERY = 8  # and at every eighth lap after that.
FULL_CHECK_EVERY = 1000  # Events between full O(n) checks of the core's invariants.


class Shell:
    """One ring in virtual time."""

    def __init__(
        self,
        env: Clock,
        plan: Plan,
        costs: CostModel,
        links: list[LinkCost],
        ring: Ring,
        recorder: Recorder,
        *,
        is_faulty: bool = False,
        event_log: TextIO | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.env = env
        self.ring = ring
        self.recorder = recorder
        carry = Pipeline if is_faulty else Conveyor
        self.carrier = carry(env, plan, links, costs.turnaround_ns, self._lap_returned)
        self.on_finish: Callable[[RequestId, FinishReason], None] | None = None
        self.is_exhausted: Callable[[], bool] = lambda: True
        self.last_end = 0  # When the last request so far ended.
        self._costs = costs
        self._log = event_log
        self._progress = progress
        self.ended = 0  # Requests so far.
        self._open: dict[int, Flight] = {}
        self._delivered: tuple[RequestId, ...] = ()
        self._events = 0
        self._alarm_at: int | None = None
        self._surroundings = costs if isinstance(costs, ProfileCosts) else None
        self._sampler: StageTimeSampler | None = None
        if plan.wants_stage_times:
            self._sampler = StageTimeSampler(plan, costs.turnaround_ns)

    def tell(self, event: RingEvent, at: Nanos | None = None) -> None:
        """Report a fact to the core, now or `at`, and carry out what it orders."""
        now = self.env.now if at is None else at
        if self._log is not None:
            self._log.write(encode(event, now) + "\n")
        ring = self.ring
        orders = ring.handle(event, now)
        if orders:
            self._obey(orders, now)
        self._events += 1
        if not self._events % FULL_CHECK_EVERY:
            ring.check()
            if self._progress is not None:
                self._progress(now, self.ended)
        wakeup = ring.next_wakeup()
        if wakeup is not None and wakeup != self._alarm_at:
            self._alarm_at = wakeup
            Recurring(self.env, self._woken).again(wakeup - now)

    def _woken(self, _: simpy.Event) -> None:
        if self.ring.next_wakeup() == self.env.now:
            self._alarm_at = None
            self.tell(TimePassed())

    def _obey(self, orders: list[RingDecision], now: int) -> None:
        releases = NO_RELEASES
        for order in orders:
            if isinstance(order, Launch):
                self._launch(order.micro_batch, now, releases)
                releases = NO_RELEASES
            elif isinstance(order, Deliver):
                self._delivered = order.requests
            elif isinstance(order, Finish):
                self.last_end = now
                self.ended += 1
                self.recorder.finished(order.request, now, order.reason)
                if self.on_finish is not None:
                    self.on_finish(order.request, order.reason)
            elif isinstance(order, Release):
                releases += (order.requests,)
            elif isinstance(order, Refuse):
                self.last_end = now
                self.ended += 1
                self.recorder.refused(order.request, now)
                if self.on_finish is not None:
                    self.on_finish(order.request, FinishReason.REFUSED)
            elif isinstance(order, Preempt):
                self.recorder.preempted(order.request)
            else:
                assert_type(order, BeginEpoch)
                self.cut(now)
                self.pipeline.clear()
        if releases:
            self._release(releases)

    def _launch(self, batch: MicroBatch, now: int, releases: Releases) -> None:
        flight = Flight(batch, now, self._costs.holds(batch), releases)
        self._open[batch.id] = flight
        self.carrier.submit(flight)

    def _release(self, releases: Releases) -> None:
        """Send releases behind the last micro-batch in the ring; alone they cost only latency."""
        if self._open:
            next(reversed(self._open.values())).after += releases
            return
        delay = self.carrier.latency_ns
        epoch = self.ring.epoch

        def passed(_: simpy.Event) -> None:
            for requests in releases:
                self.tell(ReleaseEnded(requests, epoch))

        Recurring(self.env, passed).again(delay)

    def _lap_returned(self, flight: Flight, now: Nanos) -> None:
        batch = flight.batch
        id_, epoch = batch.id, batch.epoch
        del self._open[id_]
        for requests in flight.before:
            self.tell(ReleaseEnded(requests, epoch))
        self._delivered = ()
        if self._sampler is not None:
            self._measure(flight, now)
        if self._surroundings is not None:
            self._surroundings.note(flight.stamps, self.carrier.slower)
        self.tell(make(LapEnded, (id_, epoch, ())), now)
        self.recorder.lap(batch, flight.composed, now, self._delivered, flight.stamps)
        if id_ < SAMPLED_LAPS or not id_ % SAMPLE_EVERY:
            self.recorder.sample(now, *self.ring.load)
        for requests in flight.after:
            self.tell(ReleaseEnded(requests, epoch))

    def _measure(self, flight: Flight, now: int) -> None:
        assert self._sampler is not None
        times: StageTimesMeasured | None = self._sampler.lap(flight.stamps, now)
        if times is not None:
            self.tell(times)

    @property
    def pipeline(self) -> Pipeline:
        """The carrier of a ring with faults."""
        assert isinstance(self.carrier, Pipeline)
        return self.carrier

    def is_over(self) -> bool:
        """Nobody is in the ring and nobody will come."""
        return self.is_exhausted() and self.ring.is_idle

    def cancel(self, request: RequestId, reason: FinishReason) -> None:
        """The client is gone or its deadline passed."""
        self.tell(RequestCancelled(request, reason))

    def cut(self, now: int) -> None:
        """Record what is in the ring as lost: its epoch ended, or the run did."""
        for flight in self._open.values():
            self.recorder.lost(flight.batch, flight.composed, now, flight.stamps)
        self._open.clear()
