"""`kvasir-sim campaign`: random faults on random swarms, seed by seed; no law may break."""

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import click

from kvasir_scenario.option_numbers import Number, Whole
from kvasir_sim.processes import process_pool
from kvasir_sim.swarm.campaign import MINUTES_MAX, SEEDS_MAX, SeedResult, run_seed

SECONDS_PER_HOUR = 3600


@click.command("campaign")
@click.option("--seeds", type=Whole(1, SEEDS_MAX), default=20, show_default=True,
              help="How many.")  # fmt: skip
@click.option("--minutes", type=Number(1, MINUTES_MAX), default=30.0, show_default=True,
              help="Simulated minutes with faults per seed; healing comes on top.")  # fmt: skip
@click.option("--first-seed", type=Whole(0, 2**31), default=1, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON and nothing else.")
@click.option("--processes", type=Whole(1, 1024), default=1, show_default=True)
def command(seeds: int, minutes: float, first_seed: int, as_json: bool, processes: int) -> None:
    """Simulate SEEDS random swarms under random faults; exit 1 if a law breaks.

    A failing seed fails again with --first-seed SEED --seeds 1 and the same --minutes.
    """
    results = []
    for result in _run(range(first_seed, first_seed + seeds), minutes, processes):
        results.append(result)
        if result.violation is not None:
            click.echo(
                f"seed {result.seed}: {result.violation}\n  again: kvasir-sim campaign --seeds 1 "
                f"--first-seed {result.seed} --minutes {minutes:g}",
                err=True,
            )
    summary = summarise(results)
    if as_json:
        click.echo(json.dumps(summary, indent=2))
    else:
        click.echo(
            f"{len(results)} seeds, {summary['simulated_hours']:.1f} simulated hours, "
            f"{summary['decisions']:,} decisions, {summary['violations']} violations"
        )
        for kind, count in summary["faults"].items():
            click.echo(f"  {kind:20} {count:,}")
    if summary["violations"]:
        sys.exit(1)


def _run(seeds: Iterable[int], minutes: float, processes: int) -> Iterator[SeedResult]:
    one = partial(run_seed, minutes=minutes)
    if processes == 1:
        yield from map(one, seeds)
        return
    with process_pool(processes) as pool:
        yield from pool.map(one, seeds)


def summarise(results: list[SeedResult]) -> dict[str, Any]:
    """What `--json` prints."""
    faults: Counter[str] = Counter()
    for result in results:
        faults.update(result.faults)
    failing = [
        {"seed": result.seed, "what": result.violation}
        for result in results
        if result.violation is not None
    ]
    return {
        "seeds": len(results),
        "simulated_hours": sum(result.simulated_s for result in results) / SECONDS_PER_HOUR,
        "decisions": sum(result.decisions for result in results),
        "faults": dict(sorted(faults.items())),
        "violations": len(failing),
        "failing": failing,
    }
