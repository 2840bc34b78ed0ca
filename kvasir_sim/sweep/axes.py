"""The axes of a sweep as the command line has them: `KEY=1,2,4`, `KEY=2:12:2`, `KEY=0.5:8`.

A list is read as YAML, so that `ring.window=1,2,auto` and `ring.stages=[...],[...]` work. A part
of the form start:stop:step stands for its numbers, stop included; they are decimals, so that
0.1:0.3:0.1 has three.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from math import floor
from typing import Any

from kvasir_core.errors import ScenarioError
from kvasir_scenario.complaints import found
from kvasir_scenario.named_values import name_and_value, place_of
from kvasir_scenario.yaml_tree import read_tree

POINTS_MAX = 100_000  # A day of two cores at 1.7 s each; the table is then some 40 MB.
AXES_MAX = 16  # More are read by nobody; Sobol would allow 21,201.
FORBIDDEN = {
    "name": "it only names things",
    "what_if": "a sweep runs no variants",
    "run.seed": "give --seeds",
}


@dataclass(frozen=True, slots=True)
class Axis:
    """A key and the values it takes, in the order given."""

    key: str
    values: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """A key and the interval that samples are drawn from; whole numbers where both ends are."""

    key: str
    low: Decimal
    high: Decimal
    is_whole: bool

    def at(self, share: float) -> float:
        """The value at a share in [0, 1) of the way."""
        if self.is_whole:
            steps = int(self.high - self.low) + 1
            return int(self.low) + min(floor(share * steps), steps - 1)
        return float(self.low) + share * float(self.high - self.low)


def read_axes(grids: Sequence[str], ranges: Sequence[str]) -> tuple[list[Axis], list[Range]]:
    """What `--grid` and `--range` say.

    Raises:
        ScenarioError: Not of the form, no values, too many, or a key twice.
    """
    axes = [_axis(text) for text in grids]
    spans = [_range(text) for text in ranges]
    keys = [axis.key for axis in axes] + [span.key for span in spans]
    for place, key in enumerate(keys):
        if key in keys[:place]:
            raise ScenarioError(f"{key}: is an axis twice; put all its values into one --grid")
    if len(keys) > AXES_MAX:
        raise ScenarioError(f"found {len(keys)} axes; at most {AXES_MAX}")
    return axes, spans


def _split(text: str, option: str, form: str, example: str) -> tuple[str, str, str]:
    """Key, value, and where it stood."""
    key, values = name_and_value(option, text, form, example)
    place = place_of(option, text)
    for forbidden, why in FORBIDDEN.items():
        if key == forbidden or key.startswith(f"{forbidden}."):
            raise ScenarioError(f"{place}: {forbidden} cannot be an axis; {why}")
    return key, values, place


def _axis(text: str) -> Axis:
    key, listed, place = _split(text, "--grid", "KEY=v1,v2 or KEY=start:stop:step", "1,2")
    items = read_tree(f"[{listed}]", place, is_setting=True).data
    if not isinstance(items, list) or not items:
        raise ScenarioError(f"{place}: found no value; give at least one")
    values: list[Any] = []
    for item in items:
        is_span = isinstance(item, str) and item.count(":") in (1, 2) and _is_numeric(item)
        values += _steps(item, place) if is_span else [item]
        if len(values) > POINTS_MAX:
            raise _too_many(place, len(values))
    for position, value in enumerate(values):
        if any(value == other and type(value) is type(other) for other in values[:position]):
            raise ScenarioError(f"{place}: {found(value)} stands there twice")
    return Axis(key, tuple(values))


def _is_numeric(item: str) -> bool:
    """It was meant as a range: its first or last part is a number, or a part is missing."""
    parts = item.split(":")
    if len(parts) == 2:
        return all(_number(part) is not None for part in parts)
    return any(_number(part) is not None for part in parts)


def _number(text: str) -> Decimal | None:
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def _numbers(parts: Sequence[str], place: str, form: str) -> list[Decimal]:
    numbers = []
    for part in parts:
        number = _number(part)
        if number is None:
            raise ScenarioError(f"{place}: found {part!r} in {form}; it must be a finite number")
        numbers.append(number)
    return numbers


def _steps(item: str, place: str) -> list[int | float]:
    parts = item.split(":")
    if len(parts) != 3:
        raise ScenarioError(f"{place}: found {item}; a range is start:stop:step")
    start, stop, step = _numbers(parts, place, "start:stop:step")
    if not step:
        raise ScenarioError(f"{place}: the step of {item} is 0; it must lead from start to stop")
    count = floor((stop - start) / step) + 1
    if count < 1:
        raise ScenarioError(
            f"{place}: {item} is empty: steps of {step} do not lead from {start} to {stop}"
        )
    if count > POINTS_MAX:
        raise _too_many(place, count)
    is_whole = all(_is_whole(part) for part in parts)
    as_number: Callable[[Decimal], int | float] = int if is_whole else float
    return [as_number(start + step * index) for index in range(count)]


def _is_whole(text: str) -> bool:
    return text.strip().lstrip("+-").isdecimal()


def _range(text: str) -> Range:
    key, given, place = _split(text, "--range", "KEY=lo:hi", "1:8")
    parts = given.split(":")
    if len(parts) != 2:
        raise ScenarioError(f"{place}: found {given!r}; it must be lo:hi, two numbers")
    low, high = _numbers(parts, place, "lo:hi")
    if low >= high:
        raise ScenarioError(f"{place}: is empty: {low} is not below {high}")
    return Range(key, low, high, all(_is_whole(part) for part in parts))


def _too_many(place: str, count: int) -> ScenarioError:
    return ScenarioError(f"{place}: {count} values; a sweep has at most {POINTS_MAX} points")
