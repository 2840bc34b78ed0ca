"""Whole numbers in text."""

import pytest

from kvasir_scenario.digits import whole_number


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("7", 7), ("007", 7), ("999", 999), ("1000", None), ("-1", None), ("+1", None)],
)
def test_plain_digits_within_bounds_are_a_number(text: str, number: int | None) -> None:
    assert whole_number(text, 0, 999) == number


@pytest.mark.parametrize(
    "text", ["", " 1", "1 ", "1_0", "1.0", "a", "\u0661", "\u00b2", "9" * 9999]
)
def test_anything_else_is_none_and_raises_nothing(text: str) -> None:
    assert whole_number(text, 0, 10**6) is None


def test_the_least_is_looked_at_too() -> None:
    assert whole_number("1", 2, 9) is None
    assert whole_number("2", 2, 9) == 2
