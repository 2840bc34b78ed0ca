"""`kvasir-sim capacity SCENARIO --slo ttft_p99=1.0`: what it carries, and what would add to it."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvasir_scenario.option_numbers import Number, Whole
from kvasir_sim.capacity import (
    PRECISION,
    PRECISION_LEAST,
    PRECISION_MOST,
    SEEDS,
    SEEDS_MAX,
    STAGES,
)

if TYPE_CHECKING:
    from kvasir_sim.capacity.driver import Progress

STAGES_MAX = 64


@click.command("capacity")
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--slo", "slos", multiple=True, metavar="NAME=SECONDS",
              help="ttft|tpot|itl|e2e _ mean|p50|p90|p99, for example ttft_p99=1.0.")  # fmt: skip
@click.option("--rate", type=Number(0, 1e6, is_above=True),
              help="Find the cheapest ring (or workers) that carries this load.")  # fmt: skip
@click.option("--seeds", type=Whole(1, SEEDS_MAX), default=SEEDS, show_default=True,
              help="A load holds if most of them carry it.")  # fmt: skip
@click.option("--precision", type=Number(PRECISION_LEAST, PRECISION_MOST), default=PRECISION,
              show_default=True, help="Ratio of neighbouring loads, less 1.")  # fmt: skip
@click.option("--gains/--no-gains", "has_gains", default=True, help="What one more brings [yes].")
@click.option("--price", "prices", multiple=True, metavar="NAME=USD_PER_H",
              help="Of a device or a class of workers.")  # fmt: skip
@click.option("--stages-max", type=Whole(2, STAGES_MAX), default=STAGES, show_default=True,
              help="With --rate: most stages of a ring.")  # fmt: skip
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key, as YAML.")
@click.option("--jobs", type=Whole(1, 1024), help="Processes [one per core].")
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(
    scenario: Path,
    slos: tuple[str, ...],
    rate: float | None,
    seeds: int,
    precision: float,
    has_gains: bool,
    prices: tuple[str, ...],
    stages_max: int,
    settings: tuple[str, ...],
    jobs: int | None,
    as_json: bool,
) -> None:
    """The highest load that SCENARIO carries within its limits, and what one more would bring.

    A load is carried if the queue does not grow and every --slo holds (docs/capacity.md).
    """
    from kvasir_sim.capacity.driver import Driver
    from kvasir_sim.capacity.show import print_capacity, print_cheapest
    from kvasir_sim.capacity.study import Study
    from kvasir_sim.sweep.points import Source
    from kvasir_sim.sweep.pool import LocalPool

    study = Study(Source.of_file(scenario, settings), slos, prices, seeds, precision)
    with (
        LocalPool(study.source, jobs or os.cpu_count() or 1) as pool,
        _progress(is_shown=not as_json) as progress,
    ):
        driver = Driver(pool, progress)
        if rate is None:
            document = study.capacity(driver, has_gains=has_gains)
        else:
            document = study.cheapest(driver, rate, stages_max)
    if as_json:
        click.echo(json.dumps(document, indent=2, allow_nan=False))
    elif rate is None:
        print_capacity(document)
    else:
        print_cheapest(document)
    if not document["found"]:
        sys.exit(1)


@contextmanager
def _progress(*, is_shown: bool) -> Iterator["Progress | None"]:
    """What is tried, how far it is, and the time left; on a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column

    console = Console(stderr=True)
    if not (is_shown and console.is_terminal):
        yield None
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", table_column=Column()),  # It wraps where there is no room.
        BarColumn(8), TextColumn("{task.completed:.0f} of about {task.total:.0f} runs"),
        TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1)

        def update(runs: int, expected: int, doing: str) -> None:
            bar.update(task, completed=runs, total=expected, description=doing)

        yield update
