"""What a hop costs: a latency that is pipelined, and bytes over bandwidth that are not."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvasir_core.plan import RESULT_ROW_BYTES, Plan
from kvasir_core.units import NANOS_PER_SECOND, nanos
from kvasir_scenario.data_paths import existing_file

if TYPE_CHECKING:
    from kvasir_scenario.schema import Scenario

LINK_KEYS = {"link", "links", "return_link"}


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
    """One per hop in ring order; the return from tail to head is the last.

    With costs of kind profile, a ring that says nothing of its links gets the measured ones.

    Raises:
        ScenarioError: The profile cannot be read.
    """
    boundary = plan.hidden * plan.element_bytes
    ring = scenario.ring
    if scenario.costs.kind == "profile" and not ring.model_fields_set & LINK_KEYS:
        return _measured_links(scenario, scenario.costs.file, plan)
    hops = ring.hops
    return [
        LinkCost(
            latency_ns=nanos(hop.latency_s),
            row_bytes=boundary if place < len(hops) - 1 else RESULT_ROW_BYTES,
            bandwidth_bytes_per_s=hop.bandwidth_bytes_per_s,
            occupies_sender=hop.occupies_sender,
        )
        for place, hop in enumerate(hops)
    ]


def _measured_links(scenario: "Scenario", file: str, plan: Plan) -> list[LinkCost]:
    """Every hop as the profile measured it, as the line through its ends.

    The smallest message gives the latency, the slope to the largest the bandwidth: a simulated
    link has no other shape.
    """
    from kvasir_scenario.profile import read_profile

    points = read_profile(existing_file(scenario, "costs.file", file)).link
    (few, first_ns, _), (many, last_ns, _) = points[0], points[-1]
    slope_ns = max(last_ns - first_ns, 0) / (many - few)
    bandwidth = NANOS_PER_SECOND / slope_ns if slope_ns else None
    latency = max(round(first_ns - slope_ns * few), 0)
    boundary = plan.hidden * plan.element_bytes
    sizes = [boundary] * (plan.stages - 1) + [RESULT_ROW_BYTES]
    return [LinkCost(latency, size, bandwidth, occupies_sender=False) for size in sizes]
