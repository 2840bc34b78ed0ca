"""What the hub knows. Changed by `hub.py` only; read by the checks of input and the views."""

from dataclasses import dataclass

from kvasir_core.swarm.claims import Claims
from kvasir_core.swarm.clock import AwakeClock
from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.load import Load
from kvasir_core.swarm.market import Market
from kvasir_core.swarm.nodes import Node
from kvasir_core.swarm.words import ModelName, Session, Slice, WorkerId
from kvasir_core.units import Nanos


@dataclass(slots=True)
class HubCounts:
    """Since the start."""

    claims_granted: int = 0
    claims_confirmed: int = 0
    claims_lapsed: int = 0
    recruits_above_target: int = 0
    target_changes: int = 0
    releases: int = 0
    workers_lost: int = 0


class HubState:
    """The hub's state, and the two ways in which a worker leaves it."""

    __slots__ = (
        "bans", "claims", "clock", "counts", "is_fresh", "load", "markets", "nodes", "past",
        "policy", "quiet_until", "resumed", "session_next",
    )  # fmt: skip

    def __init__(self, policy: SwarmPolicy) -> None:
        self.policy = policy
        self.clock = AwakeClock(policy.silence_max_ns)
        self.load = Load(policy)
        self.claims = Claims(policy)
        self.markets: dict[ModelName, Market] = {}
        self.nodes: dict[WorkerId, Node] = {}  # Heard longest ago first.
        self.bans: dict[WorkerId, Nanos] = {}  # Until when.
        self.past: dict[WorkerId, tuple[ModelName, dict[Slice, int]]] = {}  # last_serve_ms.
        self.session_next = Session(1)
        self.quiet_until = Nanos(0)  # After a restart: neither recruit nor release before.
        self.resumed: dict[ModelName, None] = {}  # Recruiting before the restart.
        self.is_fresh = True  # No event yet.
        self.counts = HubCounts()

    @property
    def is_quiet(self) -> bool:
        return self.clock.now < self.quiet_until

    def new_session(self) -> Session:
        self.session_next = Session(self.session_next + 1)
        return Session(self.session_next - 1)

    def is_lost(self, node: Node) -> bool:
        """Alive at the TTL, gone after."""
        return self.clock.age(node.heard_at) > self.policy.coverage_ttl_ns

    def remove(self, node: Node) -> None:
        """Its coverage counts no longer; what it was known for is remembered."""
        del self.nodes[node.id]
        proven = {
            s: entry.last_serve_ms for s, entry in node.covered.items() if entry.last_serve_ms
        }
        node.leave()
        if proven:
            self.past.pop(node.id, None)
            self.past[node.id] = node.market.model.model, proven
            if len(self.past) > self.policy.nodes_max:
                del self.past[next(iter(self.past))]

    def ban(self, node: WorkerId, duration: Nanos) -> None:
        self.bans.pop(node, None)
        self.bans[node] = Nanos(self.clock.now + duration)
        if len(self.bans) > self.policy.nodes_max:
            del self.bans[next(iter(self.bans))]

    def check_invariants(self) -> None:
        """O(n): the market counts exactly the counted slices and the open claims."""
        for name, market in self.markets.items():
            replicas = [
                slice_
                for node in self.nodes.values() if node.market is market
                for slice_, entry in node.covered.items() if entry.is_counted
            ]  # fmt: skip
            market.check_counts(replicas, [c.slice for c in self.claims if c.model == name])
        heard = [node.heard_at for node in self.nodes.values()]
        assert heard == sorted(heard)
        assert all(set(node.covered) == set(node.segments) for node in self.nodes.values())
        sessions = [node.session for node in self.nodes.values()]
        assert len(set(sessions)) == len(sessions)
        assert all(session < self.session_next for session in sessions)
        self.claims.check_invariants()
