"""Marginal gains: what one more of each resource adds to the capacity, seed by seed.

Each seed's boundary is sought again with the change, beginning where it was without: the same
requests in the same order, so that the difference is the resource's and not luck's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from kvasir_sim.capacity.resources import Resource
from kvasir_sim.capacity.search import Boundary, Capacity, LoadSearch

NEAR_STEPS = 2  # Most resources change little; twice the step after every miss.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a resource adds.

    Attributes:
        resource: Which.
        share: Mean over the seeds, of the capacity; None if it cannot be told.
        least, most: Of one seed.
        why_not: Why it cannot be told.
    """

    resource: Resource
    share: float | None
    least: float | None = None
    most: float | None = None
    why_not: str | None = None


def gains_of(search: LoadSearch, capacity: Capacity, resources: Sequence[Resource]) -> list[Gain]:
    """The gain of each resource, best first; those that cannot be told stand last."""
    assert capacity.index is not None, "a capacity was found"
    seeds, start = search.seeds, capacity.index
    asked = [resource for resource in resources if resource.changes is not None]
    base = search.driver.drive([search.boundary(seed, start, NEAR_STEPS) for seed in seeds])
    after = search.driver.drive(
        [
            search.boundary(seed, start, NEAR_STEPS, resource.changes or ())
            for resource in asked
            for seed in seeds
        ]
    )
    gains = [
        _gain(search, resource, base, after[at * len(seeds) : (at + 1) * len(seeds)])
        for at, resource in enumerate(asked)
    ]
    gains += [
        Gain(resource=resource, share=None, why_not=resource.why_not)
        for resource in resources
        if resource.changes is None
    ]
    return sorted(gains, key=lambda gain: -1.0 if gain.share is None else gain.share, reverse=True)


def _gain(
    search: LoadSearch, resource: Resource, base: Sequence[Boundary], after: Sequence[Boundary]
) -> Gain:
    error = next((each.error for each in after if each.error is not None), None)
    pairs = [
        (before.low, now.low)
        for before, now in zip(base, after, strict=True)
        if before.low is not None and now.low is not None
    ]
    if error is not None or not pairs:
        return Gain(resource=resource, share=None, why_not=error or "no load holds with it")
    shares = [search.load(now) / search.load(before) - 1 for before, now in pairs]
    return Gain(resource=resource, share=mean(shares), least=min(shares), most=max(shares))
