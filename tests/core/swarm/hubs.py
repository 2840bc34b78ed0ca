"""A scripted shell for a hub: virtual time and shorthand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvasir_core.events import TimePassed
from kvasir_core.swarm import Hub, SwarmPolicy
from kvasir_core.swarm.decisions import (
    Acknowledge,
    AdmitRelay,
    Assign,
    Decline,
    HubDecision,
    PollCoordinator,
    RefuseRelay,
)
from kvasir_core.swarm.events import (
    CoordinatorAttached,
    CoverageReported,
    Held,
    HubEvent,
    ModelRegistered,
    RelayClosed,
    RelayOpened,
    ServedRow,
    ServingReported,
    SlotsPolled,
    SlotsPollFailed,
    VolunteerAsked,
)
from kvasir_core.swarm.statistics import ModelRecruitment
from kvasir_core.swarm.words import (
    ClaimId,
    CoordinatorId,
    ModelName,
    Session,
    Slice,
    Standing,
    WorkerId,
)
from kvasir_core.units import Nanos

SECOND = 1_000_000_000
Range = tuple[int, int, int]


def patient(**changes: Any) -> SwarmPolicy:
    """A policy whose shell may be silent for long: tests step far."""
    far = Nanos(10**6 * SECOND)
    return replace(SwarmPolicy(**changes), tick_ns=far, silence_max_ns=Nanos(10 * far))


class HubWorld:
    """Drives one hub with one model `m` and one coordinator `c`."""

    def __init__(
        self,
        policy: SwarmPolicy | None = None,
        *,
        layers: tuple[int, ...] = (0, 1),
        experts: int = 64,
        busy: int | None = 0,
        seed: int = 1,
        hub: Hub | None = None,
        is_registered: bool = True,
    ) -> None:
        self.policy = policy or SwarmPolicy()
        self.hub = hub or Hub(self.policy, random.Random(seed))
        self.now = 0
        self.busy = busy  # None = the poll hangs, -1 = it fails.
        self.log: list[tuple[HubEvent, int, list[HubDecision]]] = []
        if is_registered:
            self.send(ModelRegistered(ModelName("m"), layers, experts, 256))
            self.send(CoordinatorAttached(CoordinatorId("c"), ModelName("m")))

    def send(self, event: HubEvent) -> list[HubDecision]:
        decisions = self.hub.handle(event, Nanos(self.now))
        self.hub.check_invariants()
        self.log.append((event, self.now, decisions))
        for decision in decisions:
            if isinstance(decision, PollCoordinator) and self.busy is not None:
                failed = SlotsPollFailed(decision.poll)
                good = SlotsPolled(decision.poll, self.busy, max(4, self.busy))
                self.send(failed if self.busy < 0 else good)
        return decisions

    def run_until(self, end_s: float) -> None:
        end = round(end_s * SECOND)
        while (due := max(self.now, self.hub.next_wakeup())) <= end:
            self.now = due
            self.send(TimePassed())
        self.now = end

    def run(self, duration_s: float) -> None:
        self.run_until(self.now / SECOND + duration_s)

    def volunteer(
        self, node: str, experts_max: int = 64, *held: Range, model: str | None = None
    ) -> Assign | Decline:
        holds = tuple(Held(ModelName("m"), *h) for h in held)
        wanted = None if model is None else ModelName(model)
        answer = self.send(VolunteerAsked(WorkerId(node), wanted, experts_max, holds))[-1]
        assert isinstance(answer, Assign | Decline)
        return answer

    def cover(
        self,
        worker: str,
        *segments: Range,
        claim: int | None = None,
        draining: bool = False,
        model: str = "m",
    ) -> Acknowledge:
        decisions = self.send(
            CoverageReported(
                WorkerId(worker),
                ModelName(model),
                tuple(Slice(*s) for s in segments),
                None if claim is None else ClaimId(claim),
                draining,
            )
        )
        (answer,) = [d for d in decisions if isinstance(d, Acknowledge)]
        return answer

    def recruit(self, node: str, experts_max: int = 64) -> Slice:
        """Volunteer, and serve what is assigned, beside what is served already."""
        answer = self.volunteer(node, experts_max)
        assert isinstance(answer, Assign)
        before = [n.segments for n in self.hub.statistics().nodes if n.worker == node]
        self.cover(node, *(before[0] if before else ()), answer.slice, claim=answer.claim)
        return answer.slice

    def dial(self, worker: str, session: int) -> AdmitRelay | RefuseRelay:
        answer = self.send(RelayOpened(WorkerId(worker), Session(session)))[-1]
        assert isinstance(answer, AdmitRelay | RefuseRelay)
        return answer

    def hang_up(self, worker: str, session: int) -> None:
        self.send(RelayClosed(WorkerId(worker), Session(session)))

    def serve(
        self,
        worker: str,
        slice_: Range,
        standing: Standing = Standing.PROVEN,
        *,
        pairs: int = 1,
        last_serve_ms: int = 5,
        coordinator: str = "c",
    ) -> None:
        row = ServedRow(WorkerId(worker), *slice_, standing, last_serve_ms, pairs)
        self.send(ServingReported(CoordinatorId(coordinator), (row,)))

    def model(self) -> ModelRecruitment:
        return self.hub.recruitment().models[0]

    def segments(self, layer: int = 0) -> Sequence[tuple[int, int, int, int, float]]:
        """Of model `m`'s layer, as `(begin, end, replicas, claimed, scarcity)`."""
        (found,) = [d for d in self.hub.demand().models[0].layers if d.layer == layer]
        return [(*s.experts, s.replicas, s.claimed, s.scarcity) for s in found.segments]
