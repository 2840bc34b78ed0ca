"""The highest load that holds: a bisection for each seed, and a vote of the seeds.

Loads stand on a grid of equal ratios, index 0 being the scenario's own. Each seed's boundary is
found by doubling steps and halving the rest; the others begin where the first seed's roughly is,
and all of them are then sought side by side. The capacity is the highest load that most seeds
carry, and both it and the next load of the grid are tried with every seed, so that the answer does
not rest on one seed's luck.
"""

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kvasir_core.errors import ScenarioError
from kvasir_sim.capacity.driver import Driver, Row
from kvasir_sim.capacity.knob import Knob
from kvasir_sim.capacity.limits import Limit
from kvasir_sim.capacity.probe import Outcome, probe
from kvasir_sim.sweep.points import Changes

FACTOR_MAX = 1000.0  # The boundary is sought from a thousandth to the thousandfold.
FIRST_RATIO = 1.9  # Of the first step from the scenario's own load.
NEAR_RATIO = 1.04  # Of the first step from where another seed's boundary was.
CORRECTIONS_MAX = 16  # Steps of the vote from the median; each costs a run per seed.
LEAD_RUNS = 8  # What is usual, for the bar on the screen: of the first seed, alone,
SEED_RUNS = 5  # of each other seed,
VOTE_RUNS = 1  # and of each seed's vote, as half of its loads are known.

