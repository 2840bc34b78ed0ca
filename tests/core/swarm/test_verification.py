"""Which answers are checked, and what is right: a NaN must fail every rule."""

import random
from math import inf, nan

import pytest

from kvasir_core.swarm import TOLERANCES, SwarmPolicy
from kvasir_core.swarm.verification import check_probability, is_checked, is_right, is_sound

POLICY = SwarmPolicy()


@pytest.mark.parametrize("value", [nan, inf, -inf, None])
def test_what_is_not_finite_is_neither_sound_nor_right(value: float | None) -> None:
    assert not is_sound(is_shaped=True, norm_ratio=value, policy=POLICY)
    assert not is_right(value, POLICY)


def test_soundness_is_shape_and_norm_within_its_limit() -> None:
    assert is_sound(is_shaped=True, norm_ratio=1.0, policy=POLICY)
    assert is_sound(is_shaped=True, norm_ratio=POLICY.norm_ratio_max, policy=POLICY)
    assert not is_sound(is_shaped=True, norm_ratio=POLICY.norm_ratio_max * 1.01, policy=POLICY)
    assert not is_sound(is_shaped=False, norm_ratio=1.0, policy=POLICY)


@pytest.mark.parametrize("dtype", list(TOLERANCES))
def test_a_scaling_by_one_point_zero_two_is_wrong_in_every_number_format(dtype: str) -> None:
    policy = SwarmPolicy(tolerance=TOLERANCES[dtype])
    assert not is_right(0.02, policy)
    assert is_right(policy.tolerance, policy)
    assert is_right(0.0, policy)


def test_the_first_twenty_are_checked_and_then_one_in_n_but_never_less_than_two_percent() -> None:
    chance = random.Random(1)
    assert all(is_checked(n, chance, POLICY) for n in range(1, 21))
    assert check_probability(21, POLICY) == 1 / 21
    assert check_probability(50, POLICY) == 0.02
    assert check_probability(10**9, POLICY) == 0.02


@pytest.mark.parametrize("seed", range(5))
def test_the_share_of_checks_is_the_probability(seed: int) -> None:
    chance = random.Random(seed)
    checked = sum(is_checked(1000, chance, POLICY) for _ in range(20_000))
    assert 300 < checked < 500  # 400 expected, five standard deviations.
