"""What the hub does with each request, between HTTP and the core.

A peer's words become facts, the core's decisions become answers. Coordinators and model files are
the `registry`'s.
"""

import time
from dataclasses import asdict, replace
from typing import Any

from kvasir_core.swarm.decisions import Acknowledge, AdmitRelay, Assign, Decline, RefuseRelay
from kvasir_core.swarm.events import (
    CoverageReported,
    Held,
    RelayClosed,
    RelayOpened,
    VolunteerAsked,
)
from kvasir_core.swarm.words import ClaimId, ModelName, Session, Slice, WorkerId
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.hub.auth import Keeper, Scope
from kvasir_rt.hub.control import Control, policy_facts
from kvasir_rt.hub.download import SliceResponse
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.registry import Registry
from kvasir_rt.hub.slices import SliceStore
from kvasir_rt.hub.told import only, plain, tell
from kvasir_rt.swarm import protocol as wire


class HubService:
    """The middle of the hub.

    Args:
        control: The core, driven.
        registry: Coordinators and model files.
        keeper: Who may ask.
        slices: Where slices are cut to.
    """

    def __init__(
        self,
        control: Control,
        registry: Registry,
        keeper: Keeper,
        slices: SliceStore,
        limits: HubLimits,
    ) -> None:
        self.control = control
        self.registry = registry
        self.keeper = keeper
        self.slices = slices
        self.limits = limits
        self.started_at_s = time.monotonic()
        self._shown: tuple[float, dict[str, Any]] | None = None  # Made when; the snapshot.

    async def close(self) -> None:
        """Cuts under way end, the state is written, files are closed."""
        await self.slices.close()
        await self.control.close()
        await self.registry.close()

    # ------------------------------------------------------------------ nodes

    def challenge(self, request: wire.ChallengeRequest, join: str | None) -> wire.Challenge:
        nonce = self.keeper.challenge(bytes.fromhex(request.public_key), join)
        expires_s = self.limits.challenge_s
        return wire.Challenge(hub=self.keeper.hub, nonce=nonce, expires_s=expires_s)

    def node_token(self, request: wire.TokenRequest) -> wire.NodeToken:
        public_key = bytes.fromhex(request.public_key)
        signature = bytes.fromhex(request.signature)
        node, token = self.keeper.token(public_key, request.nonce, signature)
        self.control.seen[node] = public_key
        return wire.NodeToken(node=node, token=token, scope="node", expires_s=self.limits.token_s)

    def volunteer(
        self, node: WorkerId, request: wire.VolunteerRequest
    ) -> wire.Assigned | wire.Declined:
        holds = tuple(Held(ModelName(h.model), h.layer, *h.experts) for h in request.holds)
        wanted = None if request.model is None else ModelName(request.model)
        for decision in tell(
            self.control, VolunteerAsked(node, wanted, request.max_experts, holds)
        ):
            if isinstance(decision, Assign):
                return self._assigned(decision)
            if isinstance(decision, Decline):
                return wire.Declined(
                    assigned=False,
                    reason=decision.reason,
                    retry_after_s=decision.retry_after / NANOS_PER_SECOND,
                )
        raise AssertionError("the core answers every volunteer")

    def _assigned(self, order: Assign) -> wire.Assigned:
        model = self.control.models[order.model]
        return wire.Assigned(
            assigned=True,
            claim=order.claim,
            lease_s=order.lease / NANOS_PER_SECOND,
            model=order.model,
            layer=order.slice.layer,
            experts=[order.slice.begin, order.slice.end],
            scarcity=order.scarcity,
            replicas=order.replicas,
            target=order.target,
            hidden_size=model.hidden_size,
            expert_count=model.experts,
        )

    def cover(self, node: WorkerId, report: wire.CoverageReport) -> wire.CoverageReply:
        if report.worker != node:
            raise ApiError(
                403,
                f"The token is of node {node}; it reports coverage of {report.worker}.",
                code="foreign",
            )
        segments = tuple(Slice(*segment) for segment in report.segments)
        self._check_room(node, len(segments))
        claim = None if report.claim is None else ClaimId(report.claim)
        event = CoverageReported(node, ModelName(report.model), segments, claim, report.draining)
        answer = only(tell(self.control, event), Acknowledge)
        self._note_coverage(node, report.model, segments)
        return wire.CoverageReply(
            ok=True,
            relay_session=answer.session,
            release=[list(slice_) for slice_ in answer.release],
            heartbeat_s=self.control.policy.heartbeat_ns / NANOS_PER_SECOND,
        )

    def _note_coverage(self, node: WorkerId, model: str, segments: tuple[Slice, ...]) -> None:
        """Keep count, and put what changed on the record."""
        counts = self.control.segments
        before, now = counts[node], len(segments)
        if before != now:
            kind = "covers" if now else "left"
            self.control.record.add(kind, model=model, node=node, segments=now)
        if now:
            counts[node] = now
        else:
            counts.pop(node, None)

    def _check_room(self, node: WorkerId, wanted: int) -> None:
        """Identities cost nothing, so what all workers' coverage takes is bounded together."""
        counts = self.control.segments
        others = counts.total() - counts[node]
        if others + wanted > self.limits.segments_max:
            raise ApiError(
                503,
                f"{others} segments of other workers are covered; with {wanted} more they pass "
                f"{self.limits.segments_max}, the most.",
                code="full",
            )

    def dispatch_map(self, model: str) -> wire.DispatchMap:
        name = self._known(model)
        rows = [
            wire.DispatchRow(
                worker=r.worker, session=r.session, layer=r.layer, experts=[r.begin, r.end]
            )
            for r in self.control.hub.dispatch_map(name)
        ]
        return wire.DispatchMap(model=model, rows=rows)

    # ------------------------------------------------------------------ the relay

    def admit_relay(self, token: str, session: int) -> wire.RelayAdmitted:
        """A worker has dialled with this token and generation.

        Raises:
            ApiError: 401 no token of a node; 409 not the current generation, or it is in use.
        """
        principal = self.keeper.principal(token)
        if principal.scope is not Scope.NODE or principal.node is None:
            raise ApiError(403, "Only a node's token opens a relay session.", code="foreign")
        decisions = tell(self.control, RelayOpened(principal.node, Session(session)))
        for decision in decisions:
            if isinstance(decision, RefuseRelay):
                raise ApiError(409, f"Relay session {session}: {decision.why}.", code="stale")
        only(decisions, AdmitRelay)
        self.control.record.add("connected", node=principal.node, session=session)
        return wire.RelayAdmitted(worker=principal.node, session=session)

    def close_relay(self, worker: str, session: int) -> wire.Done:
        tell(self.control, RelayClosed(WorkerId(worker), Session(session)))
        self.control.record.add("disconnected", node=worker, session=session)
        return wire.Done()

    # ------------------------------------------------------------------ what is shown

    def recruitment(self) -> wire.Recruitment:
        return wire.Recruitment.model_validate(plain(self.control.hub.recruitment()))

    def demand(self, model: str | None) -> wire.Demand:
        name = None if model is None else self._known(model)
        return wire.Demand.model_validate(plain(self.control.hub.demand(name)))

    def swarm(self) -> dict[str, Any]:
        """Everything for the live page, `snapshot_s` old at most."""
        now = time.monotonic()
        if self._shown is None or now - self._shown[0] >= self.limits.snapshot_s:
            self._shown = now, self._swarm()
        return self._shown[1]

    def _swarm(self) -> dict[str, Any]:
        """No token, key or address of a peer is in it."""
        control = self.control
        statistics = control.hub.statistics()
        shown = replace(statistics, nodes=statistics.nodes[: self.limits.nodes_shown_max])
        return {
            "hub": self.keeper.hub,
            "uptime_s": time.monotonic() - self.started_at_s,
            "policy": policy_facts(control.policy),
            "recruitment": self.recruitment().model_dump(),
            "demand": self.demand(None).model_dump(),
            "workers": len(statistics.nodes),
            "statistics": plain(shown),
            "coordinators": [
                {
                    "coordinator": name,
                    "model": heard.model,
                    "heard_s": time.monotonic() - heard.at_s,
                    "problem": control.targets[name].problem,
                }
                for name, heard in self.registry.heard.items()
            ],
            "slices": {
                "held": len(self.slices),
                "bytes": self.slices.bytes_held,
                "cuts": self.slices.cuts,
                "downloads": self.slices.downloads,
                "bytes_sent": self.slices.bytes_sent,
                "sent": self.slices.ended["sent"],
                "confirmed": self.slices.ended["confirmed"],
            },
            "events": [asdict(entry) for entry in control.record.recent],
            "store_problem": control.store_problem,
        }

    # ------------------------------------------------------------------ slices

    async def shard(self, who: str, model: str, cut: Slice) -> SliceResponse:
        """A slice as an answer.

        Raises:
            ApiError: 404 no such model or no file of it; 400 no such slice; 429, 503 too much.
        """
        found = self.registry.files.get(self._known(model))
        if found is None:
            raise ApiError(404, f"This hub has no file of {model!r} now.", code="no_model_file")
        self.slices.check(found, cut)
        self.slices.begin_download(who)
        try:
            made, descriptor = await self.slices.open(found, cut)
        except BaseException:
            self.slices.end_download(who, 0, "cut")
            raise
        return SliceResponse(
            made,
            descriptor,
            ended=lambda sent, outcome: self.slices.end_download(who, sent, outcome),
        )

    # ------------------------------------------------------------------ inside

    def _known(self, model: str) -> ModelName:
        name = ModelName(model)
        if name not in self.control.models:
            raise ApiError(404, f"Model {model[:80]!r} is not registered here.", code="unknown")
        return name
