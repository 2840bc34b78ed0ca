"""Seconds to nanoseconds, rounded once and to the nearest."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import NANOS_PER_SECOND, nanos


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0, 0), (1, 10**9), (0.002, 2_000_000), (0.5e-9, 0), (1.5e-9, 2), (2.5e-9, 2), (1e-10, 0)],
)
def test_to_the_nearest_ties_to_even(seconds: float, expected: int) -> None:
    assert nanos(seconds) == expected
    assert type(nanos(seconds)) is int


@given(st.floats(0, 1e7))
def test_never_off_by_more_than_half_and_the_rounding_of_a_double(seconds: float) -> None:
    exact = Fraction(seconds) * NANOS_PER_SECOND
    assert abs(nanos(seconds) - exact) <= Fraction(1, 2) + exact / 2**52
