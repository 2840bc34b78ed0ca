"""Layers to stages."""

from itertools import pairwise, product

import pytest

from kvasir_core.errors import PlanError
from kvasir_core.plan import split_evenly
from kvasir_rt.split import parse_layers, ranges_of, split_by_cost


def sizes(ranges: tuple[tuple[int, int], ...]) -> list[int]:
    return [stop - start for start, stop in ranges]


@pytest.mark.parametrize(("layers", "stages"), [(10, 3), (61, 8), (8, 2), (5, 5)])
def test_without_anything_beside_the_layers_the_split_is_the_even_one(
    layers: int, stages: int
) -> None:
    assert split_by_cost(layers, stages) == split_evenly(layers, stages)


def test_the_output_matrix_of_smollm2_takes_four_layers_from_the_tail() -> None:
    assert sizes(split_by_cost(30, 2, tail_layers=4.0)) == [17, 13]


def test_no_other_split_has_a_faster_slowest_stage() -> None:
    for layers, head, tail in product(range(3, 9), (0.0, 0.4, 2.5), (0.0, 1.3, 20.0)):
        split = split_by_cost(layers, 3, head_layers=head, tail_layers=tail)
        assert split[0][0] == 0
        assert split[-1][1] == layers
        assert all(left[1] == right[0] for left, right in pairwise(split))
        chosen = sizes(split)
        assert min(chosen) >= 1
        slowest = [
            max(a + head, b, c + tail)
            for a, b in product(range(1, layers), repeat=2)
            if (c := layers - a - b) >= 1
        ]
        assert max(chosen[0] + head, chosen[1], chosen[2] + tail) == min(slowest)


def test_layers_can_be_given() -> None:
    assert parse_layers("18,12", 30) == ((0, 18), (18, 30))
    assert ranges_of([5, 3, 2]) == ((0, 5), (5, 8), (8, 10))


@pytest.mark.parametrize(
    ("text", "words"),
    [("4,4,4", ("12", "10")), ("10", ("2",)), ("a,b", ("a,b",)), ("5,-5,10", ("-5",)), ("", ())],
)
def test_layers_that_are_not_the_models_are_refused_with_both_numbers(
    text: str, words: tuple[str, ...]
) -> None:
    with pytest.raises(PlanError) as refusal:
        parse_layers(text, 10)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(("layers", "stages"), [(2, 3), (10, 1), (10, 0)])
def test_stages_that_do_not_fit_are_refused(layers: int, stages: int) -> None:
    with pytest.raises(PlanError, match=str(stages)):
        split_by_cost(layers, stages)
