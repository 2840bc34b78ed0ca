"""The ring's shell with a swarm: stages that overlap, so micro-batches may return out of order.

A release travels behind every micro-batch that was in the ring when it was sent, as before; since
those may now return in any order, it is over when the last of them is back.
"""

from collections import deque
from collections.abc import Callable
from typing import Protocol, TextIO

from kvasir_core import (
    Finish,
    MicroBatch,
    Nanos,
    Plan,
    ReleaseEnded,
    RequestId,
    Ring,
    RingDecision,
    RingEvent,
    StageTimesMeasured,
)
from kvasir_core.window import overlapped
from kvasir_scenario.recorder import Recorder
from kvasir_sim.costs.base import CostModel
from kvasir_sim.links import LinkCost
from kvasir_sim.pipeline import NO_RELEASES, Clock, Flight, Releases
from kvasir_sim.shell import Shell
from kvasir_sim.stage_times import STAMPS, StageTimeSampler
from kvasir_sim.swarm.cores import Cores
from kvasir_sim.swarm.overlap import Experts, OverlapPipeline


class Tokens(Protocol):
    """Who counts tokens."""

    def given(self, requests: tuple[RequestId, ...], now: int) -> None:
        """Each of these got a token."""

    def ended(self, request: RequestId) -> None:
        """It gets no more."""


class OverlapSampler(StageTimeSampler):
    """As if each stage had held its micro-batches one by one (`kvasir_core.window.overlapped`)."""

    def __init__(self, plan: Plan, turnaround_ns: int, overlap: int) -> None:
        super().__init__(plan, turnaround_ns)
        self._overlap = overlap

    def sample(self, flight: Flight, returned_ns: int) -> StageTimesMeasured | None:
        """Take a returned lap in."""
        stamps = list(flight.stamps)
        for stage, (computed, parked) in enumerate(
            zip(flight.computed, flight.parked, strict=True)
        ):
            start, sent = stamps[STAMPS * stage + 1], stamps[STAMPS * stage + 3]
            hold, on_the_way = overlapped(computed, parked, self._overlap)
            stamps[STAMPS * stage + 2] = start + hold
            stamps[STAMPS * stage + 3] = sent - on_the_way
        self._every = 1  # Far workers make few laps, and change what they take at once.
        return self.lap(stamps, returned_ns)


class SwarmShell(Shell):
    """One ring with routed experts."""

    def __init__(
        self,
        env: Clock,
        plan: Plan,
        costs: CostModel,
        links: list[LinkCost],
        ring: Ring,
        recorder: Recorder,
        experts: Experts,
        *,
        overlap: int,
        cores: Cores | None,
        tokens: Tokens,
        event_log: TextIO | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(
            env, plan, costs, links, ring, recorder, is_faulty=True, event_log=event_log,
            progress=progress,
        )  # fmt: skip
        self.carrier = self.overlapping = OverlapPipeline(
            env, plan, links, costs.turnaround_ns, self._lap_returned, experts=experts,
            overlap=overlap, cores=cores, on_spent=recorder.spent,
        )  # fmt: skip
        self._tokens = tokens
        self._sampler = None
        if plan.window_auto:
            self._sampler = OverlapSampler(plan, costs.turnaround_ns, overlap)
        self._travelling: deque[tuple[int, Releases]] = deque()  # Behind which micro-batch.
        self._launched = 0  # The last micro-batch.
        self._ended_now: list[RequestId] = []
        self.told = 0  # Events.
        self.over = env.event()  # Succeeds when nobody is in the ring and nobody will come.

    def tell(self, event: RingEvent, at: Nanos | None = None) -> None:
        """Report a fact to the core, and see whether that was all."""
        super().tell(event, at)
        self.told += 1
        self.see_whether_over()

    def see_whether_over(self) -> None:
        """Nobody is in the ring and nobody will come: the run may end."""
        if not self.over.triggered and self.is_over():
            self.over.succeed()

    def _obey(self, orders: list[RingDecision], now: int) -> None:
        self._ended_now += [order.request for order in orders if isinstance(order, Finish)]
        super()._obey(orders, now)

    def _launch(self, batch: MicroBatch, now: int, releases: Releases) -> None:
        if releases:
            self._release(releases)
        self._launched = batch.id
        super()._launch(batch, now, NO_RELEASES)

    def _release(self, releases: Releases) -> None:
        if self._open:
            self._travelling.append((self._launched, releases))
        else:
            super()._release(releases)

    def _lap_returned(self, flight: Flight, now: Nanos) -> None:
        super()._lap_returned(flight, now)
        if self._delivered:
            self._tokens.given(self._delivered, now)
            for request in self._ended_now:
                self._tokens.ended(request)
            self._ended_now.clear()
        epoch = flight.batch.epoch
        while self._travelling:
            behind, releases = self._travelling[0]
            first_open = next(iter(self._open), None)
            if first_open is not None and first_open <= behind:
                break
            self._travelling.popleft()
            for requests in releases:
                self.tell(ReleaseEnded(requests, epoch))

    def _measure(self, flight: Flight, now: int) -> None:
        assert isinstance(self._sampler, OverlapSampler)
        times = self._sampler.sample(flight, now)
        if times is not None:
            self.tell(times)

    def cut(self, now: int) -> None:
        """What is in the ring is lost, releases too."""
        super().cut(now)
        self._travelling.clear()
