"""The plots of a run, drawn from its files: they can be made again at any time.

Colours are Okabe and Ito's, told apart by the colour-blind; what matters is also hatched or named.
A plot has the same bytes for the same files: no date, no version of the software in it.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvasir_core.errors import ScenarioError
from kvasir_scenario.report_schema import LatencyPart, Report, StagePart, parse_report
from kvasir_scenario.run_dir import PLOTS, SWARM_PLOTS, whole_file
from kvasir_scenario.tables import Floats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK, ORANGE, SKY, GREEN, YELLOW, BLUE, RED, PURPLE = (
    "#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7",
)  # fmt: skip
GREY, PALE = "#999999", "#eeeeee"
DPI = 150
BINS = 50
POINTS_MAX = 2000  # A line of more points only gets thicker.
LABEL_SHARE = 0.06  # A part narrower than this has no room for its number.
STAGES_MAX = 64  # Bars that still can be told apart.

PARTS: tuple[tuple[str, str, str, Callable[[StagePart], float]], ...] = (
    ("busy", BLUE, "", lambda stage: stage.busy_s),
    ("blocked: credit", RED, "///", lambda stage: stage.blocked_by.credit),
    ("blocked: experts", ORANGE, "///", lambda stage: stage.blocked_by.experts),
    ("starved: capacity", YELLOW, "...", lambda stage: stage.starved_by.capacity),
    ("starved: dependency", SKY, "...", lambda stage: stage.starved_by.dependency),
    ("starved: upstream", PURPLE, "...", lambda stage: stage.starved_by.upstream),
    ("starved: no demand", PALE, "...", lambda stage: stage.starved_by.no_demand),
)  # Name, colour, hatch, seconds.


def write_plots(run_dir: Path, report: Report | None = None) -> list[Path]:
    """Draw every plot of a run from its tables.

    Args:
        run_dir: Holds the run's tables.
        report: The run's; by default it is read from `report.json`.

    Returns:
        The PNG files.

    Raises:
        ScenarioError: The directory does not hold a finished run.
    """
    from kvasir_scenario.plot_ring import draw_timeline

    if report is None:
        report = _read_report(run_dir)
    draw: dict[str, Callable[[Path, Report], Figure]] = {
        "timeline": draw_timeline,
        "time_split": _draw_time_split,
        "latency": _draw_latency,
        "queue_and_kv": _draw_queue_and_kv,
    }
    assert tuple(draw) == PLOTS
    if report.swarm is not None:
        from kvasir_scenario.plot_swarm import draw_elastic_curve

        draw[SWARM_PLOTS[0]] = draw_elastic_curve
    paths = []
    for name, drawing in draw.items():
        path = run_dir / f"{name}.png"
        figure = drawing(run_dir, report)
        with whole_file(path) as partial:
            figure.savefig(partial, format="png", dpi=DPI, metadata={"Software": None})
        paths.append(path)
    return paths


def _read_report(run_dir: Path) -> Report:
    path = run_dir / "report.json"
    if not path.is_file():
        raise ScenarioError(f"{run_dir}: has no report.json; name the directory of a finished run")
    try:
        return parse_report(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ScenarioError(f"{path}: is not a report of this version: {error}") from error


def read_table(run_dir: Path, name: str, columns: list[str], **options: Any) -> pa.Table:
    """Some columns of a run's table.

    Raises:
        ScenarioError: It is not there, or not such a table.
    """
    path = run_dir / f"{name}.parquet"
    try:
        return pq.read_table(path, columns=columns, **options)
    except (OSError, pa.ArrowException) as error:
        raise ScenarioError(f"{path}: cannot be read as a table of a run: {error}") from error


def new_figure(width: float, height: float) -> "Figure":
    """An empty figure that needs no screen (inches)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def title(report: Report, text: str) -> str:
    """A heading that says whose figures these are."""
    return f"{report.name} ({report.mode}): {text}"


def tidy(axes: "Axes") -> None:
    """Leave out frame lines that carry nothing."""
    axes.spines[["top", "right"]].set_visible(False)


