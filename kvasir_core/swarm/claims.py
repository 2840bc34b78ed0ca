"""Assignments that no coverage has confirmed yet: they count as replicas until they lapse.

That is why a herd of volunteers gets disjoint slices. A node has at most one open claim; asking
again returns the same one, so a lost answer costs nothing. A node whose claims lapse waits longer
each time, or one that never serves could hold demand closed for ever.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.market import Offer
from kvasir_core.swarm.refusal import Refused
from kvasir_core.swarm.words import ClaimId, ModelName, Slice, WorkerId
from kvasir_core.units import Nanos

LAPSES_MAX = 10  # Doubling stops here: 120 s x 2^9 is 17 hours.


@dataclass(frozen=True, slots=True)
class Claim:
    id: ClaimId
    node: WorkerId
    model: ModelName
    slice: Slice
    expires_at: Nanos
    replicas: int  # Supply when it was granted, and...
    scarcity: float  # ...what that meant: shown again when the node asks again.


class Claims:
    """The ledger."""

    __slots__ = ("_by_node", "_lapses", "_open", "_policy", "next_id")

    def __init__(self, policy: SwarmPolicy) -> None:
        self._policy = policy
        self._open: dict[ClaimId, Claim] = {}  # In the order in which they expire.
        self._by_node: dict[WorkerId, Claim] = {}
        self._lapses: dict[WorkerId, tuple[int, Nanos]] = {}  # In a row; wait until.
        self.next_id = ClaimId(1)

    def __iter__(self) -> Iterator[Claim]:
        return iter(self._open.values())

    def __len__(self) -> int:
        return len(self._open)

    def of_node(self, node: WorkerId) -> Claim | None:
        return self._by_node.get(node)

    @property
    def next_expiry(self) -> Nanos | None:
        return next((claim.expires_at for claim in self), None)

    def check(self, claim: ClaimId, node: WorkerId) -> None:
        """Raises Refused if the claim is another's, or was never granted."""
        if not 1 <= claim < self.next_id:
            raise Refused("foreign", f"claim {claim} was never granted")
        found = self._open.get(claim)
        if found is not None and found.node != node:
            raise Refused("foreign", f"claim {claim} is not {node!r}'s")

    def grant(self, node: WorkerId, model: ModelName, offer: Offer, at: Nanos) -> Claim:
        expires_at = Nanos(at + self._policy.claim_ttl_ns)
        claim = Claim(
            self.next_id, node, model, offer.slice, expires_at, offer.supply, offer.scarcity
        )
        self.next_id = ClaimId(self.next_id + 1)
        self.restore(claim)
        return claim

    def restore(self, claim: Claim) -> None:
        assert claim.node not in self._by_node
        self._open[claim.id] = claim
        self._by_node[claim.node] = claim

    def close(self, claim: Claim) -> None:
        """Confirmed, or given up for another."""
        del self._open[claim.id]
        del self._by_node[claim.node]

    def confirm(self, claim: Claim) -> None:
        self.close(claim)
        self._lapses.pop(claim.node, None)

    def pop_lapsed(self, at: Nanos) -> Claim | None:
        """The next claim whose time is over: exactly at its TTL."""
        claim = next(iter(self), None)
        if claim is None or claim.expires_at > at:
            return None
        self.close(claim)
        lapses = min(self._lapses.pop(claim.node, (0, at))[0] + 1, LAPSES_MAX)
        wait = self._policy.claim_ttl_ns << (lapses - 1)
        self._lapses[claim.node] = lapses, Nanos(claim.expires_at + wait)
        if len(self._lapses) > self._policy.nodes_max:
            del self._lapses[next(iter(self._lapses))]
        return claim

    def wait_of(self, node: WorkerId, at: Nanos) -> Nanos:
        """How long a node whose claims lapsed is offered nothing."""
        return Nanos(max(0, self._lapses.get(node, (0, at))[1] - at))

    def check_invariants(self) -> None:
        """One open claim per node; the ledger's order is that of expiry."""
        assert list(self._by_node.values()) == list(self)
        assert all(self._by_node[claim.node] is claim for claim in self)
        expiries = [claim.expires_at for claim in self]
        assert expiries == sorted(expiries)
