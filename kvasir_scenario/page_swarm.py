"""The page's elastic curve: load, the market's answer, who serves, and what it gives and costs."""

from pathlib import Path
from typing import Any

import numpy as np

from kvasir_scenario.page_figures import line, panels
from kvasir_scenario.page_part import Drawing, number
from kvasir_scenario.plot_swarm import COLUMNS, STANDINGS
from kvasir_scenario.plots import BLUE, GREY, ORANGE, PALE, PURPLE, RED, YELLOW, read_table, thinned
from kvasir_scenario.report_schema import Report

ENGAGED_MAX = 200  # Times that expert work was given to workers, drawn as shading.
LINES: tuple[tuple[str, str, str, str, str], ...] = (
    ("y", "running", "requests running", BLUE, "solid"),
    ("y", "waiting", "requests waiting", ORANGE, "dash"),
    ("y2", "target", "replicas wanted", RED, "solid"),
    ("y2", "claims", "claims open", PURPLE, "dot"),
    ("y3", "workers_online", "workers online", GREY, "dash"),
    ("y4", "tokens_per_s", "output tokens/s", BLUE, "solid"),
    ("y5", "remote_share", "share of pairs from workers", YELLOW, "solid"),
    ("y6", "tpot_s", "time per token, s", BLUE, "solid"),
)
"""Panel, column, name, colour, dash."""
PANELS = (
    ("load", None),
    ("market", None),
    ("workers", None),
    ("tokens/s", None),
    ("remote", ".0%"),
    ("s/token", None),
)


def elastic_curve(run_dir: Path, report: Report) -> Drawing:
    """Six panels over one time axis; shaded where expert work goes to workers."""
    table = read_table(run_dir, "swarm", COLUMNS)
    columns = {name: table[name].to_numpy() for name in table.column_names}
    at = columns["at_s"]
    traces = [
        line(name, at, columns[column], colour, dash=dash, axis=axis, shape="vh")
        for axis, column, name, colour, dash in LINES
    ]
    for name, colour in STANDINGS:
        if columns[name].any():
            times, levels = thinned(at, columns[name])
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "name": f"workers {name}",
                    "x": [number(value) for value in times.tolist()],
                    "y": [number(value) for value in levels.tolist()],
                    "yaxis": "y3",
                    "line": {"color": colour, "width": 1.8, "shape": "vh"},
                }
            )
    traces += _bounds(report)
    return Drawing(
        anchor="elastic",
        heading="The swarm over time",
        caption="The elastic curve. Shaded: expert work goes to workers.",
        traces=traces,
        height=900,
        layout=panels(PANELS, report.elapsed_s, shapes=_shades(columns)),
    )


def _shades(columns: dict[str, Any]) -> list[dict[str, Any]]:
    at, engaged = columns["at_s"], columns["is_engaged"].astype(int)
    if not at.size:
        return []
    edges = np.flatnonzero(np.diff(engaged, prepend=0, append=0))
    pairs = list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))[:ENGAGED_MAX]
    return [
        {
            "type": "rect", "xref": "x", "yref": "paper", "x0": number(at[start]),
            "x1": number(at[min(stop, at.size - 1)]), "y0": 0, "y1": 1, "fillcolor": PALE,
            "line": {"width": 0}, "layer": "below",
        }
        for start, stop in pairs
    ]  # fmt: skip


def _bounds(report: Report) -> list[dict[str, Any]]:
    """What the peak could give, and what the stages alone would."""
    swarm = report.swarm
    if swarm is None or swarm.bound is None or swarm.rest is None:
        return []
    span = [number(swarm.peak.start_s), number(swarm.peak.stop_s)]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "x": span,
            "y": [number(value)] * 2,
            "yaxis": "y4",
            "line": {"color": colour, "dash": dash, "width": 1.4},
        }
        for name, value, colour, dash in (
            (f"bound ({swarm.bound.limited_by})", swarm.bound.output_tokens_per_s, RED, "dash"),
            (
                "bound without workers",
                swarm.bound.alone_output_tokens_per_s,
                ORANGE,
                "dot",
            ),
        )
    ]
