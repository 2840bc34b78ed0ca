"""Measured tables: a function of one size or of two, linear between its points.

Outside the measured range the last slope goes on upwards, and the first value downwards.
"""

from bisect import bisect_right
from collections.abc import Sequence

from kvasir_scenario.profile import Line, Plane


class Axis:
    """Sorted sizes; finds the cell of a size and how far into it."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)

    def place(self, size: float) -> tuple[int, float, bool]:
        """Cell index, fraction (above 1 beyond the last point), and whether it is outside."""
        sizes = self.sizes
        if size <= sizes[0]:
            return 0, 0.0, size < sizes[0]
        if len(sizes) == 1:
            return 0, 0.0, True
        cell = min(bisect_right(sizes, size), len(sizes) - 1) - 1
        low = sizes[cell]
        return cell, (size - low) / (sizes[cell + 1] - low), size > sizes[-1]


class LineTable:
    """A measured function of one size."""

    def __init__(self, points: Sequence[Line]) -> None:
        self.axis = Axis([point[0] for point in points])
        self._ns = [float(point[1]) for point in points]
        self._known: dict[int, tuple[float, bool]] = {}

    def at(self, size: int) -> tuple[float, bool]:
        """Nanoseconds, and whether the size is outside what was measured."""
        known = self._known.get(size)
        if known is None:
            cell, part, is_outside = self.axis.place(size)
            ns = self._ns[cell]
            if part:
                ns = max(ns + part * (self._ns[cell + 1] - ns), 0.0)
            known = self._known[size] = ns, is_outside
        return known


class PlaneTable:
    """A measured function of two sizes, on a full grid."""

    def __init__(self, points: Sequence[Plane]) -> None:
        self.first = Axis(sorted({point[0] for point in points}))
        self.second = Axis(sorted({point[1] for point in points}))
        known = {(point[0], point[1]): point for point in points}
        grid = [[known[one, two] for two in self.second.sizes] for one in self.first.sizes]
        self._ns = [[float(point[2]) for point in row] for row in grid]
        self._spread = [[point[3] / max(point[2], 1) for point in row] for row in grid]

    def at(self, one: float, two: float) -> tuple[float, float, bool]:
        """Nanoseconds, relative spread of the nearest lower point, and whether outside."""
        i, part_one, is_outside_one = self.first.place(one)
        j, part_two, is_outside_two = self.second.place(two)
        low = self._along(i, j, part_two)
        if part_one:
            low += part_one * (self._along(i + 1, j, part_two) - low)
        return max(low, 0.0), self._spread[i][j], is_outside_one or is_outside_two

    def _along(self, i: int, j: int, part: float) -> float:
        row = self._ns[i]
        return row[j] if not part else row[j] + part * (row[j + 1] - row[j])
