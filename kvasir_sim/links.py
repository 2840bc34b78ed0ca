"""What a hop costs: a latency that is pipelined, and bytes over bandwidth that are not."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir_core.plan import RESULT_ROW_BYTES, Plan
from kvasir_core.units import NANOS_PER_SECOND, nanos

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One hop.

    Attributes:
        latency_ns: From the last byte sent to its arrival; any number of messages at once.
        row_bytes: Bytes per row: of the boundary, or of the tail's result on the way back.
        bandwidth_bytes_per_s: None: bytes take no time.
        occupies_sender: The sending stage is busy until its last byte is out.
    """

    latency_ns: int
    row_bytes: int
    bandwidth_bytes_per_s: float | None
    occupies_sender: bool

    def transfer_ns(self, rows: int) -> int:
        """Time that `rows` rows occupy the link; the return link carries output rows only."""
        if self.bandwidth_bytes_per_s is None:
            return 0
        return round(rows * self.row_bytes * NANOS_PER_SECOND / self.bandwidth_bytes_per_s)


def build_links(scenario: "Scenario", plan: Plan) -> list[LinkCost]:
    """One per hop in ring order; the return from tail to head is the last."""
    boundary = plan.hidden * plan.element_bytes
    hops = scenario.ring.hops
    return [
        LinkCost(
            latency_ns=nanos(hop.latency_s),
            row_bytes=boundary if place < len(hops) - 1 else RESULT_ROW_BYTES,
            bandwidth_bytes_per_s=hop.bandwidth_bytes_per_s,
            occupies_sender=hop.occupies_sender,
        )
        for place, hop in enumerate(hops)
    ]
