"""What the hub shows: the answers of its HTTP endpoints, and what it keeps over a restart."""

from kvasir_core.swarm.events import (
    BanRow,
    ClaimRow,
    MapRow,
    ProvenRow,
    StateRestored,
)
from kvasir_core.swarm.hub_state import HubState
from kvasir_core.swarm.market import Market
from kvasir_core.swarm.nodes import Node
from kvasir_core.swarm.statistics import (
    Demand,
    HubStatistics,
    ModelRecruitment,
    NodeStatistics,
    Recruitment,
)
from kvasir_core.swarm.words import ModelName
from kvasir_core.units import NANOS_PER_SECOND, Nanos


def recruitment(state: HubState) -> Recruitment:
    policy = state.policy
    return Recruitment(
        threshold=policy.threshold,
        base=policy.base,
        boost=policy.boost,
        models=tuple(_model_recruitment(market, state) for market in state.markets.values()),
    )


def demand(state: HubState, model: ModelName | None) -> Demand:
    markets = [m for name, m in state.markets.items() if model in (None, name)]
    return Demand(
        recruiting=any(market.is_recruiting for market in markets),
        models=tuple(market.demand() for market in markets),
    )


def dispatch_map(state: HubState, model: ModelName) -> tuple[MapRow, ...]:
    """Connected workers' slices; a worker that drains, or was told to release, left it first."""
    return tuple(
        MapRow(node.id, node.session, *slice_)
        for node in sorted(state.nodes.values(), key=lambda node: node.id)
        if node.is_connected and not node.is_draining and node.market.model.model == model
        for slice_, entry in node.covered.items()
        if not entry.is_released
    )


def statistics(state: HubState) -> HubStatistics:
    counts = state.counts
    return HubStatistics(
        nodes=tuple(_node_statistics(node, state) for node in state.nodes.values()),
        claims_open=len(state.claims),
        claims_granted=counts.claims_granted,
        claims_confirmed=counts.claims_confirmed,
        claims_lapsed=counts.claims_lapsed,
        recruits_above_target=counts.recruits_above_target,
        target_changes=counts.target_changes,
        releases=counts.releases,
        workers_lost=counts.workers_lost,
        polls_missed=state.load.missed,
        clock_jumps=state.clock.jumps,
    )


def snapshot(state: HubState) -> StateRestored:
    """What a restarted hub is told first."""
    at = state.clock.now
    past = dict(state.past)
    for node in state.nodes.values():
        proven = {s: e.last_serve_ms for s, e in node.covered.items() if e.last_serve_ms}
        past[node.id] = node.market.model.model, proven
    return StateRestored(
        models=tuple(market.model for market in state.markets.values()),
        recruiting=tuple(name for name, m in state.markets.items() if m.is_recruiting),
        claims=tuple(
            ClaimRow(c.id, c.node, c.model, *c.slice, Nanos(c.expires_at - at))
            for c in state.claims
        ),
        bans=tuple(BanRow(n, Nanos(until - at)) for n, until in state.bans.items() if until > at),
        proven=tuple(
            ProvenRow(worker, model, *slice_, last_serve_ms)
            for worker, (model, slices) in past.items()
            for slice_, last_serve_ms in slices.items()
        ),
        claim_next=state.claims.next_id,
        session_next=state.session_next,
    )


def _model_recruitment(market: Market, state: HubState) -> ModelRecruitment:
    at = state.clock.now
    name = market.model.model
    gauges = [polled.gauge for polled in state.load.of_model(name)]
    valid = state.load.readings(name, at)
    read_at = max((g.read_at for g in gauges if g.read_at is not None), default=None)
    return ModelRecruitment(
        model=name,
        busy=sum(gauge.busy for gauge in valid),
        slots=sum(gauge.slots for gauge in valid),
        saturated=any(gauge.busy >= state.policy.threshold for gauge in valid),
        recruiting=market.is_recruiting,
        base_target=state.policy.base,
        effective_target=market.target,
        workers=sum(node.market is market for node in state.nodes.values()),
        age_s=None if read_at is None else (at - read_at) / NANOS_PER_SECOND,
        reason=state.load.reason(name, at),
    )


def _node_statistics(node: Node, state: HubState) -> NodeStatistics:
    doubts = [c for entry in node.covered.values() for c in entry.doubted_by]
    return NodeStatistics(
        worker=node.id,
        model=node.market.model.model,
        session=node.session,
        is_connected=node.is_connected,
        is_draining=node.is_draining,
        age_s=state.clock.age(node.heard_at) / NANOS_PER_SECOND,
        segments=tuple((s.layer, s.begin, s.end) for s in node.covered),
        last_serve_ms=max((e.last_serve_ms for e in node.covered.values()), default=0),
        doubted_by=tuple(dict.fromkeys(doubts)),
    )
