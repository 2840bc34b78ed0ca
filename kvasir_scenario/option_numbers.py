"""Numbers on the command line: whole ones and others, always with a least and a most.

The library's own ranges let NaN through (it is below no bound) and, without a most, infinity and
numbers of a thousand digits; whatever reads them then blames a key that the user never wrote. These
say which option it is, what was found, and what is right.
"""

import math
from typing import Any

import click

SEED_MAX = 2**63 - 1
TOKENS_MAX = 2**31 - 1
SECONDS_MAX = 1e6  # Eleven days: nothing on a command line waits longer.
THREADS_MAX = 1024  # Of one process.
SHOWN_CHARACTERS = 40
CORES_MAX = 4095  # Number of a processor core.


class Whole(click.IntRange):
    """A whole number from `least` to `most`."""

    def __init__(self, least: int, most: int) -> None:
        super().__init__(least, most)
        self.wanted = f"a whole number from {least:,} to {most:,}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Raises: click.BadParameter: It is none, or out of range."""
        try:
            number = int(value)
        except (ValueError, OverflowError):  # Too many digits are no whole number either.
            number = None
        if number is None or not (self.min or 0) <= number <= (self.max or 0):
            self.fail(f"found {_shown(value)}; it must be {self.wanted}", param, ctx)
        return number


class Number(click.FloatRange):
    """A finite number from `least` to `most`; `is_above`: `least` itself is too little."""

    def __init__(self, least: float, most: float, *, is_above: bool = False) -> None:
        super().__init__(least, most, min_open=is_above)
        first = f"above {least:,.15g}, at most" if is_above else f"from {least:,.15g} to"
        self.wanted = f"a number {first} {most:,.15g}"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Raises: click.BadParameter: It is none, or out of range."""
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        least = self.min or 0.0
        is_enough = number > least if self.min_open else number >= least
        if not is_enough or not number <= (self.max or 0.0):
            self.fail(f"found {_shown(value)}; it must be {self.wanted}", param, ctx)
        return number


def _shown(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}..."
