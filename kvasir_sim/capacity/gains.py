"""Marginal gains: what one more of each resource adds to the capacity, seed by seed.

The boundaries of a few seeds, those nearest to the capacity, are sought again with the change, each
beginning where it was without: the same requests in the same order, so that the difference is not
luck's. The nearest seed goes first. Where its run just beyond the boundary is the same with the
change, figure by figure, nobody ever wanted more of the resource, and no other seed is asked. The
others begin where the first one's boundary went.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from statistics import mean

from kvasir_sim.capacity.driver import Row
from kvasir_sim.capacity.resources import Resource
from kvasir_sim.capacity.search import Boundary, Capacity, LoadSearch
from kvasir_sim.sweep.points import Changes

SEEDS_MAX = 3  # Common random numbers: seeds differ in their capacity, hardly in its gains.
ECHOED = frozenset({"window", "kv_blocks_total"})  # Figures that say what was given.
RUNS_EXPECTED = 3  # Of a resource with one seed, for the bar on the screen.
RESOURCES_EXPECTED = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Gain:
    """What a resource adds.

    Attributes:
        resource: Which.
        share: Mean over the seeds, of the capacity; None if it cannot be told.
        least, most: Of one seed.
        seeds: How many were asked.
        is_untouched: One seed's run was the same with it.
        why_not: Why it cannot be told.
    """

    resource: Resource
    share: float | None
    least: float | None = None
    most: float | None = None
    seeds: int = 0
    is_untouched: bool = False
    why_not: str | None = None


@dataclass(frozen=True, slots=True)
class _Seed:
    """A seed, and the highest index that it carries without any change."""

    seed: int
    edge: int


def runs_expected(seeds: int) -> int:
    """How many runs the gains usually take."""
    return RESOURCES_EXPECTED * min(seeds, SEEDS_MAX) * RUNS_EXPECTED


def gains_of(search: LoadSearch, capacity: Capacity, resources: Sequence[Resource]) -> list[Gain]:
    """The gain of each resource, best first; those that cannot be told stand last."""
    assert capacity.index is not None, "a capacity was found"
    first, *others = _nearest(search, capacity)
    asked = [resource for resource in resources if resource.changes is not None]
    expected = RUNS_EXPECTED * len(asked)
    search.driver.expect("what one more brings", expected, expected * len(others))
    leads = search.driver.drive([_lead(search, first, each.changes or ()) for each in asked])
    moves = [None if lead is None or lead.low is None else lead.low - first.edge for lead in leads]
    pairs = [
        (place, move, seed)
        for place, move in enumerate(moves)
        if move is not None
        for seed in others
    ]
    search.driver.expect("what one more brings, other seeds", RUNS_EXPECTED * len(pairs))
    found = search.driver.drive(
        [
            search.boundary(seed.seed, seed.edge + move, 1, asked[place].changes or ())
            for place, move, seed in pairs
        ]
    )
    gains = []
    for place, (resource, lead) in enumerate(zip(asked, leads, strict=True)):
        rest = [
            (seed, boundary)
            for (at, _, seed), boundary in zip(pairs, found, strict=True)
            if at == place
        ]
        gains.append(_gain(search, resource, None if lead is None else [(first, lead), *rest]))
    gains += [
        Gain(resource=resource, share=None, why_not=resource.why_not)
        for resource in resources
        if resource.changes is None
    ]
    return sorted(gains, key=lambda gain: -1.0 if gain.share is None else gain.share, reverse=True)


def _nearest(search: LoadSearch, capacity: Capacity) -> list[_Seed]:
    """The seeds whose own capacity is nearest to that of all."""
    at = capacity.index
    assert at is not None, "a capacity was found"
    edges = zip(search.seeds, capacity.edges, strict=True)
    seeds = [_Seed(seed, edge) for seed, edge in edges if edge is not None]
    assert seeds, "most seeds carry the capacity"
    return sorted(seeds, key=lambda seed: (abs(seed.edge - at), seed.seed))[:SEEDS_MAX]


def _lead(
    search: LoadSearch, seed: _Seed, changes: Changes
) -> Generator[Changes, Row, Boundary | None]:
    """The first seed's boundary with the change; None: its run does not notice it."""
    beyond = seed.edge + 1
    without = yield from search.fate(beyond, seed.seed)
    having = yield from search.fate(beyond, seed.seed, changes)
    if having.error is None and _said(having.row) == _said(without.row):
        return None
    return (yield from search.boundary(seed.seed, beyond, 1, changes))


def _said(row: Row) -> Row:
    return {name: value for name, value in row.items() if name not in ECHOED}


def _gain(
    search: LoadSearch, resource: Resource, found: Sequence[tuple[_Seed, Boundary]] | None
) -> Gain:
    if found is None:
        return Gain(resource=resource, share=0.0, least=0.0, most=0.0, seeds=1, is_untouched=True)
    error = next((each.error for _, each in found if each.error is not None), None)
    pairs = [(seed.edge, each.low) for seed, each in found if each.low is not None]
    if error is not None or not pairs:
        return Gain(resource=resource, share=None, why_not=error or "no load holds with it")
    shares = [search.load(now) / search.load(before) - 1 for before, now in pairs]
    return Gain(
        resource=resource, share=mean(shares), least=min(shares), most=max(shares),
        seeds=len(shares),
    )  # fmt: skip