Fate = Generator[Changes, Row, Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """One seed's: the highest index found to hold, the lowest found not to, and why it does not.

    None: there is no such index.
    """

    low: int | None
    high: int | None = None
    failing: Outcome | None
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What a search found.

    Attributes:
        index: On the grid; None: no load holds.
        load, next_load: The capacity, and the next of the grid (None: sought no further).
        holding, holding_next: Seeds that carry each of the two.
        edges: Each seed's own boundary: the highest index that it carries, or None.
        seeds: The same as loads.
        breaks: What fails at the next load, and for how many seeds.
        at, beyond: Figures of a run at the capacity and at the next load.
    """

    index: int | None
    load: float | None
    next_load: float | None
    holding: int
    holding_next: int
    edges: tuple[int | None, ...]
    seeds: tuple[float | None, ...]
    breaks: dict[str, int]
    at: Row | None
    beyond: Row | None


class LoadSearch:
    """Searches on one scenario: a grid of loads, limits and seeds."""

    def __init__(
        self,
        driver: Driver,
        knob: Knob,
        limits: Sequence[Limit],
        seeds: Sequence[int],
        precision: float,
    ) -> None:
        self.driver, self.knob, self.limits, self.seeds = driver, knob, limits, seeds
        self.ratio = 1 + precision
        self._ends = self._steps(FACTOR_MAX)

    def _steps(self, ratio: float) -> int:
        """So many indexes make a ratio."""
        steps, reached = 0, 1.0
        while reached < ratio:
            steps, reached = steps + 1, reached * self.ratio
        return steps

    def load(self, index: int) -> float:
        return self.knob.at(self.ratio**index)

    def fate(self, index: int, seed: int, extra: Changes = ()) -> Generator[Changes, Row, Outcome]:
        """Whether one seed carries a load of the grid."""
        return self.fate_at(self.load(index), seed, extra)

    def fate_at(self, load: float, seed: int, extra: Changes = ()) -> Fate:
        """Whether one seed carries any load."""
        return probe(self.knob, self.limits, extra, load, seed)

    def boundary(
        self, seed: int, start: int, step: int, extra: Changes = (), within: int = 1
    ) -> Generator[Changes, Row, Boundary]:
        """Double steps from `start` until both sides are known, then halve to a gap of `within`."""
        low: int | None = None
        high: int | None = None
        failing: Outcome | None = None
        index = start
        while low is None or high is None:
            outcome = yield from self.fate(index, seed, extra)
            if outcome.error is not None:
                return Boundary(low=low, failing=outcome, error=outcome.error)
            if outcome.holds:
                low = index
            else:
                high, failing = index, outcome
            is_end = index >= self._ends if outcome.holds else index <= -self._ends
            if is_end:
                return Boundary(low=low, high=high, failing=failing)
            index = index + step if outcome.holds else index - step
            index = max(-self._ends, min(self._ends, index))
            step *= 2
        found = Boundary(low=low, high=high, failing=failing)
        return (yield from self._halved(found, seed, extra, within))

    def _halved(
        self, found: Boundary, seed: int, extra: Changes = (), within: int = 1
    ) -> Generator[Changes, Row, Boundary]:
        """A boundary whose two sides are at most `within` apart."""
        low, high, failing = found.low, found.high, found.failing
        if low is None or high is None:
            return found
        while high - low > within:
            middle = (low + high) // 2
            outcome = yield from self.fate(middle, seed, extra)
            if outcome.holds:
                low = middle
            else:
                high, failing = middle, outcome
        return Boundary(low=low, high=high, failing=failing)

    def capacity(self, runs_later: int = 0) -> Capacity:
        """The highest load that most seeds carry.

        Args:
            runs_later: That will be asked for afterwards, as far as one can know.

        Raises:
            ScenarioError: The scenario cannot be run.
        """
        first, *others = self.seeds
        near = self._steps(NEAR_RATIO)
        votes = VOTE_RUNS * len(self.seeds)
        fine = SEED_RUNS * len(others)
        self.driver.expect("seed 1: roughly how much", LEAD_RUNS, fine + votes + runs_later)
        far = self._steps(FIRST_RATIO)
        (lead,) = self.driver.drive([self.boundary(first, 0, far, within=near)])
        if lead.error is not None:
            raise ScenarioError(lead.error)
        start = -self._ends if lead.low is None else lead.low
        around = f"around {self.load(start):,.3g} {self.knob.unit}"
        self.driver.expect(f"each seed {around}", fine + 1, votes + runs_later)
        found = self.driver.drive(
            [self._halved(lead, first), *(self.boundary(seed, start, near) for seed in others)]
        )
        for boundary in found:
            if boundary.error is not None:
                raise ScenarioError(boundary.error)
        lows = sorted(
            (-self._ends - 1 if each.low is None else each.low for each in found), reverse=True
        )
        self.driver.expect(f"all seeds {around}", votes, runs_later)
        return self._voted(lows[len(lows) // 2], tuple(each.low for each in found))

    def votes(self, index: int, extra: Changes = ()) -> list[Outcome]:
        """Every seed's fate at a load."""
        return self.driver.drive([self.fate(index, seed, extra) for seed in self.seeds])

    def is_carried(self, outcomes: Sequence[Outcome]) -> bool:
        """Whether most seeds hold."""
        return 2 * sum(outcome.holds for outcome in outcomes) > len(outcomes)

    def _voted(self, index: int, edges: tuple[int | None, ...]) -> Capacity:
        """From the seeds' median to the place where the vote changes, a step or none away."""
        at = self.votes(index) if index >= -self._ends else []
        for _ in range(CORRECTIONS_MAX):
            if not at or self.is_carried(at):
                break
            index -= 1
            at = self.votes(index) if index >= -self._ends else []
        beyond = self.votes(index + 1) if index < self._ends else []
        for _ in range(CORRECTIONS_MAX):
            if not beyond or not self.is_carried(beyond):
                break
            index, at = index + 1, beyond
            beyond = self.votes(index + 1) if index < self._ends else []
        reasons = Counter(reason for outcome in beyond for reason in outcome.why)
        return Capacity(
            index=index if at else None,
            load=self.load(index) if at else None,
            next_load=self.load(index + 1) if beyond else None,
            holding=sum(outcome.holds for outcome in at),
            holding_next=sum(outcome.holds for outcome in beyond),
            edges=edges,
            seeds=tuple(None if edge is None else self.load(edge) for edge in edges),
            breaks=dict(reasons.most_common()),
            at=next((outcome.row for outcome in at if outcome.holds), None),
            beyond=next((outcome.row for outcome in beyond if not outcome.holds), None),
        )