def _draw_time_split(run_dir: Path, report: Report) -> "Figure":
    """One bar per stage, from what it held to why it was empty-handed."""
    del run_dir  # Causes are in the report alone.
    stages = report.stages[:STAGES_MAX]
    figure = new_figure(9, 1.9 + 0.38 * len(stages))
    axes = figure.add_subplot()
    elapsed = report.elapsed_s or 1.0
    at = np.arange(len(stages))
    left = np.zeros(len(stages))
    for name, colour, hatch, seconds_of in PARTS:
        shares = np.array([seconds_of(stage) / elapsed for stage in stages])
        if not shares.any():
            continue
        axes.barh(
            at, shares, left=left, height=0.72, color=colour, hatch=hatch, label=name,
            edgecolor="white", linewidth=0.6,
        )  # fmt: skip
        for stage in np.flatnonzero(shares >= LABEL_SHARE).tolist():
            axes.text(
                left[stage] + shares[stage] / 2, stage, f"{shares[stage]:.1%}", ha="center",
                va="center", fontsize=9, color="white" if colour == BLUE else BLACK,
                bbox=None if not hatch else
                {"facecolor": colour, "edgecolor": "none", "pad": 1.2},
            )  # fmt: skip
        left += shares
    names = [f"stage {stage.index}  [{stage.layers[0]}, {stage.layers[1]})" for stage in stages]
    axes.set_yticks(at, names)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    left_out = len(report.stages) - len(stages)
    more = f" (first {len(stages)} of {len(report.stages)} stages)" if left_out else ""
    axes.set_xlabel(f"share of {report.elapsed_s:,.4g} s{more}")
    axes.set_title(title(report, "where each stage's time went"), loc="left", fontsize=11)
    if left.any():
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    tidy(axes)
    return figure


def _draw_latency(run_dir: Path, report: Report) -> "Figure":
    """Distributions of TTFT and TPOT, with the report's percentiles."""
    table = read_table(run_dir, "requests", ["arrival_s", "ttft_s", "tpot_s", "e2e_s"])
    columns = {name: table[name].to_numpy() for name in table.column_names}
    start = report.measured_window_s[0]
    least = start or -1.0  # A window that starts at 0 includes 0.
    is_first_credited = columns["arrival_s"] + columns["ttft_s"] > least
    is_end_credited = columns["arrival_s"] + columns["e2e_s"] > least
    figure = new_figure(9, 4)
    panels = figure.subplots(1, 2)
    first, paced = report.latency.ttft_s, report.latency.tpot_s
    _histogram(
        panels[0], columns["ttft_s"][is_first_credited], first, "TTFT", "arrival to first token"
    )
    _histogram(
        panels[1], columns["tpot_s"][is_end_credited], paced, "TPOT", "mean time per later token"
    )
    figure.suptitle(title(report, "latency of requests"), x=0.01, ha="left", fontsize=11)
    return figure


def _histogram(axes: "Axes", values: Floats, part: LatencyPart, name: str, meaning: str) -> None:
    from matplotlib.ticker import MaxNLocator

    values = values[np.isfinite(values)]
    axes.set_xlabel(f"{meaning}, s")
    axes.set_ylabel("requests")
    axes.set_title(f"{name}, {part.n:,} samples", fontsize=10)
    tidy(axes)
    if not values.size:
        _say(axes, "no samples")
        return
    low, high = float(values.min()), float(values.max())
    is_wide = low > 0 and high > 30 * low
    if is_wide:
        axes.set_xscale("log")
    if high <= low * (1 + 1e-9):  # All equal: one bar of a visible width.
        low, high = low - max(0.05 * abs(low), 1e-9), high + max(0.05 * abs(high), 1e-9)
    edges = np.geomspace(low, high, BINS + 1) if is_wide else np.linspace(low, high, BINS + 1)
    axes.hist(values, bins=edges.tolist(), color=SKY, edgecolor="white", linewidth=0.3)
    styles = {"p50": ("-", BLUE), "p90": ("--", ORANGE), "p99": (":", RED)}
    for quantile, (style, colour) in styles.items():
        value = getattr(part, quantile)
        few = " *" if quantile in part.few_samples else ""
        label = f"{quantile} {value:,.4g} s{few}"
        axes.axvline(value, linestyle=style, color=colour, linewidth=1.6, label=label)
    heading = "* too few samples" if part.few_samples else None
    axes.legend(
        frameon=False, fontsize=8, title=heading, title_fontsize=8, ncols=3, loc="upper center",
        bbox_to_anchor=(0.5, -0.15), handlelength=1.6, columnspacing=1.2,
    )  # fmt: skip
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))


