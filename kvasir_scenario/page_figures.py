"""The page's drawings of one run and its variants, as the plotting library reads them."""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from kvasir_core.errors import ScenarioError
from kvasir_scenario.page_part import Drawing, number, numbers
from kvasir_scenario.plots import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PARTS,
    PURPLE,
    RED,
    SKY,
    STAGES_MAX,
    read_table,
    thinned,
)
from kvasir_scenario.report_schema import Report
from kvasir_scenario.tables import Floats, Ints

Runs = Sequence[tuple[str, Report]]
SHAPES = {"": "", "///": "/", "...": "."}  # Hatches of the pictures, as this library names them.
CURVE_POINTS = 300  # Of a distribution: a step is thinner than the line.
BINS = 240  # Of the run's time: one is two pixels wide on a phone.
HEAT = [
    [0.0, "#eeeeee"], [0.25, "#c6dbef"], [0.5, "#7fb8dc"], [0.75, "#2f86bd"], [1.0, "#08456e"],
]  # One hue from pale to dark: also read in grey.  # fmt: skip
LIMIT_COLOURS = {
    "nothing_waiting": ("#eeeeee", ""),
    "row_width": (BLUE, ""),
    "micro_batch_width": (ORANGE, "/"),
    "cohort": (SKY, "."),
    "running_cap": (PURPLE, "x"),
    "kv": (RED, "\\"),
}


def time_split(report: Report) -> Drawing:
    """One bar per stage, from what it held to why it was empty-handed."""
    stages = report.stages[:STAGES_MAX]
    elapsed = report.elapsed_s or 1.0
    names = [f"stage {each.index} [{each.layers[0]}, {each.layers[1]})" for each in stages]
    traces = [
        _bar(name, names, [seconds(stage) / elapsed for stage in stages], colour, SHAPES[hatch])
        for name, colour, hatch, seconds in PARTS
        if any(seconds(stage) for stage in stages)
    ]
    return Drawing(
        anchor="split",
        heading="Where each stage's time went",
        caption=f"Shares of {report.elapsed_s:,.4g} s; layers are [start, stop).",
        traces=traces,
        height=150 + 34 * len(stages),
        layout=_stacked(),
    )


def limits(runs: Runs) -> Drawing:
    """What ended the micro-batches of each run: this tells starved from saturated."""
    names = [escape(name) for name, _ in runs]
    totals = [max(1, run.micro_batches) for _, run in runs]
    traces = []
    for limit, (colour, shape) in LIMIT_COLOURS.items():
        counts = [getattr(run.binding_limits, limit) for _, run in runs]
        if any(counts):
            shares = [found / total for found, total in zip(counts, totals, strict=True)]
            traces.append(_bar(limit.replace("_", " "), names, shares, colour, shape))
    return Drawing(
        anchor="limits",
        heading="What stopped micro-batches from growing",
        caption=(
            "Nothing waiting: the ring had room for more. Anything else: work was left behind."
        ),
        traces=traces,
        height=150 + 34 * len(runs),
        layout=_stacked(),
    )


def _stacked() -> dict[str, Any]:
    return {
        "barmode": "stack",
        "hovermode": "closest",
        "xaxis": {"range": [0, 1], "tickformat": ".0%", "fixedrange": True},
        "yaxis": {"autorange": "reversed", "automargin": True, "fixedrange": True},
    }


def _bar(
    name: str, names: Sequence[str], shares: Sequence[float], colour: str, shape: str
) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": list(names),
        "x": [number(each) for each in shares],
        "hovertemplate": "%{y}<br>" + name + ": %{x:.1%}<extra></extra>",
        "marker": {
            "color": colour,
            "line": {"color": "white", "width": 0.6},
            "pattern": {
                "shape": shape,
                "size": 7,
                "solidity": 0.25,
                "fgcolor": "white",
                "fillmode": "overlay",
            },
        },
    }


