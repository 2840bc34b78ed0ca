"""Columns of text to columns of numbers: fast where all is well, exact about what is not.

Whole chunks go through C loops; only when one fails are its values tried one by one, to name the
line, the column and the value.

Times keep what the file says for as long as they can. Whole numbers stay integers, so offsets of
microsecond epochs are exact. Decimal numbers stay doubles, because one rounding, from
`seconds * scale * 1e9` to the nearest nanosecond, is what other simulators' arrival times need to
be met exactly; where a double could not resolve a nanosecond they become exact integers instead.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from kvasir_core.errors import ScenarioError
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_scenario.trace_files import refuse

Ints = NDArray[np.int64]
Times = NDArray[np.int64] | NDArray[np.float64]

TOKENS_MAX = 1 << 31  # No context is that long; a larger number is a wrong column.
EXACT_NS_MAX = 1 << 53  # Above it a double no longer holds every nanosecond.
SPAN_NS_MAX = 1 << 61  # 73 years; sums of two times still fit an int64.
UNITS_NS = {"s": NANOS_PER_SECOND, "ms": 1_000_000, "us": 1_000, "ns": 1}

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?\s*", re.ASCII)
_STAMP = re.compile(
    r"\s*(\d{4}-\d\d-\d\d)[ T](\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:?\d\d)?\s*", re.ASCII
)
YEARS = ("1900", "2200")  # Nanoseconds since 1970 fit 64 bits with room to spare.
_PLAIN_STAMP = set("0123456789-:. ")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Place(NamedTuple):
    """Where a chunk of one column comes from; `line(i)` is the line of its i-th value."""

    path: Path
    column: str
    line: Callable[[int], int]

    def refuse(self, index: int, value: object, right: str) -> NoReturn:
        refuse(self.path, right, line=self.line(index), column=self.column, value=value)


def tokens(values: Sequence[str], place: Place, *, least: int) -> Ints:
    """A chunk of token counts, each a whole number from `least` to `TOKENS_MAX`.

    Raises:
        ScenarioError: Naming the first value that is not.
    """
    text = "".join(values)
    if text.isascii() and "_" not in text:  # int() takes other scripts' digits and 1_000.
        try:
            column = np.array(list(map(int, values)), dtype=np.int64)
        except (ValueError, OverflowError):
            pass
        else:
            if not len(column) or (column.min() >= least and column.max() <= TOKENS_MAX):
                return column
    right = f"a token count is a whole number from {least} to {TOKENS_MAX}"
    exact = [_whole(value) for value in values]  # Takes 374.0 too, as spreadsheets write it.
    for index, number in enumerate(exact):
        if number is None or not least <= number <= TOKENS_MAX:
            place.refuse(index, values[index], right)
    return np.array(exact, dtype=np.int64)


def _whole(text: str) -> int | None:
    number = Decimal(text.strip()) if len(text) < 64 and _NUMBER.fullmatch(text) else None
    return int(number) if number is not None and number == number.to_integral_value() else None


def numbers(values: Sequence[str], place: Place, unit_ns: int) -> tuple[Times, int]:
    """A chunk of times, and the nanoseconds of one of them (1 where doubles cannot resolve it).

    Raises:
        ScenarioError: Naming the first value that is not a finite number of at least 0.
    """
    text = "".join(values)
    if text.isascii() and "_" not in text:
        try:
            whole = np.array(list(map(int, values)), dtype=np.int64)
        except (ValueError, OverflowError):
            pass
        else:
            if (whole >= 0).all():
                return whole, unit_ns
        try:
            column = np.array(list(map(float, values)), dtype=np.float64)
        except ValueError:
            pass
        else:
            if ((column >= 0) & (column * unit_ns < EXACT_NS_MAX)).all():  # False for NaN, inf.
                return column, unit_ns
    exact = []
    for index, value in enumerate(values):
        if len(value) > 64 or not _NUMBER.fullmatch(value) or Decimal(value.strip()) < 0:
            place.refuse(index, value, "an arrival time is a finite number of at least 0")
        nanos = round(Decimal(value.strip()) * unit_ns)
        if nanos > 2 * SPAN_NS_MAX:
            place.refuse(index, value, "does not fit the clock: is workload.time_unit right?")
        exact.append(nanos)
    return np.array(exact, dtype=np.int64), 1


def timestamps(values: Sequence[str], place: Place) -> Ints:
    """A chunk of UTC date-times with up to 9 fractional digits, as nanoseconds since 1970, exact.

    Raises:
        ScenarioError: Naming the first value that is not one.
    """
    utc = all(value.endswith("+00:00") for value in values)
    plain = [value[:-6] for value in values] if utc else values
    if _are_plain_stamps(plain):
        try:
            stamps = np.array(plain, dtype="datetime64[ns]")
        except ValueError:
            pass
        else:
            if not np.isnat(stamps).any():
                return stamps.astype(np.int64)
    return np.array([_stamp(v, i, place) for i, v in enumerate(values)], dtype=np.int64)


def is_timestamp(text: str) -> bool:
    """Whether the text is a date-time as `timestamps` takes it (its parts may still be wrong)."""
    return _STAMP.fullmatch(text) is not None


def _are_plain_stamps(values: Sequence[str]) -> bool:
    """Whether numpy reads these values as we would; it is laxer about parts, zones and years."""
    text, n = "".join(values), len(values)
    return (
        set(text) <= _PLAIN_STAMP
        and (text.count("-"), text.count(":"), text.count(" ")) == (2 * n, 2 * n, n)
        and all(19 <= len(value) <= 29 and YEARS[0] <= value < YEARS[1] for value in values)
    )


def _stamp(text: str, index: int, place: Place) -> int:
    right = (
        "a time is `YYYY-MM-DD hh:mm:ss[.fffffffff]`, UTC unless it has an offset, "
        f"in the years {YEARS[0]} to {YEARS[1]}"
    )
    match = _STAMP.fullmatch(text)
    if not match or not YEARS[0] <= text.strip() < YEARS[1]:
        place.refuse(index, text, right)
    day, clock, fraction, offset = match.groups()
    try:
        whole = datetime.fromisoformat(f"{day}T{clock}{(offset or 'Z')}")
    except ValueError:
        place.refuse(index, text, right)
    seconds = (whole - _EPOCH) // timedelta(seconds=1)
    return seconds * NANOS_PER_SECOND + int((fraction or "").ljust(9, "0"))


@dataclass(frozen=True, slots=True)
class TimeColumn:
    """Arrival offsets from the earliest arrival, in file order, in units of `unit_ns`."""

    offsets: Times
    unit_ns: int

    @staticmethod
    def of(chunks: Sequence[tuple[Times, int]], path: Path, column: str) -> "TimeColumn":
        """Join a file's chunks and move the clock's origin to the earliest arrival.

        Raises:
            ScenarioError: The file spans more than `SPAN_NS_MAX`.
        """
        unit_ns = min(unit for _, unit in chunks)
        low = min(values.min().item() * unit for values, unit in chunks)
        high = max(values.max().item() * unit for values, unit in chunks)
        if high - low > SPAN_NS_MAX:
            raise ScenarioError(
                f"{path}: column {column!r}: times from {low:.6g} to {high:.6g} ns; a trace spans "
                f"at most {SPAN_NS_MAX:.3g} ns: is workload.time_unit right?"
            )
        times = np.concatenate(
            [values if unit == unit_ns else _to_nanos(values, unit) for values, unit in chunks]
        )
        return TimeColumn(times - times.min(), unit_ns)

    @property
    def span_s(self) -> float:
        return float(self.offsets.max()) * self.unit_ns / NANOS_PER_SECOND

    def arrival_ns(self, scale: float = 1, start_s: float = 0) -> Ints:
        """Offsets from `start_s` (trace time) times `scale`, each rounded once to nanoseconds.

        The caller sees to it that the scaled span is at most `SPAN_NS_MAX`.
        """
        origin_ns = round(start_s * NANOS_PER_SECOND)
        if self.offsets.dtype == np.int64 and scale == 1:
            return self.offsets.astype(np.int64) * self.unit_ns - origin_ns
        shifted = self.offsets - origin_ns / self.unit_ns if origin_ns else self.offsets
        return np.rint(shifted * scale * self.unit_ns).astype(np.int64)

    def within(self, start_s: float, stop_s: float | None) -> NDArray[np.bool_]:
        """Which rows arrive in `[start_s, stop_s)` of the trace's own time."""
        nanos = self.arrival_ns()
        inside = nanos >= round(start_s * NANOS_PER_SECOND)
        if stop_s is not None:
            inside &= nanos < round(stop_s * NANOS_PER_SECOND)
        return inside


def _to_nanos(values: Times, unit_ns: int) -> Ints:
    if values.dtype == np.int64:
        return (
            values.astype(np.int64) * unit_ns
        )  # Fits: one exact time is below 2**62, the span below 2**61.
    return np.rint(values * unit_ns).astype(np.int64)
