"""Layer 2: the demand market. Raises a saturated model's target, and gives idle nodes slices.

All is pull: workers ask, report and dial; nothing here addresses one that did not just speak.

    volunteer --> claim (counts as a replica) --> coverage (counts while alive and not doubted)
              --> idle and not needed: told to release, a quarter of the surplus per 30 s

Invariants: the market's counts are exactly the counted slices and open claims; a node has at most
one open claim; a generation is used for one connection. Absent by design: trust in registration
(a coordinator's doubt uncovers a slice), any worker's clock, and any address.
"""

from typing import assert_type

from kvasir_core.events import TimePassed
from kvasir_core.swarm import hub_views
from kvasir_core.swarm.claims import Claim
from kvasir_core.swarm.decisions import (
    Acknowledge,
    AdmitRelay,
    Assign,
    Decline,
    HubDecision,
    LapseClaim,
    LoseWorker,
    RefuseRelay,
    SetTarget,
)
from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.events import (
    CoordinatorAttached,
    CoordinatorGone,
    CoverageReported,
    HubEvent,
    MapRow,
    ModelRegistered,
    RelayClosed,
    RelayOpened,
    ServingReported,
    SlotsPolled,
    SlotsPollFailed,
    StateRestored,
    VolunteerAsked,
)
from kvasir_core.swarm.hub_input import check_input
from kvasir_core.swarm.hub_state import HubState
from kvasir_core.swarm.market import Market, Offer
from kvasir_core.swarm.nodes import Node
from kvasir_core.swarm.statistics import Demand, HubStatistics, Recruitment
from kvasir_core.swarm.words import (
    Chance,
    CoordinatorId,
    ModelName,
    Session,
    Slice,
    Standing,
    WorkerId,
)
from kvasir_core.units import Nanos

Decisions = list[HubDecision]


