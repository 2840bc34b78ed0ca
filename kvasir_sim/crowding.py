"""What makes a hold longer than the same work measured alone and without a pause.

Stages of one machine share its memory and its caches.

A hold takes `1 + (s - 1) * u` times as long as alone, where s is the measured slowdown beside
`neighbours` computing stages for as many rows, and u how many others compute during a hold of that
stage, on average over the last laps, over `neighbours` (1 at most). Whether two stages compute at
the same time follows from the laps themselves: in a drained ring they never do.

A core that rested is slower at first (its clock, its caches): a hold takes `1 + (s - 1) * u` times
as long, where s is the measured slowdown after a rest, and u how long the stage rested before its
holds, on average over the last laps, over the rest that was measured (1 at most).
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from kvasir_core.plan import Plan
from kvasir_scenario.profile import Crowd, Rest

STAMPS = 4
WEIGHT = 1 / 8  # Of the newest lap in the average.


class Slowdowns:
    """By rows: linear between the measured sizes, flat beyond them.

    Args:
        rows: Ascending: so many rows, nanoseconds as usual, and when slowed.
    """

    def __init__(self, rows: Sequence[tuple[int, int, int]]) -> None:
        self._sizes = [size for size, _, _ in rows]
        self._times = [slowed / usual for _, usual, slowed in rows]

    def at(self, rows: int) -> float:
        """Times as long."""
        sizes, times = self._sizes, self._times
        place = bisect_left(sizes, rows)
        if place == len(sizes):
            return times[-1]
        if place == 0 or sizes[place] == rows:
            return times[place]
        part = (rows - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return times[place - 1] + part * (times[place] - times[place - 1])

    def __str__(self) -> str:
        return f"{min(self._times):.2f} to {max(self._times):.2f} times"


class Crowding:
    """Told of laps as they return; makes holds longer."""

    def __init__(self, plan: Plan, crowd: Crowd) -> None:
        self._stages = plan.stages
        self._neighbours = crowd.neighbours
        self._slowdowns = Slowdowns(crowd.rows)
        self._behind = max(plan.window, plan.window_max)  # Laps that may overlap one from behind.
        self._laps: deque[tuple[list[int], Sequence[float]]] = deque(maxlen=2 * self._behind + 1)
        self._shares = [0.0 if is_drained(plan) else 1.0] * plan.stages

    def grown(self, holds: Sequence[float], rows: int) -> list[float]:
        """Holds alone in, holds beside the others out."""
        return grown(holds, self._slowdowns.at(rows), self._shares)

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
            f"{self._slowdowns} as long; at the end of the run others computed during {shares} of "
            "each stage's holds"
        )


class Resting:
    """Told of laps as they return; makes the holds of stages that rest longer."""

    def __init__(self, plan: Plan, rest: Rest) -> None:
        self._rest_ns = rest.ns
        self._slowdowns = Slowdowns(rest.rows)
        self._sent: list[int] | None = None  # Per stage, when it last became free.
        self._shares = [1.0 if is_drained(plan) else 0.0] * plan.stages

    def grown(self, holds: Sequence[float], rows: int) -> list[float]:
        """Holds without a rest in, holds as they will be out."""
        return grown(holds, self._slowdowns.at(rows), self._shares)

    def note(self, stamps: list[int]) -> None:
        """A lap has returned: four stamps per stage. Laps return in order."""
        if self._sent is not None:
            for stage, free_at in enumerate(self._sent):
                rested = max(0, stamps[STAMPS * stage + 1] - free_at)
                share = min(1.0, rested / self._rest_ns)
                self._shares[stage] += WEIGHT * (share - self._shares[stage])
        self._sent = stamps[STAMPS - 1 :: STAMPS]

    def describe(self) -> str:
        """A sentence for the report."""
        shares = ", ".join(f"{share:.0%}" for share in self._shares)
        return (
            f"a stage that rested for {self._rest_ns / 1e6:g} ms holds {self._slowdowns} as long; "
            f"at the end of the run that applied to {shares} of each stage's holds"
        )


def is_drained(plan: Plan) -> bool:
    """Whether one micro-batch at a time is in the ring, so that stages take turns and rest."""
    return plan.packer == "drained" or plan.window_max == 1


def grown(holds: Sequence[float], slowdown: float, shares: Sequence[float]) -> list[float]:
    """Each stage's hold, slowed for its share of the time."""
    return [hold * (1 + (slowdown - 1) * share) for hold, share in zip(holds, shares, strict=True)]