def variants(runs: Runs) -> Drawing:
    """Throughput and latency of each run, side by side."""
    names = [escape(name) for name, _ in runs]
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "orientation": "h",
            "name": "output tokens/s",
            "showlegend": False,
            "y": names,
            "x": [number(run.throughput.output_tokens_per_s) for _, run in runs],
            "marker": {"color": BLUE},
            "hovertemplate": "%{y}: %{x:,.4g} output tokens/s<extra></extra>",
        }
    ]
    marks = (
        ("TTFT p50", "ttft_s", "p50", ORANGE, "circle"),
        ("TTFT p99", "ttft_s", "p99", RED, "diamond"),
        ("TPOT p50", "tpot_s", "p50", GREEN, "square"),
    )
    for label, part, quantile, colour, symbol in marks:
        values = [getattr(getattr(run.latency, part), quantile) for _, run in runs]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": label,
                "y": names,
                "x": [number(value) for value in values],
                "yaxis": "y2",
                "xaxis": "x2",
                "marker": {"color": colour, "symbol": symbol, "size": 11},
                "hovertemplate": "%{y}, " + label + ": %{x:.4g} s<extra></extra>",
            }
        )
    axis = {"autorange": "reversed", "automargin": True, "fixedrange": True, "type": "category"}
    return Drawing(
        anchor="variants",
        heading="Variants side by side",
        caption="Above: output tokens per second. Below: latency, s (logarithmic).",
        traces=traces,
        height=210 + 60 * len(runs),
        layout={
            "hovermode": "closest",
            "xaxis": {"anchor": "y", "rangemode": "tozero", "title": {"text": "output tokens/s"}},
            "yaxis": {**axis, "domain": [0.6, 1]},
            "xaxis2": {"anchor": "y2", "type": "log", "title": {"text": "latency, s"}},
            "yaxis2": {**axis, "domain": [0, 0.38]},
        },
    )


def queue_and_kv(run_dir: Path, report: Report) -> Drawing:
    """Waiting, running and KV over the run."""
    table = read_table(run_dir, "samples", ["at_s", "waiting", "running", "kv_blocks_in_use"])
    columns = {name: table[name].to_numpy() for name in table.column_names}
    at = columns["at_s"]
    traces = [
        line("requests running", at, columns["running"], BLUE, shape="hv"),
        line("requests waiting", at, columns["waiting"], ORANGE, dash="dash", shape="hv"),
        line("KV blocks", at, columns["kv_blocks_in_use"], GREEN, axis="y2", shape="hv"),
    ]
    return Drawing(
        anchor="queue",
        heading="Queue and KV over the run",
        caption=(
            f"KV: {report.kv.blocks_total:,} blocks on the scarcest stage, "
            f"{report.kv.blocks_peak:,} at the peak."
        ),
        traces=traces,
        height=380,
        layout=panels(
            [("requests", None), ("KV blocks", None)], report.elapsed_s, shapes=_warmup(report)
        ),
    )


def _warmup(report: Report) -> list[dict[str, Any]]:
    warmup = report.measured_window_s[0]
    if not warmup:
        return []
    return [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": 0, "x1": number(warmup), "y0": 0,
            "y1": 1, "fillcolor": GREY, "opacity": 0.15, "line": {"width": 0},
            "label": {"text": "warm-up", "textposition": "top left", "font": {"size": 11}},
        }
    ]  # fmt: skip


def latency(run_dir: Path, report: Report) -> Drawing:
    """Which share of the requests had at most this latency."""
    names = ["arrival_s", "ttft_s", "tpot_s", "e2e_s"]
    table = read_table(run_dir, "requests", names)
    columns = {name: table[name].to_numpy() for name in names}
    least = report.measured_window_s[0] or -1.0  # A window that starts at 0 includes 0.
    arrival = columns["arrival_s"]
    kinds = (
        ("TTFT", "ttft_s", arrival + columns["ttft_s"], ORANGE, "solid"),
        ("TPOT", "tpot_s", arrival + columns["e2e_s"], GREEN, "dash"),
        ("end to end", "e2e_s", arrival + columns["e2e_s"], BLUE, "dot"),
    )
    traces = []
    for label, name, credited, colour, dash in kinds:
        values = columns[name][credited > least]
        values = np.sort(values[np.isfinite(values)])
        if not values.size:
            continue
        places = np.unique(np.linspace(0, values.size - 1, CURVE_POINTS).round().astype(int))
        shares = (places + 1) / values.size
        trace = line(label, values[places], shares, colour, dash=dash, shape="hv")
        trace["hovertemplate"] = f"%{{y:.1%}} have {label} <= %{{x:.4g}} s<extra></extra>"
        traces.append(trace)
    return Drawing(
        anchor="latency",
        heading="Latency of requests",
        caption="Share of the requests that had at most so many seconds (logarithmic).",
        traces=traces,
        height=340,
        layout={
            "hovermode": "closest",
            "xaxis": {"type": "log", "title": {"text": "s"}},
            "yaxis": {"range": [0, 1.02], "tickformat": ".0%", "automargin": True},
        },
    )


