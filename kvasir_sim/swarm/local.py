"""Time of routed experts that a stage computes itself."""

from typing import Protocol

from kvasir_core import nanos
from kvasir_scenario.schema_experts import LocalExperts
from kvasir_sim.costs import CostModel
from kvasir_sim.costs.measured_experts import MeasuredExperts
from kvasir_sim.costs.profile import ProfileCosts
from kvasir_sim.costs.roofline import RooflineCosts
from kvasir_sim.swarm.routing import Routing


class LocalTimes(Protocol):
    """One layer's routed experts, computed by a stage."""

    @property
    def is_in_costs(self) -> bool:
        """Whether the cost model's holds include them already."""

    def layer_ns(self, stage: int, rows: float, distinct: float) -> int:
        """Time for `distinct` experts touched by as many pairs as `rows` rows have."""


class GivenTimes:
    """As the scenario says."""

    def __init__(self, section: LocalExperts) -> None:
        self._section = section
        self.is_in_costs = section.is_in_costs

    def layer_ns(self, stage: int, rows: float, distinct: float) -> int:
        """The same on every stage."""
        del stage
        own = self._section
        return nanos(own.pass_s + own.per_expert_s * distinct + own.per_row_s * rows)


class RooflineTimes:
    """As the roofline has them: weights of the experts touched over the stage's bandwidth."""

    is_in_costs = True

    def __init__(self, costs: RooflineCosts) -> None:
        self._costs = costs

    def layer_ns(self, stage: int, rows: float, distinct: float) -> int:
        """By the stage's device."""
        return nanos(self._costs.experts_s(stage, rows, distinct))


class ProfileTimes:
    """As they were measured."""

    is_in_costs = True

    def __init__(self, experts: MeasuredExperts) -> None:
        self._experts = experts

    def layer_ns(self, stage: int, rows: float, distinct: float) -> int:
        """The same on every stage."""
        del stage
        return round(self._experts.layer_ns(rows, distinct))


def local_times(section: LocalExperts | None, costs: CostModel) -> LocalTimes:
    """The section's times, or those of the costs."""
    if section is None and isinstance(costs, RooflineCosts):
        return RooflineTimes(costs)
    if section is None and isinstance(costs, ProfileCosts) and costs.experts is not None:
        return ProfileTimes(costs.experts)
    return GivenTimes(section or LocalExperts())


class StageWork:
    """What a stage computes besides routed experts, and with them, per micro-batch."""

    def __init__(self, times: LocalTimes, layers: list[int], routing: Routing) -> None:
        self.times = times
        self.layers = layers  # With routed experts, per stage.
        self._routing = routing
        self._known: dict[tuple[int, int], int] = {}

    def all_local_ns(self, stage: int, rows: int) -> int:
        """Every routed expert of every layer of the stage, for as many as are expected."""
        known = self._known.get((stage, rows))
        if known is None:
            once = self.times.layer_ns(stage, rows, self._routing.distinct(rows))
            known = self._known[stage, rows] = self.layers[stage] * once
        return known

    def rest_ns(self, stage: int, rows: int, hold_ns: int) -> int:
        """The cost model's hold without routed experts."""
        if not self.times.is_in_costs:
            return hold_ns
        return max(0, hold_ns - self.all_local_ns(stage, rows))

    def predicted_ns(self, rows: int) -> int:
        """What the costs' prediction lacks while experts are local: the longest stage's."""
        if self.times.is_in_costs:
            return 0
        return max(self.all_local_ns(stage, rows) for stage in range(len(self.layers)))
