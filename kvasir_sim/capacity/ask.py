"""`find_capacity` and `find_cheapest`: the questions of `kvasir-sim capacity`, from Python."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvasir_core.errors import ScenarioError
from kvasir_sim.capacity import (
    PRECISION,
    PRECISION_LEAST,
    PRECISION_MOST,
    SEEDS,
    SEEDS_MAX,
    STAGES,
)
from kvasir_sim.capacity.driver import Driver, Progress
from kvasir_sim.capacity.study import Study
from kvasir_sim.sweep.points import Source
from kvasir_sim.sweep.pool import LocalPool

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class CapacityResult:
    """What a scenario carries.

    Attributes:
        document: All of it, as `kvasir-sim capacity --json` prints it.
    """

    document: dict[str, Any]

    @property
    def load(self) -> float | None:
        """The highest load that most seeds carry, in `unit`; None: no load holds."""
        load: float | None = self.document["capacity"]
        return load

    @property
    def next_load(self) -> float | None:
        """The next load that was tried, which does not hold; None: nothing that was tried broke."""
        load: float | None = self.document["next_load"]
        return load

    @property
    def unit(self) -> str:
        """`requests/s`, `requests/s at the peak`, or `users`."""
        return str(self.document["unit"])

    @property
    def breaks(self) -> dict[str, int]:
        """What fails at the next load, and for how many seeds."""
        return dict(self.document["breaks"])

    @property
    def binding(self) -> str | None:
        """The limit that ends most micro-batches there."""
        binding: str | None = self.document["binding"]
        return binding

    @property
    def gains(self) -> "pd.DataFrame":
        """A row per resource, best first: what one more of it brings; unknown values are NaN."""
        import pandas as pd

        return pd.DataFrame(self.document["gains"])


@dataclass(frozen=True, slots=True)
class CheapestResult:
    """The cheapest ring, or the fewest workers, that carry a load.

    Attributes:
        document: All of it, as `kvasir-sim capacity --rate R --json` prints it.
    """

    document: dict[str, Any]

    @property
    def best(self) -> dict[str, Any] | None:
        """Stages, devices and US dollars per hour, or worker and count; None: nothing does."""
        best: dict[str, Any] | None = self.document["best"]
        return best


def find_capacity(
    scenario: Path | str,
    slo: Mapping[str, float] | None = None,
    *,
    overrides: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    seeds: int = SEEDS,
    precision: float = PRECISION,
    gains: bool = True,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> CapacityResult:
    """The highest load that a scenario carries within limits.

    Args:
        scenario: The path of its file.
        slo: Limits in seconds by name: `{"ttft_p99": 1.0}`.
        overrides: `key.path=value`, as `--set` has it.
        prices: US dollars per hour of devices and workers by name; before the scenario's own.
        seeds: A load holds if most of so many carry it.
        precision: Ratio of neighbouring loads, less 1.
        gains: Find out what one more of each resource brings.
        jobs: Worker processes; None: one per core.
        progress: Called with runs so far, how many there will probably be, and what they are for.

    Raises:
        ScenarioError: An input is wrong.
    """
    study = _study(scenario, slo, overrides, prices, seeds, precision)
    with LocalPool(study.source, jobs or os.cpu_count() or 1) as pool:
        return CapacityResult(study.capacity(Driver(pool, progress), has_gains=gains))


def find_cheapest(
    scenario: Path | str,
    rate: float,
    slo: Mapping[str, float] | None = None,
    *,
    overrides: Sequence[str] = (),
    prices: Mapping[str, float] | None = None,
    seeds: int = SEEDS,
    precision: float = PRECISION,
    stages_max: int = STAGES,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> CheapestResult:
    """The cheapest ring, or the fewest workers, that carry a load of `rate` within limits.

    Args:
        scenario: The path of its file.
        rate: The load, in the unit of the scenario's own.
        slo: Limits in seconds by name: `{"ttft_p99": 1.0}`.
        overrides: `key.path=value`, as `--set` has it.
        prices: US dollars per hour of devices and workers by name; before the scenario's own.
        seeds: A load holds if most of so many carry it.
        precision: Ratio of neighbouring loads, less 1.
        stages_max: The longest ring to consider.
        jobs: Worker processes; None: one per core.
        progress: Called with runs so far, how many there will probably be, and what they are for.

    Raises:
        ScenarioError: An input is wrong.
    """
    study = _study(scenario, slo, overrides, prices, seeds, precision)
    with LocalPool(study.source, jobs or os.cpu_count() or 1) as pool:
        return CheapestResult(study.cheapest(Driver(pool, progress), rate, stages_max))


def _study(
    scenario: Path | str,
    slo: Mapping[str, float] | None,
    overrides: Sequence[str],
    prices: Mapping[str, float] | None,
    seeds: int,
    precision: float,
) -> Study:
    if not 1 <= seeds <= SEEDS_MAX:
        raise ScenarioError(f"seeds={seeds}: it must be a whole number from 1 to {SEEDS_MAX}")
    if not PRECISION_LEAST <= precision <= PRECISION_MOST:
        raise ScenarioError(
            f"precision={precision}: it must be from {PRECISION_LEAST} to {PRECISION_MOST}"
        )
    return Study(
        Source.of_file(Path(scenario), tuple(overrides)),
        [f"{name}={value!r}" for name, value in (slo or {}).items()],
        [f"{name}={value!r}" for name, value in (prices or {}).items()],
        seeds,
        precision,
    )
