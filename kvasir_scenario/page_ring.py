"""The page's timeline of the ring, to zoom into: every micro-batch of an excerpt on every stage."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from kvasir_scenario.page_part import Drawing, number
from kvasir_scenario.plot_ring import Slice, choose_window, read_members
from kvasir_scenario.plots import BLUE, ORANGE, PALE, RED, SKY, read_table
from kvasir_scenario.report_schema import Report
from kvasir_scenario.wording import duration

BARS_MAX = 2400  # More make a phone slow; a picture of them shows no more.
LAPS_MAX = 400
STAGES_MAX = 32  # Lanes that can be told apart.
MEMBERS_MAX = 8  # Named one by one when a micro-batch is pointed at.
LANE = 0.8  # Of the height between two stages.


@dataclass(frozen=True, slots=True)
class Lap:
    """What is said of one micro-batch wherever it is."""

    rows: int
    prompt_rows: int
    limit: str
    members: str

    @property
    def kind(self) -> str:
        if not self.prompt_rows:
            return "decodes only"
        return "prompts only" if self.prompt_rows == self.rows else "prompts and decodes"


KINDS = (
    ("decodes only", SKY, ""),
    ("prompts and decodes", BLUE, "/"),
    ("prompts only", ORANGE, "x"),
)
"""What a micro-batch is made of: name, colour, hatch."""


def timeline(run_dir: Path, report: Report) -> Drawing:
    """Bars per stage: computing, by what the micro-batch is made of, and blocked behind it."""
    stages = min(len(report.stages), STAGES_MAX)
    members = read_members(run_dir)
    block, shown = choose_window(members, report.plan.window)
    excerpt = _excerpt(block, shown, min(LAPS_MAX, max(1, BARS_MAX // max(1, stages))))
    laps = _laps(run_dir, {batch: members[batch] for batch in excerpt})
    traces, view = _bars(run_dir, report, laps, stages, set(shown))
    names = [f"stage {stage.index}" for stage in report.stages[:stages]]
    notes = []
    if len(laps) < report.micro_batches:
        notes.append(
            f"An excerpt: {len(laps):,} of {report.micro_batches:,} micro-batches. A run keeps the "
            "members of some only; micro_batches.parquet and stages.parquet hold the rest."
        )
    if stages < len(report.stages):
        notes.append(f"The first {stages} of {len(report.stages)} stages.")
    return Drawing(
        anchor="timeline",
        heading="The ring over time",
        caption=(
            "Each bar is one micro-batch on one stage: point at it for its members, rows and "
            "binding limit. Pale is a stage with nothing in hand. Drag to zoom, double-click to "
            "see the whole excerpt."
        ),
        notes=notes,
        traces=traces,
        height=150 + 44 * stages,
        layout={
            "barmode": "overlay",
            "hovermode": "closest",
            "dragmode": "zoom",
            "plot_bgcolor": PALE,
            "xaxis": {"title": {"text": "time, s"}, "range": view, "showgrid": False},
            "yaxis": {
                "tickvals": list(range(stages)),
                "ticktext": names,
                "range": [stages - 0.5, -0.5],
                "fixedrange": True,
                "showgrid": False,
                "automargin": True,
            },
        },
    )


def _excerpt(block: Sequence[int], shown: Sequence[int], laps_max: int) -> list[int]:
    """Consecutive micro-batches of the recorded block, with those shown first in their middle."""
    if len(block) <= laps_max:
        return list(block)
    middle = block.index(shown[0]) + len(shown) // 2
    start = min(max(0, middle - laps_max // 2), len(block) - laps_max)
    return list(block[start : start + laps_max])


def _laps(run_dir: Path, members: dict[int, list[Slice]]) -> dict[int, Lap]:
    if not members:
        return {}
    low, high = min(members), max(members)
    is_shown = (pc.field("micro_batch_id") >= low) & (pc.field("micro_batch_id") <= high)
    names = ["micro_batch_id", "rows", "prefill_rows", "binding_limit"]
    table = read_table(run_dir, "micro_batches", names, filters=is_shown).to_pydict()
    return {
        batch: Lap(rows, prompt_rows, limit.replace("_", " "), _members(members[batch]))
        for batch, rows, prompt_rows, limit in zip(*table.values(), strict=True)
        if batch in members
    }


def _members(slices: Sequence[Slice]) -> str:
    named = [
        f"request {each.request}: "
        + ("decode" if each.is_decode else f"{each.rows} prompt row{'s' * (each.rows != 1)}")
        for each in slices[:MEMBERS_MAX]
    ]
    if len(slices) > MEMBERS_MAX:
        named.append(f"and {len(slices) - MEMBERS_MAX} more")
    return "<br>".join(named)


def _bars(
    run_dir: Path, report: Report, laps: dict[int, Lap], stages: int, shown: set[int]
) -> tuple[list[dict[str, Any]], list[float]]:
    """The traces, and the span of time to show first."""
    computing = {name: _trace(name, colour, hatch) for name, colour, hatch in KINDS}
    blocked = _trace("blocked (holds, not computing)", RED, "\\")
    view = [report.elapsed_s, 0.0]
    for stage, batch, start, stop, sent in _holds(run_dir, report, laps, stages):
        lap = laps[batch]
        about = (
            f"micro-batch {batch} on stage {stage}<br>{lap.rows} rows: {lap.prompt_rows} of "
            f"prompts, {lap.rows - lap.prompt_rows} decodes<br>{lap.members}<br>stopped by: "
            f"{escape(lap.limit)}<br>computed {duration(stop - start)} from {start:,.6g} s"
        )
        if sent > stop:
            about += f"<br>then blocked for {duration(sent - stop)}"
            _add(blocked, stage, stop, sent, about)
        _add(computing[lap.kind], stage, start, stop, about)
        if batch in shown and stage == 0:
            view = [min(view[0], start), max(view[1], sent)]
    traces = [trace for trace in (*computing.values(), blocked) if trace["x"]]
    if len(shown) == report.micro_batches or view[0] >= view[1]:
        view = [0.0, report.elapsed_s or 1.0]
    return traces, [number(value) or 0.0 for value in view]


def _holds(
    run_dir: Path, report: Report, laps: dict[int, Lap], stages: int
) -> list[tuple[int, int, float, float, float]]:
    """Stage, micro-batch, start, end of computing, sent: in the order of the table."""
    if not laps:
        return []
    low, high = min(laps), max(laps)
    field = pc.field("micro_batch_id")
    is_shown = (field >= low) & (field <= high) & (pc.field("stage") < stages)
    names = ["stage", "micro_batch_id", "start_s", "end_s", "sent_s"]
    table = read_table(run_dir, "stages", names, filters=is_shown).to_pydict()
    holds = []
    for stage, batch, start, stop, sent in zip(*table.values(), strict=True):
        if batch in laps and start is not None:
            ended = report.elapsed_s if stop is None else stop
            holds.append((stage, batch, start, ended, ended if sent is None else sent))
    return holds


def _trace(name: str, colour: str, hatch: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "width": LANE,
        "x": [],
        "y": [],
        "base": [],
        "hovertext": [],
        "hoverinfo": "text",
        "marker": {
            "color": colour,
            "line": {"color": "white", "width": 0.6},
            "pattern": {
                "shape": hatch,
                "size": 6,
                "solidity": 0.25,
                "fgcolor": "white",
                "fillmode": "overlay",
            },
        },
    }


def _add(trace: dict[str, Any], stage: int, start: float, stop: float, about: str) -> None:
    trace["x"].append(number(stop - start))
    trace["y"].append(stage)
    trace["base"].append(number(start))
    trace["hovertext"].append(about)
