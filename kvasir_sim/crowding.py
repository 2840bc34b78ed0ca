"""What stages of one machine cost each other: they share its memory and its caches.

A hold takes `1 + (s - 1) * u` times as long as alone, where s is the measured slowdown beside
`neighbours` computing stages for as many rows, and u how many others compute during a hold of that
stage, on average over the last laps, over `neighbours` (1 at most). Whether two stages compute at
the same time follows from the laps themselves: in a drained ring they never do.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from kvasir_core.plan import Plan
from kvasir_scenario.profile import Crowd

STAMPS = 4
WEIGHT = 1 / 8  # Of the newest lap in the average.


class Crowding:
    """Told of laps as they return; makes holds longer."""

    def __init__(self, plan: Plan, crowd: Crowd) -> None:
        self._stages = plan.stages
        self._neighbours = crowd.neighbours
        self._sizes = [rows for rows, _, _ in crowd.rows]
        self._slowdowns = [beside / alone for _, alone, beside in crowd.rows]
        self._behind = max(plan.window, plan.window_max)  # Laps that may overlap one from behind.
        self._laps: deque[tuple[list[int], Sequence[float]]] = deque(maxlen=2 * self._behind + 1)
        is_alone = plan.packer == "drained" or plan.window_max == 1
        self._shares = [0.0 if is_alone else 1.0] * plan.stages

    def grown(self, holds: Sequence[float], rows: int) -> list[float]:
        """Holds alone in, holds beside the others out."""
        extra = self._slowdown(rows) - 1
        return [hold * (1 + extra * u) for hold, u in zip(holds, self._shares, strict=True)]

    def _slowdown(self, rows: int) -> float:
        """Linear between the measured sizes, flat beyond them."""
        sizes, slowdowns = self._sizes, self._slowdowns
        place = bisect_left(sizes, rows)
        if place == len(sizes):
            return slowdowns[-1]
        if place == 0 or sizes[place] == rows:
            return slowdowns[place]
        part = (rows - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return slowdowns[place - 1] + part * (slowdowns[place] - slowdowns[place - 1])

    def note(self, stamps: list[int], slower: Sequence[float]) -> None:
        """A lap has returned: four stamps per stage, and how much slowed each stage is.

        A stage that a fault slows waits for the rest of its hold; only its own part crowds others.
        """
        self._laps.append((stamps, slower))
        if len(self._laps) > self._behind:
            self._look_at(self._laps[-1 - self._behind][0])

    def _look_at(self, stamps: list[int]) -> None:
        for stage in range(self._stages):
            start, end = stamps[STAMPS * stage + 1 : STAMPS * stage + 3]
            if end <= start:
                continue
            together = 0.0
            for other, slower in self._laps:
                for place in range(self._stages):
                    at = STAMPS * place
                    common = min(end, other[at + 2]) - max(start, other[at + 1])
                    if place != stage and common > 0:
                        together += common / slower[place]
            share = min(1.0, together / (end - start) / self._neighbours)
            self._shares[stage] += WEIGHT * (share - self._shares[stage])

    def describe(self) -> str:
        """A sentence for the report."""
        shares = ", ".join(f"{share:.0%}" for share in self._shares)
        return (
            f"stages share a machine: beside {self._neighbours} that compute, a hold takes "
            f"{min(self._slowdowns):.2f} to {max(self._slowdowns):.2f} times as long; at the end "
            f"of the run others computed during {shares} of each stage's holds"
        )
