"""`kvasir-sim report RUN_DIR`: show a finished run again, and make its plots and page anew."""

from pathlib import Path

import click


@click.command("report")
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON; draw nothing.")
@click.option("--plots/--no-plots", default=True, help="Plots and report.html anew [yes].")
def command(run_dir: Path, as_json: bool, plots: bool) -> None:
    """Show the report of RUN_DIR and rebuild its pictures and its page from its tables."""
    from kvasir_scenario.compare import read_run

    report = read_run(run_dir).report
    if as_json:
        click.echo(report.to_json(), nl=False)
        return
    from kvasir_scenario.page import write_page
    from kvasir_scenario.plots import write_plots
    from kvasir_scenario.terminal import print_report

    print_report(report)
    if plots:
        paths = [*write_plots(run_dir, report), write_page(run_dir, report)]
        click.echo(f"Files: {', '.join(str(path) for path in paths)}")
