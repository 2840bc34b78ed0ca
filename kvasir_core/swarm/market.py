"""One model's market: what is wanted of each expert, what there is, and who gets what next."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvasir_core.swarm.coverage import LayerSupply, Run, runs_outside
from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.events import ModelRegistered
from kvasir_core.swarm.refusal import Refused
from kvasir_core.swarm.statistics import LayerDemand, ModelDemand, Segment
from kvasir_core.swarm.words import Slice
from kvasir_core.units import Nanos

SUPPLY_MAX = 1 << 31  # More replicas than there can be nodes.
Ranges = Mapping[int, Sequence[tuple[int, int]]]


class Offer(NamedTuple):
    """A slice to assign, with what the answer shows."""

    slice: Slice
    supply: int  # Replicas, claims counted if the policy counts them.
    scarcity: float
    is_held: bool  # On the node's disk already.


def scarcity(supply: int, target: int) -> float:
    """The share of the wanted replicas that is missing: in [0, 1], 0 iff supply >= target."""
    return max(0, target - supply) / target if target else 0.0


def clip(begin: int, end: int, experts_max: int, grain: int) -> tuple[int, int]:
    """The first piece of a run when it is cut into as few, as even pieces as the budget allows.

    Its end falls on a multiple of `grain` where that fits the budget, so that the cuts of nodes
    with different budgets meet and leave no slivers.
    """
    length = end - begin
    if length <= experts_max:
        return begin, end
    pieces = -(-length // experts_max)
    cut = begin + -(-length // pieces)
    aligned = cut + -cut % grain
    if aligned - begin > experts_max:
        aligned -= grain
    return begin, aligned if begin < aligned < end else cut


class Market:
    """Supply per layer with experts, and the target."""

    __slots__ = (
        "_layers",
        "_least_known",
        "_policy",
        "_release_from",
        "_released",
        "_releases_max",
        "is_recruiting",
        "model",
        "target",
    )  # fmt: skip

    def __init__(self, model: ModelRegistered, policy: SwarmPolicy) -> None:
        self._policy = policy
        self.model = model
        self._layers = {layer: LayerSupply(model.experts) for layer in model.layers}
        self._least_known: int | None = None
        self.target = 0
        self.is_recruiting = False
        self._release_from: Nanos | None = None
        self._releases_max = self._released = 0  # Expert replicas, in this period.

    def check_slices(self, slices: Sequence[Slice]) -> None:
        """Raises Refused for what this model does not have."""
        for layer, begin, end in slices:
            if layer not in self._layers:
                raise Refused("malformed", f"layer {layer} of {self.model.model!r} has no experts")
            if end > self.model.experts:
                raise Refused(
                    "malformed",
                    f"experts [{begin}, {end}) of {self.model.model!r}, which has "
                    f"{self.model.experts}",
                )

    def add_replica(self, slice_: Slice, step: int) -> None:
        self._least_known = None
        self._layers[slice_.layer].add_replicas(slice_.begin, slice_.end, step)

    def add_claim(self, slice_: Slice, step: int) -> None:
        self._least_known = None
        self._layers[slice_.layer].add_claims(slice_.begin, slice_.end, step)

    def is_enough(self, slice_: Slice) -> bool:
        """Whether any expert of it has all the replicas and claims it needs."""
        layer = self._layers[slice_.layer]
        experts = range(slice_.begin, slice_.end)
        return any(layer.replicas[e] + layer.claimed[e] >= self.target for e in experts)

    def find(self, experts_max: int, own: Ranges, held: Sequence[Slice]) -> Offer | None:
        """What to offer a node that serves `own` and has `held` on disk; None if nothing is scarce.

        A slice on disk that is scarce at all comes before any download. Else the scarcest run,
        longest first: small gaps are for small budgets.
        """
        if self._least() >= self.target:
            return None
        budget = min(experts_max, self._policy.slice_experts_max)
        best: tuple[int, int, int, int, int] | None = None
        for layer, run in self._held_runs(own, held) if self._policy.prefers_held else ():
            best = self._better(best, layer, run, budget)
        is_held = best is not None
        if best is None:
            for layer, supply_of in self._layers.items():
                if supply_of.least(claims=self._policy.counts_claims) >= self.target:
                    continue
                for run in self._runs(layer, own):
                    best = self._better(best, layer, run, budget)
        if best is None:
            return None
        supply, _, layer, begin, end = best
        begin, end = clip(begin, end, budget, self._policy.slice_grain)
        return Offer(Slice(layer, begin, end), supply, scarcity(supply, self.target), is_held)

    def is_needed(self, slice_: Slice) -> bool:
        """Whether some expert would fall below the target without this counted replica."""
        replicas = self._layers[slice_.layer].replicas[slice_.begin : slice_.end]
        return min(replicas) <= self.target

    def may_release(self, slice_: Slice, at: Nanos) -> bool:
        """Take an unneeded slice from this period's allowance: a quarter of the surplus.

        One slice a period always goes, or the last few would stay for ever.
        """
        period = self._policy.release_period_ns
        if self._release_from is None or at - self._release_from >= period:
            self._release_from = at
            self._released = 0
            self._releases_max = -(-self._surplus() // 4)
        size = slice_.end - slice_.begin
        if self._released and self._released + size > self._releases_max:
            return False
        self._released += size
        return True

    def demand(self) -> ModelDemand:
        layers = []
        for number, layer in self._layers.items():
            segments = [
                Segment(
                    experts=(run.begin, run.end),
                    replicas=run.replicas,
                    claimed=run.claimed,
                    target=self.target,
                    scarcity=scarcity(self._supply(run), self.target),
                )
                for run in layer.runs
            ]
            layers.append(LayerDemand(layer=number, segments=tuple(segments)))
        return ModelDemand(
            model=self.model.model,
            recruiting=self.is_recruiting,
            target=self.target,
            layers=tuple(layers),
        )

    def check_counts(self, replicas: Sequence[Slice], claims: Sequence[Slice]) -> None:
        """O(n): the counters are what these slices add up to."""
        for number, layer in self._layers.items():
            for counted, slices in ((layer.replicas, replicas), (layer.claimed, claims)):
                expected = [0] * self.model.experts
                for slice_ in slices:
                    if slice_.layer == number:
                        for expert in range(slice_.begin, slice_.end):
                            expected[expert] += 1
                assert counted == expected

    def _supply(self, run: Run) -> int:
        return run.replicas + (run.claimed if self._policy.counts_claims else 0)

    def _least(self) -> int:
        """The smallest supply in any layer; no layer, no demand."""
        if self._least_known is None:
            claims = self._policy.counts_claims
            supplies = [layer.least(claims=claims) for layer in self._layers.values()]
            self._least_known = min(supplies, default=SUPPLY_MAX)
        return self._least_known

    def _surplus(self) -> int:
        """Expert replicas above the target, over all layers."""
        return sum(
            (run.replicas - self.target) * (run.end - run.begin)
            for layer in self._layers.values()
            for run in layer.runs
            if run.replicas > self.target
        )

    def _runs(self, layer: int, own: Ranges) -> Sequence[Run]:
        runs = self._layers[layer].runs
        return runs_outside(runs, own[layer]) if layer in own else runs

    def _held_runs(self, own: Ranges, held: Sequence[Slice]) -> Iterator[tuple[int, Run]]:
        """Parts of held slices, each within one run."""
        for layer, begin, end in held:
            for run in self._runs(layer, own):
                low, high = max(begin, run.begin), min(end, run.end)
                if low < high:
                    yield layer, run._replace(begin=low, end=high)

    def _better(
        self, best: tuple[int, int, int, int, int] | None, layer: int, run: Run, budget: int
    ) -> tuple[int, int, int, int, int] | None:
        """The scarcer of the two, then the longer within the budget, then the lower."""
        supply = self._supply(run)
        if supply >= self.target:
            return best
        key = supply, -min(run.end - run.begin, budget), layer, run.begin, run.end
        return key if best is None or key < best else best