def _draw_queue_and_kv(run_dir: Path, report: Report) -> "Figure":
    """Waiting, running and KV over the run."""
    from matplotlib.ticker import MaxNLocator

    table = read_table(run_dir, "samples", ["at_s", "waiting", "running", "kv_blocks_in_use"])
    at, waiting, running, blocks = (table[name].to_numpy() for name in table.column_names)
    figure = new_figure(9, 5)
    requests, kv = figure.subplots(2, 1, sharex=True)
    requests.set_ylabel("requests")
    kv.set_ylabel("KV blocks in use")
    kv.set_xlabel("time, s")
    requests.set_title(title(report, "queue and KV over time"), loc="left", fontsize=11)
    tidy(requests)
    tidy(kv)
    _scale_kv(kv, report)
    requests.set_xlim(0, report.elapsed_s or 1.0)
    if not at.size:
        _say(requests, "no samples were taken")
        return figure
    for axes, values, name, colour, style in (
        (requests, running, "running", BLUE, "-"),
        (requests, waiting, "waiting", ORANGE, "--"),
        (kv, blocks, "in use", GREEN, "-"),
    ):
        times, levels = thinned(at, values)
        axes.step(
            times, levels, where="post", color=colour, linestyle=style, linewidth=1.3, label=name
        )
    requests.set_ylim(bottom=0)
    requests.yaxis.set_major_locator(MaxNLocator(integer=True))
    requests.legend(
        frameon=False,
        fontsize=9,
        loc="lower right",
        ncols=2,
        bbox_to_anchor=(1, 1),
        borderpad=0,
    )
    warmup = report.measured_window_s[0]
    if warmup:
        for axes in (requests, kv):
            axes.axvspan(0, warmup, color=PALE, zorder=0)
        requests.annotate(
            "warm-up", (warmup, 1), xycoords=("data", "axes fraction"), ha="left", va="top",
            xytext=(3, -2), textcoords="offset points", fontsize=8, color=GREY,
        )  # fmt: skip
    return figure


def _scale_kv(axes: "Axes", report: Report) -> None:
    """Show the limit where use comes near it; else use the height, and say the limit."""
    total, peak = report.kv.blocks_total, report.kv.blocks_peak
    if 3 * peak > total:
        axes.axhline(total, color=RED, linestyle="--", linewidth=1.2)
        axes.set_ylim(0, 1.15 * total)
        text, at = f"all {total:,} blocks", float(total)
    else:
        axes.set_ylim(0, 1.25 * max(1, peak))
        text, at = f"peak {peak:,} of {total:,} blocks", 1.12 * max(1, peak)
    axes.annotate(
        text, (0.005, at), xycoords=("axes fraction", "data"), va="bottom", xytext=(0, 2),
        textcoords="offset points", color=RED, fontsize=9,
    )  # fmt: skip


def thinned(at: Floats, values: "np.ndarray[Any, Any]") -> tuple[Floats, "np.ndarray[Any, Any]"]:
    """At most POINTS_MAX points; of each group the lowest and the highest stay, in order."""
    groups = POINTS_MAX // 2
    if at.size <= POINTS_MAX:
        return at, values
    edges = np.linspace(0, at.size, groups + 1).astype(int)
    keep = sorted(
        {
            index
            for start, stop in pairwise(edges)
            for index in (
                start + int(values[start:stop].argmin()),
                start + int(values[start:stop].argmax()),
            )
        }
    )
    return at[keep], values[keep]


def _say(axes: "Axes", text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
