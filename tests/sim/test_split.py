"""The split of layers against every other split of small rings."""

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core.errors import PlanError
from kvasir_sim.split import StageCost, best_split, longest_ns


def every_split(stages: int, layers: int) -> Iterator[tuple[int, ...]]:
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        edges = (0, *cuts, layers)
        yield tuple(stop - start for start, stop in itertools.pairwise(edges))


def fits(costs: list[StageCost], counts: tuple[int, ...]) -> bool:
    return all(count <= cost.layers_max for cost, count in zip(costs, counts, strict=True))


stage_costs = st.builds(
    StageCost,
    st.integers(0, 50).map(float),
    st.integers(0, 20).map(float),
    st.integers(1, 12),
)


@given(st.lists(stage_costs, min_size=2, max_size=4), st.integers(2, 12))
def test_no_other_split_has_a_shorter_longest_hold(costs: list[StageCost], layers: int) -> None:
    others = [longest_ns(costs, s) for s in every_split(len(costs), layers) if fits(costs, s)]
    if not others:
        with pytest.raises(PlanError):
            best_split(costs, layers)
        return
    counts = best_split(costs, layers)
    assert sum(counts) == layers
    assert fits(costs, counts)
    assert longest_ns(costs, counts) == min(others)


def test_equal_stages_share_evenly_and_the_earlier_take_the_rest() -> None:
    assert best_split([StageCost(0, 1, 99)] * 4, 10) == (3, 3, 2, 2)


def test_a_tail_worth_eight_layers_holds_eight_less() -> None:
    """SmolLM2's output matrix: 30 layers on two alike machines split 19/11, not 15/15."""
    assert best_split([StageCost(0, 1, 99), StageCost(8, 1, 99)], 30) == (19, 11)


def test_a_stage_twice_as_slow_holds_half_as_many() -> None:
    assert best_split([StageCost(0, 2, 99), StageCost(0, 1, 99)], 30) == (10, 20)


def test_memory_bounds_a_fast_stage() -> None:
    assert best_split([StageCost(0, 1, 4), StageCost(0, 10, 99)], 12) == (4, 8)


@pytest.mark.parametrize(
    ("most", "layers", "what"),
    [
        ((9, 9, 9), 2, "3 stages cannot each hold one of 2 layers"),
        ((9, 0, 9), 5, "stage 1 has no memory for even one layer"),
        ((3, 4, 5), 13, r"hold 12 of 13 layers with their KV \(at most 3, 4, 5 per stage\)"),
    ],
)
def test_what_cannot_be_split_is_refused_with_both_numbers(
    most: tuple[int, ...], layers: int, what: str
) -> None:
    with pytest.raises(PlanError, match=what):
        best_split([StageCost(1, 1, value) for value in most], layers)
