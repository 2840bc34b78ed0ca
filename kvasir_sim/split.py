"""Layers per stage: the split that minimises the longest hold, exactly.

Layers are alike, so a split is a count per stage, and stage s with L layers takes
c_s(L) = fixed_s + layer_s * L, which never falls as L grows. Each stage holds at least one layer
and at most `layers_max` (its memory).

**Method.** One layer for each stage; then every further layer goes to the stage whose hold with
it would be the shortest, among those with room.

**Why that is the optimum.** Let T be the best possible longest hold, and n_s(T) the most layers
that stage s can hold within T; T is feasible exactly when all n_s(T) >= 1 and their sum reaches
the number of layers. Suppose the method's longest hold exceeds T. One layer each is within T, so
some step first raised a stage above T; at that step every stage with room would have gone above
T too, so each of them already held at least n_s(T), and each full one `layers_max` >= n_s(T).
Then at least sum n_s(T) >= all layers were placed before that step: there was none left to place.

The cost is a heap operation per layer. A test compares it with every split of small rings.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from kvasir_core.errors import PlanError


@dataclass(frozen=True, slots=True)
class StageCost:
    """A stage's hold in nanoseconds as a function of its layers.

    Attributes:
        fixed_ns: Whatever the layers: the pass, head's and tail's extras, sending if it occupies.
        layer_ns: For each layer.
        layers_max: What its memory holds with the KV that is asked for.
    """

    fixed_ns: float
    layer_ns: float
    layers_max: int

    def hold_ns(self, layers: int) -> float:
        return self.fixed_ns + self.layer_ns * layers


def best_split(costs: Sequence[StageCost], layers: int) -> tuple[int, ...]:
    """Layers per stage with the least longest hold; of equal choices the earlier stage first.

    Raises:
        PlanError: Fewer layers than stages, or more than all memory holds; with both numbers.
    """
    if layers < len(costs):
        raise PlanError(f"{len(costs)} stages cannot each hold one of {layers} layers")
    for stage, cost in enumerate(costs):
        if cost.layers_max < 1:
            raise PlanError(f"stage {stage} has no memory for even one layer with its KV")
    room = sum(cost.layers_max for cost in costs)
    if room < layers:
        most = ", ".join(str(cost.layers_max) for cost in costs)
        raise PlanError(
            f"the devices hold {room} of {layers} layers with their KV (at most {most} per stage)"
        )
    counts = [1] * len(costs)
    heap = [(cost.hold_ns(2), stage) for stage, cost in enumerate(costs) if cost.layers_max > 1]
    heapq.heapify(heap)
    for _ in range(layers - len(costs)):
        _, stage = heapq.heappop(heap)
        counts[stage] += 1
        if counts[stage] < costs[stage].layers_max:
            heapq.heappush(heap, (costs[stage].hold_ns(counts[stage] + 1), stage))
    return tuple(counts)


def longest_ns(costs: Sequence[StageCost], counts: Sequence[int]) -> float:
    return max(cost.hold_ns(count) for cost, count in zip(costs, counts, strict=True))
