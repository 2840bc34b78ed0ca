"""Whether expert work goes out: saturated, with the dwell, unless remote help proves no gain.

Gain is what the stage saved against what it lost: pairs accepted from workers, at the measured
cost of a pair computed locally, against the time in which every held micro-batch waited for
experts. Over a WAN without enough overlap the second is larger; after `no_gain_ns` of that the
coordinator disengages and stays local for `no_gain_hold_ns`.
"""

from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.saturation import Gauge
from kvasir_core.units import Nanos


class Engagement:
    """The coordinator's gauge and its measure of gain."""

    __slots__ = (
        "_accepted", "_held_until", "_local_ns", "_local_pairs", "_no_gain_since", "_policy",
        "changes", "gauge", "is_engaged",
    )  # fmt: skip

    def __init__(self, policy: SwarmPolicy) -> None:
        self._policy = policy
        self.gauge = Gauge.of_coordinator(policy)
        self.is_engaged = False
        self.changes = 0
        self._local_pairs = self._local_ns = 0  # Decayed sums.
        self._accepted = 0  # Pairs accepted from workers up to the last report.
        self._no_gain_since: Nanos | None = None
        self._held_until = Nanos(0)

    def look(self, at: Nanos) -> str | None:
        """Follow the gauge; returns why it disengaged now, "engaged", or None for no change."""
        wanted = self.gauge.look(at) and at >= self._held_until
        if wanted == self.is_engaged:
            return None
        self.is_engaged = wanted
        self.changes += 1
        self._no_gain_since = None
        if wanted:
            return "engaged"
        if at < self._held_until:
            return "no_gain"
        return "blind" if self.gauge.is_blind(at) else "drained"

    @property
    def blind_at(self) -> Nanos | None:
        """When it goes blind, if no further reading comes."""
        read_at = self.gauge.read_at
        if read_at is None or not self.is_engaged:
            return None
        return Nanos(read_at + self._policy.blind_local_ns)

    def measure(
        self, local_pairs: int, local_ns: int, blocked_ns: int, accepted: int, at: Nanos
    ) -> None:
        """A report of the stage; `accepted` pairs came from workers since the start."""
        self._local_pairs = self._local_pairs * 3 // 4 + local_pairs
        self._local_ns = self._local_ns * 3 // 4 + local_ns
        helped, self._accepted = accepted - self._accepted, accepted
        if not self.is_engaged or not self._local_pairs or not (helped or blocked_ns):
            return
        if helped * self._local_ns > blocked_ns * self._local_pairs:
            self._no_gain_since = None
        elif self._no_gain_since is None:
            self._no_gain_since = at
        elif at - self._no_gain_since >= self._policy.no_gain_ns:
            self._held_until = Nanos(at + self._policy.no_gain_hold_ns)
