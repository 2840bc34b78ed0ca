"""`kvasir-sim SCENARIO`, and its subcommands; each is imported when it is called.

With `--json` the report is all of standard output. Exit status: see `kvasir_scenario.ending`.
"""

from importlib import import_module
from pathlib import Path

import click

from kvasir_scenario.ending import run_command
from kvasir_scenario.first_word import check_first_word
from kvasir_scenario.option_numbers import Whole

SUBCOMMANDS = {
    "campaign": "kvasir_sim.commands.campaign",
    "capacity": "kvasir_sim.commands.capacity",
    "compare": "kvasir_sim.commands.compare",
    "plan": "kvasir_sim.commands.plan",
    "report": "kvasir_sim.commands.report",
    "sweep": "kvasir_sim.commands.sweep",
}
"""Each module has a click command named `command`."""


class ScenarioOrCommand(click.Group):
    """A first argument that is no subcommand is a scenario file."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The subcommands, in order of the alphabet."""
        del ctx
        return ["run", *SUBCOMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the subcommand's module."""
        if cmd_name == "run":
            return simulate_command
        if cmd_name not in SUBCOMMANDS:
            return super().get_command(ctx, cmd_name)
        command = import_module(SUBCOMMANDS[cmd_name]).command
        assert isinstance(command, click.Command)
        return command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Put `run` in front of a scenario."""
        own = {"--help", "-h", "--version", "--schema"}
        first = args[0] if args else "--help"
        if first == "--schema" and args[1:]:
            raise click.UsageError(f"--schema stands alone; found {args[1]!r} behind it", ctx)
        if first != "run" and first not in SUBCOMMANDS and first not in own:
            check_first_word(ctx, first, ["run", *SUBCOMMANDS])
            args = ["run", *args]
        return super().parse_args(ctx, args)


def _print_schema(ctx: click.Context, _param: click.Parameter, is_wanted: bool) -> None:
    if is_wanted and not ctx.resilient_parsing:
        import json

        from kvasir_scenario.schema import json_schema

        click.echo(json.dumps(json_schema(), indent=2))
        ctx.exit()


@click.group(
    cls=ScenarioOrCommand,
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
)
@click.version_option(package_name="kvasir")
@click.option(
    "--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
    help="Print the JSON Schema of a scenario, for editors.",
)  # fmt: skip
def group() -> None:
    """What would happen if this model ran on these machines? Ask with a scenario file.

    `kvasir-sim SCENARIO` simulates it and prints the verdict first.
    """


@click.command("run")
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key, as YAML.")
@click.option("--seed", type=Whole(0, 2**63 - 1), help="Overrides run.seed.")
@click.option("--out", type=click.Path(path_type=Path), help="Run directory [runs/NAME].")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON and nothing else.")
@click.option("--quiet", is_flag=True, help="Print nothing but errors; write the files.")
@click.option("--csv", is_flag=True, help="Write each table as CSV too.")
@click.option("--events", is_flag=True, help="Write the scheduler's event log, events.jsonl.")
@click.option("--plots/--no-plots", default=True, help="Draw plots (PNG) and report.html [yes].")
@click.option("--processes", type=Whole(0, 1024), help="For variants [cores - 1].")
def simulate_command(
    scenario: Path,
    settings: tuple[str, ...],
    seed: int | None,
    out: Path | None,
    as_json: bool,
    quiet: bool,
    csv: bool,
    events: bool,
    plots: bool,
    processes: int | None,
) -> None:
    """Simulate SCENARIO; write its tables, plots and report; print the verdict first."""
    from kvasir_scenario.load import load_scenario
    from kvasir_sim.planner import auto_layers
    from kvasir_sim.progress import progress_bar
    from kvasir_sim.run import run

    loaded = load_scenario(scenario, settings, seed=seed, planner=auto_layers)
    directory = Path("runs") / loaded.name if out is None else out
    with progress_bar(loaded, is_shown=not (quiet or as_json)) as progress:
        result = run(
            loaded, directory, csv=csv, events=events, plots=plots, processes=processes,
            progress=progress,
        )  # fmt: skip
    if as_json:
        click.echo(result.report.to_json(), nl=False)
    elif not quiet:
        from kvasir_scenario.terminal import print_report

        print_report(result.report)
        click.echo(
            f"Files: {directory}/ (report.json, *.parquet{', *.png, *.html' if plots else ''})"
        )


def main(args: list[str] | None = None) -> None:
    """Run a command line and end the process."""
    run_command(group, "kvasir-sim", args)


if __name__ == "__main__":
    main()
