"""`kvasir-sim sweep SCENARIO --grid KEY=1,2,4`: one run per point, all of them in one table."""

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvasir_core.errors import ScenarioError
from kvasir_scenario.option_numbers import Whole

if TYPE_CHECKING:
    from kvasir_sim.sweep.points import Sweep
    from kvasir_sim.sweep.run import Outcome, Progress, Run

SEEDS_MAX = 10_000
SAMPLES_MAX = 100_000
ERRORS_SHOWN = 5  # Different ones; the table has them all.


@click.command("sweep")
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--grid", "grids", multiple=True, metavar="KEY=VALUES",
              help="An axis: v1,v2,... or start:stop:step (stop included).")  # fmt: skip
@click.option("--sample", type=click.Choice(("sobol", "lhs")),
              help="Draw --points samples of the --range axes.")  # fmt: skip
@click.option("--points", type=Whole(1, SAMPLES_MAX), help="How many samples.")
@click.option("--range", "ranges", multiple=True, metavar="KEY=LO:HI",
              help="A sampled axis; whole numbers if both ends are.")  # fmt: skip
@click.option("--seeds", type=Whole(1, SEEDS_MAX), default=1, show_default=True,
              help="Runs per point, from run.seed on.")  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key, as YAML.")
@click.option("--out", type=click.Path(path_type=Path),
              help="FILE.parquet or FILE.sqlite [runs/NAME-sweep.parquet].")  # fmt: skip
@click.option("--jobs", type=Whole(1, 1024), help="Processes [one per core].")
@click.option("--cluster", metavar="auto|HOST:PORT", help="Run on this Ray cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print a summary as JSON and nothing else.")
def command(
    scenario: Path,
    grids: tuple[str, ...],
    sample: str | None,
    points: int | None,
    ranges: tuple[str, ...],
    seeds: int,
    settings: tuple[str, ...],
    out: Path | None,
    jobs: int | None,
    cluster: str | None,
    as_json: bool,
) -> None:
    """Simulate SCENARIO at every combination of values; write one row per run.

    Stopped or killed, the same command goes on where it was. A point that fails is recorded in
    column `error` and ends nothing.
    """
    from kvasir_sim.sweep.run import Run, Stopped

    sweep = _sweep_of(scenario, grids, sample, points, ranges, seeds, settings)
    target = Path("runs") / f"{sweep.base.name}-sweep.parquet" if out is None else out
    run = Run(sweep, target)
    start = time.monotonic()
    try:
        cores = _work(run, sweep, jobs, cluster, is_quiet=as_json)
        outcome = run.finish()
    except Stopped as stop:
        click.echo(
            f"{stop.done} of {run.total} points are kept; the same command goes on from there",
            err=True,
        )
        raise KeyboardInterrupt from None
    finally:
        run.close()
    summary = _summary(outcome, target, cores, time.monotonic() - start)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        _show(summary)
    if len(outcome.failed) == run.total:
        sys.exit(1)


def _sweep_of(
    scenario: Path,
    grids: tuple[str, ...],
    sample: str | None,
    points: int | None,
    ranges: tuple[str, ...],
    seeds: int,
    settings: tuple[str, ...],
) -> "Sweep":
    from kvasir_sim.sweep.axes import read_axes
    from kvasir_sim.sweep.points import Source, Sweep
    from kvasir_sim.sweep.samples import draw_samples

    if bool(sample) != bool(ranges) or bool(sample) != bool(points):
        raise ScenarioError(
            "--sample, --points and --range go together: the method, how many, and the axes"
        )
    axes, spans = read_axes(grids, ranges)
    if not axes and not spans and seeds == 1:
        raise ScenarioError("nothing to sweep: give --grid, --sample or --seeds")
    source = Source.of_file(scenario, settings)
    samples: list[tuple[float, ...]] = []
    if sample is not None:
        assert points is not None, "checked above"
        seed = source.load().run.seed
        samples = draw_samples("sobol" if sample == "sobol" else "lhs", points, len(spans), seed)
    return Sweep(source, axes, spans, samples, seeds)


def _work(
    run: "Run", sweep: "Sweep", jobs: int | None, cluster: str | None, *, is_quiet: bool
) -> int:
    """Run what is missing; how many processes did."""
    if not run.missing:
        return 0
    with ExitStack() as stack:
        if cluster is not None:
            from kvasir_sim.sweep.cluster import RayPool

            # Ray tells of what dies on standard output, which with --json is the summary's alone.
            stack.enter_context(redirect_stdout(sys.stderr))
            ray_pool = stack.enter_context(RayPool(sweep.source, cluster, jobs))
            run.work(ray_pool, stack.enter_context(_progress(run, is_shown=not is_quiet)))
            return ray_pool.jobs
        from kvasir_sim.sweep.pool import LocalPool

        count = min(jobs or os.cpu_count() or 1, run.missing)
        pool = stack.enter_context(LocalPool(sweep.source, count))
        run.work(pool, stack.enter_context(_progress(run, is_shown=not is_quiet)))
        return pool.jobs


@contextmanager
def _progress(run: "Run", *, is_shown: bool) -> Iterator["Progress | None"]:
    """A bar with the time left, on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield None
        return
    columns = (
        TextColumn("points"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("left"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("points", total=run.total, completed=run.outcome.known)
        yield lambda done: bar.update(task, completed=done)


def _summary(outcome: "Outcome", out: Path, cores: int, seconds: float) -> dict[str, Any]:
    return {
        "out": str(out),
        "points": len(outcome.points),
        "known": outcome.known,
        "failed": len(outcome.failed),
        "errors": dict(Counter(error for _, error in outcome.failed).most_common(ERRORS_SHOWN)),
        "processes": cores,
        "elapsed_s": seconds,
        "simulate_cpu_s": outcome.simulate_s,
        "around_cpu_s": outcome.other_s,
    }


def _show(summary: dict[str, Any]) -> None:
    known, failed = summary["known"], summary["failed"]
    click.echo(
        f"{summary['points']} points ({known} of them known before, {failed} failed) in "
        f"{summary['elapsed_s']:.1f} s on {summary['processes']} processes"
    )
    for error, count in summary["errors"].items():
        click.echo(f"  {count} failed: {error}", err=True)
    click.echo(f"File: {summary['out']}")
