"""Routed experts in a measured profile: what the tables of whole stages do not show.

`kvasir-rt profile` feeds a stage equal rows, which all choose the same experts. Real rows touch
more: n rows are expected to touch `distinct(n)` of them (`costs.routing`), so that each layer takes

    E(distinct(n), n) - E(used, n)

more than the measured body, E being the profile's table `experts`.
"""

from dataclasses import dataclass

from kvasir_scenario.profile import Plane
from kvasir_sim.costs.plane import PlaneTable
from kvasir_sim.costs.routing import distinct_experts


@dataclass(frozen=True, slots=True)
class Mixture:
    """What of a model decides which experts rows touch."""

    used: int
    shares: tuple[float, ...]


class MeasuredExperts:
    """One layer's routed experts."""

    def __init__(self, points: list[Plane], mixture: Mixture) -> None:
        self._table = PlaneTable(points)
        self._mixture = mixture
        self._known: dict[int, float] = {}

    def layer_ns(self, rows: float, distinct: float) -> float:
        """Time for `distinct` experts touched by `rows` rows."""
        return self._table.at(distinct, rows)[0]

    def extra_ns(self, rows: int) -> float:
        """Per layer, beyond what equal rows take."""
        known = self._known.get(rows)
        if known is None:
            used, shares = self._mixture.used, self._mixture.shares
            touched = distinct_experts(rows, used, shares)
            known = max(0.0, self.layer_ns(rows, touched) - self.layer_ns(rows, used))
            self._known[rows] = known
        return known
