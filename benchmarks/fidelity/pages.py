"""Writes docs/fidelity.md and its picture from what the suite has measured."""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from kvasir_scenario.compare import LATENCIES, read_run
from kvasir_scenario.plots import DPI, new_figure

if TYPE_CHECKING:
    from benchmarks.fidelity.suite import Figure, Row

COLUMNS = 3
CAUSES = "causes.md"  # Written by hand beside the scenarios; why what missed its bar did.

WORKERS = "workers.json"
WORKERS_INTRO = """
## With real expert workers

`python benchmarks/fidelity/workers.py --out runs/fidelity/workers.json`: what a run with near
workers and blocking stages measures foretells runs whose workers answer 20 ms late, for stages that
hold one micro-batch at a time and eight. All share two cores: no rate is foretold above these over
the processor time of a token.

| scenario | predicted, tokens/s | measured, tokens/s | error |
|---|---|---|---|
"""

INTRO = """# How far the simulator's word can be trusted

Each scenario of `benchmarks/fidelity/` ran on real stage processes ({repeats} times) and was
simulated once, with a profile of the machine that the same run of the suite measured first
(`kvasir-rt profile`), scaled to the machine's speed before, between and after the real runs
(a short ring that is none of the scenarios, run and simulated too: `speed.py`). An error is
(predicted - measured) / measured, against the median of the real runs. Allowed is the bar
(throughput 5 %, median TPOT 7 %, p90 TTFT 15 %), or twice the spread of the repeats (from least to
most, over the median) where that is more. {met} of {count} scenarios meet all three.

Machine: {machine}; model {model}, {dtype}, two stages on a core each.

    python benchmarks/fidelity/suite.py --repeats {repeats} --docs

"""
HEADS = (
    *("scenario", "tokens/s", "error", "TPOT p50, ms", "error", "TTFT p90, s", "error"),
    *("verdict", "met"),
)


def write_pages(rows: Sequence["Row"], whole: dict[str, Any], runs: Path, docs: Path) -> None:
    """The table, then every request's latencies, predicted against measured."""
    repeats = len(rows[0].figures[0].measured)
    text = INTRO.format(
        repeats=repeats,
        met=whole["met"],
        count=len(rows),
        machine=whole["machine"],
        model=whole["model"],
        dtype=whole["dtype"],
    )
    text += f"| {' | '.join(HEADS)} |\n{'|---' * len(HEADS)}|\n"
    text += "".join(_line(row) for row in rows)
    text += "\n"
    for row in rows:
        text += f"- `{row.name}`: {row.question}\n"
    if (workers := runs / WORKERS).exists():
        text += _workers(json.loads(workers.read_text()))
    causes = Path(__file__).with_name(CAUSES)
    if causes.exists():
        text += "\n" + causes.read_text()
    text += "\n![Every request, predicted against measured](img/fidelity.png)\n"
    (docs / "fidelity.md").write_text(text)
    draw([runs / row.name for row in rows], docs / "img" / "fidelity.png")


def _workers(rows: dict[str, dict[str, Any]]) -> str:
    text = WORKERS_INTRO
    for name, row in rows.items():
        measured = row["measured_tokens_per_s"]
        seen = f"{median(measured):.1f} ({min(measured):.1f} to {max(measured):.1f})"
        text += f"| {name} | {row['predicted_tokens_per_s']:.1f} | {seen} | {row['error']:+.1%} |\n"
    return text


def _line(row: "Row") -> str:
    throughput, tpot, ttft = row.figures
    foretold, came = row.verdicts
    verdict = foretold if foretold == came else f"{foretold} (measured: {came})"
    cells = [row.name, *_cells(throughput, 1, 1), *_cells(tpot, 1e3, 0), *_cells(ttft, 1, 2)]
    return f"| {' | '.join([*cells, verdict, 'yes' if row.is_met else '**no**'])} |\n"


def _cells(figure: "Figure", scale: float, digits: int) -> tuple[str, str]:
    if figure.error is None or figure.predicted is None:
        return f"{figure.middle * scale:.{digits}f}", "-"
    values = f"{figure.predicted * scale:.{digits}f} / {figure.middle * scale:.{digits}f}"
    return values, f"{figure.error:+.1%} (of {figure.allowed:.0%})"


def draw(directories: Sequence[Path], path: Path) -> None:
    """Each request's TTFT, TPOT and end-to-end time, predicted against measured, log scales."""
    figure = new_figure(12, 4.2)
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes = [figure.add_subplot(1, COLUMNS, place + 1) for place in range(COLUMNS)]
    for directory in directories:
        measured = read_run(directory / "real_0").requests()
        foretold = read_run(directory / "simulated").requests()
        for place, latency in zip(axes, LATENCIES, strict=True):
            pairs = measured[[latency]].join(foretold[latency].rename("foretold")).dropna()
            pairs = pairs[(pairs > 0).all(axis=1)]
            place.plot(
                pairs[latency],
                pairs["foretold"],
                ".",
                markersize=4,
                alpha=0.7,
                label=directory.name,
            )
    for place, latency in zip(axes, LATENCIES, strict=True):
        place.set_xscale("log")
        place.set_yscale("log")
        for axis in (place.xaxis, place.yaxis):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
        low, high = place.get_xlim()
        place.plot([low, high], [low, high], color="black", linewidth=0.8, zorder=0)
        place.set_title(f"{latency[:-2].upper()}, s")
        place.set_xlabel("measured")
    axes[0].set_ylabel("predicted")
    axes[-1].legend(frameon=False, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, format="png", dpi=DPI, metadata={"Software": None}, bbox_inches="tight")
