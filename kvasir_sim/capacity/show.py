"""The answers of `kvasir-sim capacity` on the screen, the most important first."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from kvasir_scenario.terminal import output_console
from kvasir_scenario.wording import duration

TRIED_SHOWN = 12


def print_capacity(document: dict[str, Any]) -> None:
    """Capacity, what breaks, and the gains."""
    console = output_console()
    unit, seeds = document["unit"], document["seeds"]
    limits = ", ".join(f"{name} <= {duration(most)}" for name, most in document["limits_s"].items())
    within = f" with {limits}" if limits else ", queue not growing"
    if not document["found"]:
        console.print(f"{document['name']}: no load holds{within}")
    else:
        console.print(
            f"{document['name']}: carries {document['capacity']:,.4g} {unit}{within} "
            f"({document['seeds_holding']} of {seeds} seeds; its own load is "
            f"{document['own_load']:,.4g})"
        )
    if document["next_load"] is None:
        console.print("  no load that was tried broke it")
    else:
        breaks = ", ".join(f"{why} ({count})" for why, count in document["breaks"].items())
        console.print(
            f"  at {document['next_load']:,.4g}: {document['seeds_holding_next']} of {seeds} seeds "
            f"hold; {breaks}"
        )
    if document["beyond"] is not None:
        stage = document["beyond"]["verdict_stage"]
        where = "" if stage is None else f" at stage {stage}"
        binding = str(document["binding"]).replace("_", " ")
        console.print(
            f"  the ring there: {document['beyond']['verdict']}{where}; micro-batches end most "
            f"often because of: {binding}"
        )
    by_seed = [load for load in document["capacity_by_seed"] if load is not None]
    if by_seed:
        console.print(f"  by seed: {min(by_seed):,.4g} to {max(by_seed):,.4g} {unit}")
    if document["cost"] is not None:
        cost = ", ".join(f"{value:,.4g} {name}" for name, value in document["cost"].items())
        console.print(f"  cost: {cost.replace('_', ' ')}")
    if document["gains"]:
        console.print(_gains(document))
    more = f" and {document['runs_for_gains']} for the gains" if document["gains"] else ""
    console.print(f"{document['runs']} runs{more}")


def _gains(document: dict[str, Any]) -> Table:
    table = Table(box=SIMPLE_HEAD, title="What one more brings", title_justify="left")
    table.add_column("resource")
    table.add_column("step")
    table.add_column("gain", justify="right")
    table.add_column(document["unit"], justify="right")
    table.add_column("by seed", justify="right")
    priced = any(gain["usd_per_h"] is not None for gain in document["gains"])
    if priced:
        table.add_column(f"{document['unit']} per USD/h", justify="right")
    for gain in document["gains"]:
        cells = [gain["resource"], gain["step"], *_gain_cells(gain)]
        if priced:
            per_usd = gain["gain_load_per_usd_per_h"]
            cells.append("" if per_usd is None else f"{per_usd:+,.3g}")
        table.add_row(*cells)
    return table


def _gain_cells(gain: dict[str, Any]) -> tuple[str, str, str]:
    share = gain["gain_share"]
    if share is None:
        return "-", "", str(gain["why_not"])[:60]
    if gain["is_untouched"]:
        return "none", "", "the same run"
    if not share and not gain["gain_share_least"] and not gain["gain_share_most"]:
        return "none", "", ""
    spread = f"{gain['gain_share_least']:+.1%} to {gain['gain_share_most']:+.1%}"
    return f"{share:+.1%}", f"{gain['gain_load']:+,.3g}", spread


def print_cheapest(document: dict[str, Any]) -> None:
    """The cheapest that carries the load, and what was tried before it."""
    console = output_console()
    load = f"{document['load']:,.4g} {document['unit']}"
    best = document["best"]
    if best is None:
        console.print(f"{document['name']}: nothing that was tried carries {load}")
    else:
        usd = best["usd_per_h"]
        cost = " (no prices are known)" if usd is None else f", {usd:,.4g} USD per hour"
        console.print(f"{document['name']}: {_what(best)} carries {load}{cost}")
    if "workers" in document:
        for answer in document["workers"]:
            count = "no number" if answer["count"] is None else f"{answer['count']}"
            console.print(f"  {answer['worker']}: {count} (the other classes as they are)")
    else:
        if best is not None and best["layers"] is not None:
            console.print(f"  layers: {', '.join(str(stage) for stage in best['layers'])}")
        skipped = document["ruled_out_by_planner"]
        for answer in document["tried"][-TRIED_SHOWN:]:
            fate = "holds" if answer["holds"] else answer["why"]
            usd = "" if answer["usd_per_h"] is None else f" ({answer['usd_per_h']:,.4g} USD/h)"
            console.print(f"  {_what(answer)}{usd}: {fate}")
        console.print(f"  {skipped} cheaper rings were ruled out by the planner's bound")
    console.print(f"{document['runs']} runs")


def _what(answer: dict[str, Any]) -> str:
    if "worker" in answer:
        return f"{answer['count']} workers {answer['worker']}"
    devices = " + ".join(f"{count} x {name}" for name, count in answer["devices"].items())
    return devices or f"{answer['stages']} stages"
