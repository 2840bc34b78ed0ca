"""`kvasir-sim plan SCENARIO`: the best ring for these machines, why, and as a scenario file."""

import json
from contextlib import suppress
from pathlib import Path

import click

from kvasir_core.errors import ScenarioError
from kvasir_scenario.out_file import PLAN, check_out_file
from kvasir_scenario.run_dir import write_whole


@click.command("plan")
@click.argument("scenario", type=click.Path(path_type=Path))
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="Set a key, as YAML.")
@click.option(
    "--out",
    type=click.Path(path_type=Path, allow_dash=True),
    help="Write the planned scenario to this file; - for standard output.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON and write no file.")
def command(scenario: Path, settings: tuple[str, ...], out: Path | None, as_json: bool) -> None:
    """Choose layers, order, window, widths and KV for SCENARIO, and say why.

    With --out FILE the plan is written as a scenario that gives every stage its layers; it runs
    under kvasir-sim and kvasir-rt.
    """
    from kvasir_scenario.load import load_scenario
    from kvasir_sim.plan_reasons import plan_facts, plan_yaml, stage_lines
    from kvasir_sim.planner import auto_layers, plan_scenario

    is_printed = str(out) == "-"
    if as_json and out is not None:
        raise click.UsageError("--json writes no file; leave --out out")
    if out is not None and not is_printed:
        _check(out, scenario)
    loaded = load_scenario(scenario, settings, planner=auto_layers)
    planned = plan_scenario(loaded)
    if as_json:
        click.echo(json.dumps(plan_facts(planned), indent=2))
        return
    for line in stage_lines(planned):
        click.echo(line, err=is_printed)
    for sentence in planned.why:
        click.echo(f"- {sentence}", err=is_printed)
    if out is None:
        click.echo("Nothing was written; --out FILE.yaml writes the plan as a scenario to run.")
        return
    text = plan_yaml(loaded, planned)
    if is_printed:
        click.echo(text, nl=False)
        return
    write_whole(out, text.encode())
    if out.parent.resolve() != scenario.parent.resolve():
        click.echo(
            f"note: relative paths in it stand as in {scenario}; keep it in {scenario.parent}",
            err=True,
        )
    click.echo(f"Plan: {out}")


def _check(target: Path, scenario: Path) -> None:
    with suppress(OSError):  # One of them is not there, or cannot be looked at.
        if target.samefile(scenario):
            raise ScenarioError(f"--out {target} is the scenario itself; give another file")
    check_out_file("--out", target, PLAN, (".yaml", ".yml"))
