"""The elastic curve: load, the market's answer, who serves, and what it gives and costs."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvasir_scenario.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALE,
    PURPLE,
    RED,
    SKY,
    YELLOW,
    new_figure,
    read_table,
    thinned,
    tidy,
    title,
)
from kvasir_scenario.report_schema import Report
from kvasir_scenario.tables import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STANDINGS = (
    ("proven", GREEN), ("trial", SKY), ("new", GREY), ("suspect", ORANGE), ("quarantined", RED),
)  # fmt: skip
COLUMNS = [
    "at_s", "waiting", "running", "is_engaged", "target", "claims", "workers_online",
    "workers_covering", *(name for name, _ in STANDINGS), "covered_share", "remote_share",
    "tokens_per_s", "tpot_s",
]  # fmt: skip
Columns = dict[str, npt.NDArray[Any]]


def draw_elastic_curve(run_dir: Path, report: Report) -> "Figure":
    """Five panels over one time axis; shaded where expert work goes to workers."""
    from matplotlib.ticker import MaxNLocator

    table = read_table(run_dir, "swarm", COLUMNS)
    columns: Columns = {name: table[name].to_numpy() for name in table.column_names}
    figure = new_figure(9, 10.5)
    load, market, workers, tokens, pace = figure.subplots(5, 1, sharex=True)
    at = columns["at_s"]
    lines: tuple[tuple[Axes, str, str, str, str], ...] = (
        (load, "running", "requests running (busy slots)", BLUE, "-"),
        (load, "waiting", "waiting", ORANGE, "--"),
        (market, "target", "replicas wanted of each expert", RED, "-"),
        (market, "claims", "claims open", PURPLE, ":"),
        (market, "workers_online", "workers online", GREY, "--"),
        (market, "workers_covering", "workers covering", GREEN, "-"),
        (tokens, "tokens_per_s", "output tokens/s", BLUE, "-"),
        (pace, "tpot_s", "time per token, s", BLUE, "-"),
    )
    for axes, name, label, colour, style in lines:
        _line(axes, at, columns[name], label, colour, style)
    _stack(workers, columns)
    share = tokens.twinx()
    _line(share, at, columns["remote_share"], "share of pairs from workers (right)", YELLOW, "-")
    share.set_ylim(0, 1.05)
    share.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    share.spines["top"].set_visible(False)
    headings = ("load", "market", "workers by standing", "throughput", "cost")
    panels = (load, market, workers, tokens, pace)
    for axes, heading in zip(panels, headings, strict=True):
        axes.set_ylabel(heading)
        axes.set_ylim(bottom=0)
        tidy(axes)
        _shade(axes, at, columns["is_engaged"])
        handles, labels = axes.get_legend_handles_labels()
        if axes is tokens:
            more = share.get_legend_handles_labels()
            handles, labels = handles + more[0], labels + more[1]
        axes.legend(
            handles, labels, frameon=False, fontsize=8, loc="lower right", ncols=5,
            bbox_to_anchor=(1, 1), borderpad=0, handlelength=1.6, columnspacing=1.2,
        )  # fmt: skip
    for axes in (load, market, workers):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    _bound(tokens, report)
    pace.set_xlabel("time, s (shaded: expert work goes to workers)")
    pace.set_xlim(0, report.elapsed_s or 1.0)
    figure.suptitle(title(report, "the swarm over time"), x=0.01, ha="left", fontsize=11)
    return figure


def _line(
    axes: "Axes", at: Floats, values: npt.NDArray[Any], label: str, colour: str, style: str
) -> None:
    known = np.isfinite(values.astype(float))
    times, levels = thinned(at[known], values[known])
    axes.step(times, levels, where="pre", color=colour, linestyle=style, linewidth=1.3, label=label)


def _stack(axes: "Axes", columns: Columns) -> None:
    """Attached workers, each in its standing."""
    shown = [(name, colour) for name, colour in STANDINGS if columns[name].any()]
    if shown:
        axes.stackplot(
            columns["at_s"], [columns[name] for name, _ in shown], step="pre",
            colors=[colour for _, colour in shown], labels=[name for name, _ in shown],
        )  # fmt: skip


def _shade(axes: "Axes", at: Floats, engaged: npt.NDArray[Any]) -> None:
    if not at.size:
        return
    changes = np.flatnonzero(np.diff(engaged.astype(int), prepend=0))
    for index in changes[::2].tolist() if engaged[changes[:1]].all() else []:
        after = changes[changes > index]
        stop = at[after[0]] if after.size else at[-1]
        axes.axvspan(at[index], stop, color=PALE, zorder=0)


def _bound(axes: "Axes", report: Report) -> None:
    """What the peak could give, and what the stages alone would."""
    swarm = report.swarm
    if swarm is None or swarm.bound is None or swarm.rest is None:
        return
    start, stop = swarm.peak.start_s, swarm.peak.stop_s
    for value, text, colour in (
        (swarm.bound.output_tokens_per_s, f"bound ({swarm.bound.limited_by})", RED),
        (swarm.bound.alone_output_tokens_per_s, "bound without workers", ORANGE),
    ):
        axes.plot([start, stop], [value, value], color=colour, linestyle="--", linewidth=1.2)
        axes.annotate(
            text, (stop, value), ha="left", va="center", xytext=(4, 0), fontsize=8, color=colour,
            textcoords="offset points",
        )  # fmt: skip
