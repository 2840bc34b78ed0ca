"""The picture of the ring: which request's rows each stage holds, and when it is empty-handed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from kvasir_scenario.plots import (
    BLACK,
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
    title,
)
from kvasir_scenario.report_schema import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = (SKY, ORANGE, GREEN, YELLOW, PURPLE, BLUE, RED)
LIGHT = {SKY, ORANGE, YELLOW, PURPLE, GREY}  # Dark letters are read on these.
LAPS_SHOWN = 24  # Micro-batches side by side that still can be told apart.
SLICES_MAX = 6  # More spans in one micro-batch: its decodes are drawn as one.
STAGES_SHOWN = 12
NEAR = 32  # Ids of one recorded block: at its ends some returned before or after it.
LANE = 0.84  # Of the height between two stages.
MERGED = -1  # Request id of a slice that stands for many decodes.


@dataclass(frozen=True, slots=True)
class Slice:
    """What is drawn of one span."""

    request: int
    is_decode: bool
    rows: int


@dataclass(frozen=True, slots=True)
class Hold:
    """One micro-batch on one stage (seconds)."""

    stage: int
    batch: int
    start: float
    end: float
    sent: float
    slices: tuple[Slice, ...]


def draw_timeline(run_dir: Path, report: Report) -> "Figure":
    """Draw a readable window of the run: each stage's micro-batches by request and phase."""
    members = {batch: _merged(slices) for batch, slices in read_members(run_dir).items()}
    block, shown = choose_window(members, report.plan.window)
    holds = _holds(run_dir, {batch: members[batch] for batch in block}, report.elapsed_s)
    start, stop = _span(holds, shown, is_all=len(shown) == report.micro_batches)
    holds = [hold for hold in holds if hold.start < stop and hold.sent > start]
    stages = min(len(report.stages), STAGES_SHOWN)
    figure = new_figure(12, 1.7 + 0.8 * stages)
    axes = figure.add_subplot()
    axes.set_ylim(stages - 0.5, -0.5)
    names = [
        f"stage {stage.index}\nlayers [{stage.layers[0]}, {stage.layers[1]})"
        for stage in report.stages[:stages]
    ]
    axes.set_yticks(range(stages), names)
    axes.set_xlabel("time, s")
    axes.set_title(title(report, "the ring"), loc="left", fontsize=11)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    if holds:
        axes.set_xlim(start, stop)
        for stage in range(stages):
            axes.barh(stage, stop - start, left=start, height=LANE, color=PALE, zorder=0)
        _draw_holds(axes, [hold for hold in holds if hold.stage < stages], (start, stop))
    _legend(figure, holds, len(report.stages) - stages)
    return figure


def read_members(run_dir: Path) -> dict[int, list[Slice]]:
    """Per recorded micro-batch its spans, decodes first."""
    table = read_table(
        run_dir, "spans", ["micro_batch_id", "request_id", "rows", "is_decode"]
    ).to_pydict()
    members: dict[int, list[Slice]] = defaultdict(list)
    for batch, request, rows, is_decode in zip(*table.values(), strict=True):
        members[batch].append(Slice(request, is_decode, rows))
    return dict(members)


def _merged(slices: list[Slice]) -> tuple[Slice, ...]:
    """At most SLICES_MAX slices: many decodes become one, then many chunks do."""
    if len(slices) <= SLICES_MAX:
        return tuple(slices)
    decodes = [each for each in slices if each.is_decode]
    chunks = [each for each in slices if not each.is_decode]
    if decodes:
        decodes = [Slice(MERGED, is_decode=True, rows=len(decodes))]
    room = SLICES_MAX - len(decodes)
    if len(chunks) > room:
        rest = sum(each.rows for each in chunks[room - 1 :])
        chunks = [*chunks[: room - 1], Slice(MERGED, is_decode=False, rows=rest)]
    return (*decodes, *chunks)


