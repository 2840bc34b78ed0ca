"""`run(scenario) -> Result`: a scenario with its what-if variants, and what it leaves as frames."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvasir_scenario.load import load_scenario
from kvasir_scenario.report import finish_run_dir
from kvasir_scenario.report_schema import Report, Variant
from kvasir_scenario.run_dir import nothing_of_a_stopped_run, prepare_run_dir
from kvasir_scenario.schema import Scenario
from kvasir_scenario.variants import variants_of
from kvasir_sim.planner import auto_layers
from kvasir_sim.processes import process_pool
from kvasir_sim.simulate import Inputs, Progress, simulate

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Result:
    """A finished run.

    Attributes:
        report: What `report.json` holds.
        directory: The run's directory, or None if nothing was written.
    """

    report: Report
    directory: Path | None

    @classmethod
    def read(cls, directory: Path | str) -> Self:
        """A finished run's directory, simulated or real.

        Raises:
            ScenarioError: It holds no readable report.
        """
        from kvasir_scenario.compare import read_run

        return cls(read_run(Path(directory)).report, Path(directory))

    @property
    def requests(self) -> "pd.DataFrame":
        """One row per offered request; times in seconds (`*_s`), undefined values are NaN."""
        return self._frame("requests")

    @property
    def micro_batches(self) -> "pd.DataFrame":
        """One row per micro-batch."""
        return self._frame("micro_batches")

    @property
    def stages(self) -> "pd.DataFrame":
        """One row per stage and micro-batch: received, start, end, sent (s)."""
        return self._frame("stages")

    @property
    def swarm(self) -> "pd.DataFrame":
        """The swarm over time; only with `experts`."""
        return self._frame("swarm")

    def _frame(self, table: str) -> "pd.DataFrame":
        import pandas as pd

        if self.directory is None:
            raise FileNotFoundError(f"this run wrote no {table} table: give `out` to run()")
        return pd.read_parquet(self.directory / f"{table}.parquet")


def run(
    scenario: Scenario | Path | str,
    out: Path | str | None = None,
    *,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    processes: int | None = None,
    csv: bool = False,
    events: bool = False,
    plots: bool = False,
    progress: Progress | None = None,
) -> Result:
    """Simulate a scenario and its variants.

    Args:
        scenario: A scenario, or the path of its file.
        out: Directory for the result files; an earlier run there is replaced.
        overrides: `key.path=value`, for a path only.
        seed: Overrides `run.seed`, for a path only.
        processes: At most so many beside this one for the variants; 0 runs them here.
        csv: Write each table as CSV too.
        events: Write the core's event log.
        plots: Draw the plots, and write the page `report.html`.
        progress: Called now and then with (virtual nanoseconds, requests ended).

    Raises:
        ScenarioError: An input file is wrong.
        OutputError: A file cannot be written; nothing of the run is left.
    """
    if not isinstance(scenario, Scenario):
        scenario = load_scenario(Path(scenario), overrides, seed=seed, planner=auto_layers)
    elif overrides or seed is not None:
        raise ValueError("overrides and seed go with a scenario file, not with a loaded scenario")
    variants = variants_of(scenario)
    inputs = _read_all(scenario, [] if out is None else variants)
    directory = None if out is None else prepare_run_dir(Path(out))
    if processes is None:
        processes = min(len(variants), max(0, (os.cpu_count() or 1) - 1))
    with ExitStack() as stack:
        stack.enter_context(nothing_of_a_stopped_run(directory))
        if processes and variants:
            pool = stack.enter_context(process_pool(processes))
            later = [pool.submit(simulate, variant) for _, variant in variants]
            report = simulate(
                scenario, directory, inputs, csv=csv, events=events, progress=progress
            )
            reports = [future.result() for future in later]
        else:
            report = simulate(
                scenario, directory, inputs, csv=csv, events=events, progress=progress
            )
            reports = [simulate(variant) for _, variant in variants]
        parts = [
            Variant(name=name, report=part)
            for (name, _), part in zip(variants, reports, strict=True)
        ]
        report = report.model_copy(update={"variants": parts})
        if directory is not None:
            finish_run_dir(directory, scenario, report, plots=plots)
    return Result(report, directory)


def _read_all(scenario: Scenario, variants: Sequence[tuple[str, Scenario]]) -> Inputs:
    """The scenario's inputs, when those of all variants are known good: no earlier run is lost."""
    for _, variant in variants:
        Inputs.of(variant)
    return Inputs.of(scenario)