class Hub:
    """The control plane.

    Args:
        policy: The numbers.
        chance: A seeded `random.Random`; jitters retry times.
    """

    def __init__(self, policy: SwarmPolicy, chance: Chance) -> None:
        self._policy = policy
        self._chance = chance
        self._state = HubState(policy)

    def handle(self, event: HubEvent, now: Nanos) -> Decisions:
        """Take a fact, return orders; an answer to the sender comes last but for the record.

        Raises:
            Refused: A peer's input breaks a rule; nothing has changed.
            IllegalEvent: The shell's own mistake; nothing has changed.
        """
        state = self._state
        check_input(event, state)
        at = state.clock.advance(now)
        decisions = self._expire(at)
        decisions += self._apply(event, at)
        decisions += self._follow_load(event, at)
        state.is_fresh = False
        return decisions

    def next_wakeup(self) -> Nanos:
        """When to send `TimePassed` at the latest: within a tick, always."""
        state = self._state
        clock = state.clock
        at = clock.now + self._policy.tick_ns
        for due in (state.load.due_at, state.claims.next_expiry):
            if due is not None:
                at = min(at, due)
        node = next(iter(state.nodes.values()), None)
        if node is not None:
            heard_at = max(node.heard_at, clock.woke_at)
            at = min(at, heard_at + self._policy.coverage_ttl_ns + 1)
        return clock.in_shell(Nanos(max(at, clock.now)))

    def recruitment(self) -> Recruitment:
        return hub_views.recruitment(self._state)

    def demand(self, model: ModelName | None = None) -> Demand:
        """What is wanted of one model, or of all."""
        return hub_views.demand(self._state, model)

    def dispatch_map(self, model: ModelName) -> tuple[MapRow, ...]:
        """What a coordinator of this model may dispatch to."""
        return hub_views.dispatch_map(self._state, model)

    def statistics(self) -> HubStatistics:
        return hub_views.statistics(self._state)

    @property
    def claims_open(self) -> int:
        return len(self._state.claims)

    def snapshot(self) -> StateRestored:
        """What must survive a restart: give it to the next hub as its first event."""
        return hub_views.snapshot(self._state)

    def check_invariants(self) -> None:
        """The full check, O(n): for tests, and every 1,000th event."""
        self._state.check_invariants()

    def _expire(self, at: Nanos) -> Decisions:
        """Claims lapse at their TTL; workers are alive at theirs and lost after it."""
        state = self._state
        decisions: Decisions = []
        while (claim := state.claims.pop_lapsed(at)) is not None:
            state.markets[claim.model].add_claim(claim.slice, -1)
            state.counts.claims_lapsed += 1
            decisions.append(LapseClaim(claim.id, claim.node))
        while (node := next(iter(state.nodes.values()), None)) and state.is_lost(node):
            state.remove(node)
            state.counts.workers_lost += 1
            decisions.append(LoseWorker(node.id))
        return decisions

    def _apply(self, event: HubEvent, at: Nanos) -> Decisions:
        match event:
            case CoverageReported():
                return self._cover(event, at)
            case VolunteerAsked():
                return [self._answer_volunteer(event, at)]
            case SlotsPolled():
                self._state.load.answer(event.poll, (event.busy, event.slots), at)
            case SlotsPollFailed():
                self._state.load.answer(event.poll, None, at)
            case ServingReported():
                self._take_report(event, at)
            case RelayOpened():
                return [self._open_relay(event)]
            case RelayClosed():
                self._close_relay(event)
            case ModelRegistered():
                if event.model not in self._state.markets:
                    self._state.markets[event.model] = Market(event, self._policy)
            case CoordinatorAttached():
                if event.coordinator not in self._state.load.polled:
                    is_resumed = event.model in self._state.resumed
                    self._state.resumed.pop(event.model, None)
                    self._state.load.attach(
                        event.coordinator, event.model, at, is_resumed=is_resumed,
                        slots_of=event.slots_of,
                    )  # fmt: skip
            case CoordinatorGone():
                self._state.load.detach(event.coordinator)
                self._clear_doubts(event.coordinator)
            case StateRestored():
                self._restore(event, at)
            case _:
                assert_type(event, TimePassed)
        return []

    def _follow_load(self, event: HubEvent, at: Nanos) -> Decisions:
        """Polls that are due, and targets that follow the gauges: they jump, they do not step."""
        if isinstance(event, (CoverageReported, VolunteerAsked, ServingReported)):
            return []  # Nothing that they say moves a gauge; the next tick is near.
        load = self._state.load
        decisions: Decisions = [*load.ask(at)]
        for name, market in self._state.markets.items():
            is_recruiting = load.is_saturated(name, at)
            target = self._policy.base + is_recruiting * self._policy.boost
            if not load.of_model(name):
                target = 0  # Nobody could use the experts.
            if (target, is_recruiting) != (market.target, market.is_recruiting):
                self._state.counts.target_changes += target != market.target
                market.target, market.is_recruiting = target, is_recruiting
                decisions.append(SetTarget(name, target, is_recruiting))
        return decisions

    def _answer_volunteer(self, event: VolunteerAsked, at: Nanos) -> Assign | Decline:
        state = self._state
        node = event.node
        if state.is_quiet:
            return self._decline(node, "the hub has just restarted", state.quiet_until - at)
        if state.bans.get(node, at) > at:
            return self._decline(node, "quarantined", state.bans[node] - at)
        covering = state.nodes.get(node)
        if covering is not None and covering.is_draining:
            return self._decline(node, "draining", 0)
        claim = state.claims.of_node(node)
        if claim is not None:
            size = claim.slice.end - claim.slice.begin
            if event.model in (None, claim.model) and size <= event.experts_max:
                return self._assign(claim, event, at)
            state.markets[claim.model].add_claim(claim.slice, -1)
            state.claims.close(claim)
        wait = state.claims.wait_of(node, at)
        if wait:
            return self._decline(node, "its claims lapsed", wait)
        found = self._choose(event, covering)
        if found is None:
            return self._decline(node, "no demand", 0)
        market, offer = found
        if market.is_enough(offer.slice):
            state.counts.recruits_above_target += 1
        state.counts.claims_granted += 1
        claim = state.claims.grant(node, market.model.model, offer, at)
        market.add_claim(claim.slice, 1)
        return self._assign(claim, event, at)

    def _choose(self, event: VolunteerAsked, covering: Node | None) -> tuple[Market, Offer] | None:
        """The scarcest of the models that this node may serve; recruiting ones first in a tie."""
        best: tuple[Market, Offer] | None = None
        for name, market in self._state.markets.items():
            is_own = covering is None or covering.market is market
            if not is_own or event.model not in (None, name):
                continue
            own = covering.own_ranges() if covering else {}
            held = [Slice(*h[1:]) for h in event.holds if h.model == name]
            offer = market.find(event.experts_max, own, held)
            if offer is not None and (
                best is None
                or (offer.is_held, offer.scarcity, market.is_recruiting)
                > (best[1].is_held, best[1].scarcity, best[0].is_recruiting)
            ):
                best = market, offer
        return best

    def _assign(self, claim: Claim, event: VolunteerAsked, at: Nanos) -> Assign:
        return Assign(
            event.node, claim.id, Nanos(claim.expires_at - at), claim.model, claim.slice,
            claim.scarcity, claim.replicas, self._state.markets[claim.model].target,
        )  # fmt: skip

    def _decline(self, node: WorkerId, reason: str, at_least_ns: int) -> Decline:
        """Retry times are jittered by a fifth, so that a herd spreads out."""
        period = self._policy.volunteer_period_ns
        jittered = round(period * (0.8 + 0.4 * self._chance.random()))
        return Decline(node, reason, Nanos(max(0, at_least_ns) + jittered))

    def _cover(self, event: CoverageReported, at: Nanos) -> Decisions:
        """A heartbeat."""
        state = self._state
        node = state.nodes.get(event.worker)
        market = state.markets[event.model]
        if node is not None and (not event.segments or node.market is not market):
            state.remove(node)
            node = None
        if not event.segments:
            return [Acknowledge(event.worker, Session(0), ())]
        if node is None:
            node = Node(event.worker, market, state.new_session(), at)
        else:
            del state.nodes[node.id]
        state.nodes[node.id] = node  # Heard last.
        node.heard_at = at
        if node.is_burned:
            node.session, node.is_burned = state.new_session(), False
        if (event.segments, event.is_draining) != (node.segments, node.is_draining):
            node.is_draining = event.is_draining
            model, past = state.past.pop(node.id, (event.model, {}))
            segments = tuple([Slice(*segment) for segment in event.segments])
            node.cover(segments, past if model == event.model else {})
            self._confirm(node)
        return [Acknowledge(node.id, node.session, self._releases(node, at))]

    def _confirm(self, node: Node) -> None:
        """Coverage that holds the node's claimed slice takes the claim's place."""
        state = self._state
        claim = state.claims.of_node(node.id)
        if claim is None or claim.model != node.market.model.model:
            return
        layer, begin, end = claim.slice
        if any(s.layer == layer and s.begin <= begin and end <= s.end for s in node.segments):
            state.claims.confirm(claim)
            node.market.add_claim(claim.slice, -1)
            state.counts.claims_confirmed += 1

    def _releases(self, node: Node, at: Nanos) -> tuple[Slice, ...]:
        """Slices to stop serving: told again until they are gone from the heartbeat."""
        state = self._state
        is_idle = state.clock.age(node.used_at) >= self._policy.idle_exit_ns
        if is_idle and not node.is_draining and not state.is_quiet:
            for slice_, entry in node.covered.items():
                is_needed = entry.is_counted and node.market.is_needed(slice_)
                if (
                    not entry.is_released
                    and not is_needed
                    and (node.market.may_release(slice_, at))
                ):
                    entry.is_released = True
                    node.recount()
                    state.counts.releases += 1
        return tuple([s for s, entry in node.covered.items() if entry.is_released])

    def _take_report(self, event: ServingReported, at: Nanos) -> None:
        """What a coordinator saw: use, ability, doubt. Rows about what is over are dropped."""
        state = self._state
        market = state.markets[state.load.polled[event.coordinator].model]
        for row in event.rows:
            if row.standing is Standing.QUARANTINED:
                state.ban(row.worker, self._policy.ban_ns)
            node = state.nodes.get(row.worker)
            if node is None or node.market is not market:
                continue
            entry = node.covered.get(Slice(row.layer, row.begin, row.end))
            if entry is None:
                continue
            if row.pairs:
                node.used_at = at
            entry.last_serve_ms = row.last_serve_ms
            if row.standing in (Standing.SUSPECT, Standing.QUARANTINED):
                entry.doubted_by[event.coordinator] = None
            elif row.standing is not Standing.GONE:
                entry.doubted_by.pop(event.coordinator, None)
            node.recount()

    def _clear_doubts(self, coordinator: CoordinatorId) -> None:
        for node in self._state.nodes.values():
            for entry in node.covered.values():
                entry.doubted_by.pop(coordinator, None)
            node.recount()

    def _open_relay(self, event: RelayOpened) -> AdmitRelay | RefuseRelay:
        """One connection per generation; the next heartbeat gives the next one."""
        node = self._state.nodes.get(event.worker)
        if node is None or node.is_burned or event.session != node.session:
            return RefuseRelay(event.worker, event.session, "not the current generation")
        if node.is_connected:
            return RefuseRelay(event.worker, event.session, "this generation is in use")
        node.is_connected = True
        return AdmitRelay(event.worker, event.session)

    def _close_relay(self, event: RelayClosed) -> None:
        """A goodbye of an older generation says nothing about the current connection."""
        node = self._state.nodes.get(event.worker)
        if node is not None and node.is_connected and event.session == node.session:
            node.is_connected = False
            node.is_burned = True

    def _restore(self, event: StateRestored, at: Nanos) -> None:
        """Take up what was kept; be quiet for one claim period, while workers report again."""
        state = self._state
        for model in event.models:
            state.markets[model.model] = Market(model, self._policy)
        state.resumed = dict.fromkeys(event.recruiting)
        for row in sorted(event.claims, key=lambda row: (row.remaining_ns, row.claim)):
            slice_ = Slice(row.layer, row.begin, row.end)
            expires_at = Nanos(at + row.remaining_ns)
            state.claims.restore(Claim(row.claim, row.node, row.model, slice_, expires_at, 0, 0.0))
            state.markets[row.model].add_claim(slice_, 1)
        for ban in event.bans:
            state.ban(ban.node, ban.remaining_ns)
        for worker, model_name, layer, begin, end, last_serve_ms in event.proven:
            _, slices = state.past.setdefault(worker, (model_name, {}))
            slices[Slice(layer, begin, end)] = last_serve_ms
        state.claims.next_id = event.claim_next
        state.session_next = event.session_next
        state.quiet_until = Nanos(at + self._policy.claim_ttl_ns)