def choose_window(
    members: Mapping[int, Sequence[Slice]], window: int
) -> tuple[list[int], list[int]]:
    """The recorded block nearest the run's middle, and consecutive micro-batches of it to show.

    Those shown have both phases if they can, and so many before them that no stage looks starved
    only because what it held was not recorded.
    """
    blocks: list[list[int]] = []
    for batch in sorted(members):  # Where stages overlap, they returned in another order.
        if blocks and batch - blocks[-1][-1] <= NEAR:
            blocks[-1].append(batch)
        else:
            blocks.append([batch])
    if not blocks:
        return [], []
    middle = blocks[-1][-1] / 2
    block = min(blocks, key=lambda ids: abs(ids[len(ids) // 2] - middle))
    if len(block) <= LAPS_SHOWN:
        return block, block
    before = 0 if block[0] == 0 else min(window, len(block) - LAPS_SHOWN)
    starts = range(before, len(block) - LAPS_SHOWN + 1, 4)

    def mixture(start: int) -> int:
        phases = [
            each.is_decode for batch in block[start : start + LAPS_SHOWN] for each in members[batch]
        ]
        return min(sum(phases), len(phases) - sum(phases))

    best = max(starts, key=lambda start: (mixture(start), -start))
    return block, block[best : best + LAPS_SHOWN]


def _span(holds: list[Hold], shown: list[int], *, is_all: bool) -> tuple[float, float]:
    """The time to draw: a whole short run, else while stage 0 holds what is shown."""
    here = [hold for hold in holds if is_all or (hold.stage == 0 and hold.batch in set(shown))]
    if not here:
        return 0.0, 1.0
    start, stop = min(hold.start for hold in here), max(hold.sent for hold in here)
    return start, stop if stop > start else start + 1.0


def _holds(run_dir: Path, shown: dict[int, tuple[Slice, ...]], end: float) -> list[Hold]:
    if not shown:
        return []
    low, high = min(shown), max(shown)
    is_shown = (pc.field("micro_batch_id") >= low) & (pc.field("micro_batch_id") <= high)
    names = ["stage", "micro_batch_id", "start_s", "end_s", "sent_s"]
    table = read_table(run_dir, "stages", names, filters=is_shown).to_pydict()
    holds = []
    for stage, batch, start, stop, sent in zip(*table.values(), strict=True):
        if batch in shown and start is not None:
            ended = end if stop is None else stop
            holds.append(
                Hold(stage, batch, start, ended, ended if sent is None else sent, shown[batch])
            )
    return holds


def _draw_holds(axes: "Axes", holds: list[Hold], drawn: tuple[float, float]) -> None:
    from matplotlib.patches import Rectangle

    for hold in holds:
        height = LANE / len(hold.slices)
        top = hold.stage - LANE / 2
        for place, each in enumerate(hold.slices):
            y = top + place * height
            colour = _colour(each.request)
            axes.add_patch(
                Rectangle(
                    (hold.start, y), hold.end - hold.start, height, facecolor=colour,
                    edgecolor="white", linewidth=0.7, hatch=None if each.is_decode else "////",
                )
            )  # fmt: skip
            if drawn[0] <= hold.start and hold.end <= drawn[1]:
                _label(axes, hold, each, y + height / 2, drawn[1] - drawn[0])
        if hold.sent > hold.end:
            axes.add_patch(
                Rectangle(
                    (hold.end, top), hold.sent - hold.end, LANE, facecolor="white",
                    edgecolor=RED, linewidth=0.8, hatch="xxx",
                )
            )  # fmt: skip


def _colour(request: int) -> str:
    return GREY if request == MERGED else COLOURS[request % len(COLOURS)]


def _label(axes: "Axes", hold: Hold, each: Slice, y: float, span: float) -> None:
    """The request's number, where it fits: some 150 letters fit side by side."""
    text = f"{each.rows} rows" if each.request == MERGED else str(each.request)
    size = 8 if len(hold.slices) <= 3 and each.request != MERGED else 6
    width = (len(text) + 1) * size / 8 * 0.0065
    if (hold.end - hold.start) / span < width:
        return
    colour = _colour(each.request)
    axes.text(
        (hold.start + hold.end) / 2, y, text, ha="center", va="center", fontsize=size,
        color=BLACK if colour in LIGHT or not each.is_decode else "white",
        bbox=None if each.is_decode else {"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        clip_on=True,
    )  # fmt: skip


def _legend(figure: "Figure", holds: list[Hold], stages_left_out: int) -> None:
    from matplotlib.patches import Patch

    slices = [each for hold in holds for each in hold.slices]
    handles = [
        Patch(facecolor=SKY, edgecolor="white", hatch="////", label="prompt rows (hatched)"),
        Patch(facecolor=SKY, edgecolor="white", label="decode row (plain)"),
    ]
    if any(each.request == MERGED for each in slices):
        handles.append(Patch(facecolor=GREY, label="many requests, their rows together"))
    if any(hold.sent > hold.end for hold in holds):
        handles.append(
            Patch(
                facecolor="white",
                edgecolor=RED,
                hatch="xxx",
                label="blocked (holds, not computing)",
            )
        )
    handles.append(Patch(facecolor=PALE, label="starved (empty-handed)"))
    more = f"; {stages_left_out} more stages are not drawn" if stages_left_out else ""
    requests = len(np.unique([each.request for each in slices if each.request != MERGED]))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=5,
        frameon=False,
        fontsize=9,
        title=f"a colour and number per request, {requests} seen here{more}",
        title_fontsize=9,
    )