def load_over_time(run_dir: Path, report: Report) -> Drawing | None:
    """How busy each stage was at every moment of the whole run; None for a run without time."""
    stages = min(len(report.stages), STAGES_MAX)
    if not report.elapsed_s:
        return None
    busy = _busy_shares(run_dir, stages, report.elapsed_s)
    width = report.elapsed_s / BINS
    return Drawing(
        anchor="load",
        heading="How busy each stage was",
        caption=f"Share of each {width:,.3g} s that the stage computed; dark is busy.",
        traces=[
            {
                "type": "heatmap",
                "x0": number(width / 2),
                "dx": number(width),
                "z": [[number(round(value, 3)) for value in row] for row in busy.tolist()],
                "y": [f"stage {stage.index}" for stage in report.stages[:stages]],
                "zmin": 0,
                "zmax": 1,
                "colorscale": HEAT,
                "colorbar": {"tickformat": ".0%", "thickness": 12, "len": 1},
                "hovertemplate": "%{y} at %{x:.5g} s: %{z:.0%} busy<extra></extra>",
            }
        ],
        height=130 + 26 * stages,
        layout={
            "xaxis": {"title": {"text": "time, s"}},
            "yaxis": {"autorange": "reversed", "automargin": True, "fixedrange": True},
        },
    )


def _busy_shares(run_dir: Path, stages: int, elapsed_s: float) -> Floats:
    """Busy share per stage and bin, read in pieces: the table may be larger than memory."""
    path = run_dir / "stages.parquet"
    columns = ["stage", "start_s", "end_s"]
    edges = np.linspace(0.0, elapsed_s, BINS + 1)
    started, ended = _Moments(stages, edges), _Moments(stages, edges)
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(columns=columns):
                stage, start, end = (batch.column(name).to_numpy(False) for name in columns)
                is_shown = (stage < stages) & np.isfinite(start)
                stage, start, end = stage[is_shown], start[is_shown], end[is_shown]
                started.add(stage, start)
                ended.add(stage, np.where(np.isfinite(end), end, elapsed_s))
    except (OSError, pa.ArrowException) as error:
        raise ScenarioError(f"{path}: cannot be read as a table of a run: {error}") from error
    busy = np.diff(ended.before() - started.before(), axis=1)
    return np.asarray(np.clip(busy / (elapsed_s / BINS), 0.0, 1.0))


class _Moments:
    """Moments per stage, counted by bin: the sum of min(moment, edge), for each edge."""

    def __init__(self, stages: int, edges: Floats) -> None:
        self._edges = edges
        self._shape = (stages, edges.size + 1)
        self._counts = np.zeros(self._shape)
        self._sums = np.zeros(self._shape)

    def add(self, stage: Ints, moments: Floats) -> None:
        keys = stage.astype(np.int64) * self._shape[1] + np.searchsorted(self._edges, moments)
        size = self._counts.size
        self._counts += np.bincount(keys, minlength=size).reshape(self._shape)
        self._sums += np.bincount(keys, moments, minlength=size).reshape(self._shape)

    def before(self) -> Floats:
        later = self._counts.sum(axis=1, keepdims=True) - np.cumsum(self._counts, axis=1)
        sums = np.cumsum(self._sums, axis=1)[:, :-1] + later[:, :-1] * self._edges
        return np.asarray(sums)


def line(
    name: str,
    at: Floats,
    values: Any,
    colour: str,
    *,
    dash: str = "solid",
    axis: str = "y",
    shape: str = "linear",
) -> dict[str, Any]:
    """A line; of many points the lowest and highest of each group stay."""
    known = np.isfinite(np.asarray(values, float))
    times, levels = thinned(at[known], values[known])
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": numbers(times),
        "y": [number(value) for value in levels.tolist()],
        "yaxis": axis,
        "line": {"color": colour, "dash": dash, "width": 1.8, "shape": shape},
    }


def panels(
    rows: Sequence[tuple[str, str | None]],
    elapsed_s: float,
    *,
    shapes: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Panels above each other over one time axis; each with its heading and number format."""
    layout: dict[str, Any] = {
        "hovermode": "x unified",
        "shapes": list(shapes),
        "xaxis": {
            "range": [0, number(elapsed_s) or 1.0],
            "title": {"text": "time, s"},
            "anchor": "y" if len(rows) == 1 else f"y{len(rows)}",
        },
    }
    step = 1 / len(rows)
    for place, (heading, tickformat) in enumerate(rows):
        top = 1 - place * step
        layout["yaxis" if not place else f"yaxis{place + 1}"] = {
            "domain": [round(max(0.0, top - step + 0.04), 4), round(top, 4)],
            "title": {"text": heading, "standoff": 4},
            "rangemode": "tozero",
            "automargin": True,
            "fixedrange": True,
            **({"tickformat": tickformat} if tickformat else {}),
        }
    return layout
