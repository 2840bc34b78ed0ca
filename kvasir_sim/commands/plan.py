"""`kvasir-sim plan SCENARIO`: the best ring for these machines, why, and as a scenario file."""

import json
from pathlib import Path

import click

from kvasir_core.errors import ScenarioError


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
    from kvasir_sim.plan_reasons import plan_facts, plan_yaml
    from kvasir_sim.planner import auto_layers, plan_scenario

    loaded = load_scenario(scenario, settings, planner=auto_layers)
    planned = plan_scenario(loaded)
    if as_json:
        click.echo(json.dumps(plan_facts(planned), indent=2))
        return
    is_printed = str(out) == "-"
    for sentence in planned.why:
        click.echo(f"- {sentence}", err=is_printed)
    if out is None:
        click.echo("Nothing was written; --out FILE.yaml writes the plan as a scenario to run.")
        return
    text = plan_yaml(loaded, planned)
    if is_printed:
        click.echo(text, nl=False)
        return
    _write(text, out, scenario)


def _write(text: str, target: Path, scenario: Path) -> None:
    if target.resolve() == scenario.resolve():
        raise ScenarioError(f"--out {target} is the scenario itself; give another file")
    if target.parent.resolve() != scenario.parent.resolve():
        click.echo(
            f"note: relative paths in it stand as in {scenario}; keep it in {scenario.parent}",
            err=True,
        )
    partial = target.with_name(f"{target.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(target)
    click.echo(f"Plan: {target}")
