"""`kvasir-sim compare RUN_DIR RUN_DIR...`: figures side by side, with relative errors."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvasir_scenario.option_numbers import Number
from kvasir_scenario.out_file import PLOT, check_out_file

if TYPE_CHECKING:
    from kvasir_scenario.compare import Comparison


@click.command("compare")
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--max-error", type=Number(0, 1000), help="Exit with 1 past this error (0.1).")
@click.option(
    "--plot", type=click.Path(path_type=Path), help="Write per-request scatter, FILE.png."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON and nothing else.")
def command(
    run_dirs: tuple[Path, ...], max_error: float | None, plot: Path | None, as_json: bool
) -> None:
    """Compare finished runs: predicted and measured, or any two of a kind.

    The first measured run is the reference, or the first run if none was measured. --max-error
    looks at throughput and median latencies.
    """
    if len(run_dirs) < 2:
        raise click.UsageError("give at least two run directories")
    from kvasir_scenario.compare import compare, comparison_document, draw_scatter, read_run

    if plot is not None:
        check_out_file("--plot", plot, PLOT, (".png",))
    comparison = compare([read_run(directory) for directory in run_dirs])
    if plot is not None:
        draw_scatter(comparison, plot)
    if as_json:
        click.echo(json.dumps(comparison_document(comparison), indent=2, allow_nan=False))
    else:
        _show(comparison)
        if plot is not None:
            click.echo(f"Scatter: {plot}")
    worst = comparison.worst
    if max_error is not None and worst is not None and worst[1] > max_error:
        click.echo(
            f"{worst[0]} is off by {worst[1]:.1%}, more than --max-error {max_error:.1%}", err=True
        )
        sys.exit(1)


def _show(comparison: "Comparison") -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from kvasir_scenario.terminal import output_console

    console = output_console()
    table = Table(box=SIMPLE_HEAD)
    table.add_column("figure")
    for index, run in enumerate(comparison.runs):
        is_reference = index == comparison.reference
        table.add_column(run.label + (" = reference" if is_reference else ""), justify="right")
        if not is_reference:
            table.add_column("error", justify="right")
    verdicts = ["verdict"]
    for index, run in enumerate(comparison.runs):
        verdict = run.report.verdict
        at = "" if verdict.stage is None else f" @{verdict.stage}"
        verdicts += [f"{verdict.kind.value}{at}"] + [""] * (index != comparison.reference)
    table.add_row(*verdicts)
    for row in comparison.rows:
        if not any(row.values):
            continue
        cells = [f"{row.name} ({row.unit})"]
        for index, value in enumerate(row.values):
            cells.append("-" if value is None else f"{value:,.4g}")
            if index != comparison.reference:
                error = row.errors[index]
                cells.append("-" if error is None else f"{error:+.1%}")
        table.add_row(*cells)
    console.print(table)
    for note in comparison.notes:
        console.print(f"Note: {note}", markup=False)
