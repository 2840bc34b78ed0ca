"""The plots: made from files alone, the same bytes each time, and the picture of the ring is true."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from kvasir_core.errors import ScenarioError
from kvasir_scenario import plot_ring
from kvasir_scenario.plot_ring import MERGED, SLICES_MAX, Slice, draw_timeline
from kvasir_scenario.plots import POINTS_MAX, new_figure, thinned, write_plots
from kvasir_scenario.report import write_report
from kvasir_scenario.report_schema import Report
from kvasir_scenario.run_dir import PLOTS, prepare_run_dir
from tests.scenario.hand_ring import HandRing, plan_of


def a_run(out: Path, *, horizon_s: float | None = None, warmup_s: float = 0) -> Report:
    requests = [(0.4 * index, 64 * (1 + index % 3), 1 + index % 4) for index in range(12)]
    plan = plan_of((1, 1, 1), window=3, micro_batch_width=4)
    report = HandRing(plan, (0.3, 0.4, 0.3), prepare_run_dir(out)).run(
        requests, horizon_s=horizon_s, warmup_s=warmup_s
    )
    write_report(out, report)
    return report


def boxes(axes: Axes) -> list[Rectangle]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]


def test_all_plots_are_drawn_from_the_files_of_a_run(tmp_path: Path) -> None:
    a_run(tmp_path, horizon_s=6, warmup_s=1)
    paths = write_plots(tmp_path)
    assert [path.name for path in paths] == [f"{name}.png" for name in PLOTS]
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_plots_of_the_same_run_have_the_same_bytes(tmp_path: Path) -> None:
    content = []
    for name in ("a", "b"):
        report = a_run(tmp_path / name)
        content.append([path.read_bytes() for path in write_plots(tmp_path / name, report)])
    assert content[0] == content[1]
    assert b"matplotlib" not in b"".join(content[0])


@pytest.mark.parametrize("requests", [[], [(0.0, 1, 1)], [(0.0, 9000, 1)]])
def test_runs_with_next_to_nothing_in_them_can_be_drawn(
    tmp_path: Path, requests: list[tuple[float, int, int]]
) -> None:
    write_report(tmp_path, HandRing(plan_of(), (1.0, 1.0), prepare_run_dir(tmp_path)).run(requests))
    assert len(write_plots(tmp_path)) == len(PLOTS)


def test_a_directory_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"no report.json"):
        write_plots(tmp_path)
    report = a_run(tmp_path / "run")
    (tmp_path / "run" / "spans.parquet").write_bytes(b"not a table")
    with pytest.raises(ScenarioError, match=r"spans.parquet: cannot be read"):
        write_plots(tmp_path / "run", report)
    (tmp_path / "run" / "report.json").write_text("{}")
    with pytest.raises(ScenarioError, match="not a report of this version"):
        write_plots(tmp_path / "run")


def test_the_picture_of_a_short_run_shows_every_execution_of_every_stage(tmp_path: Path) -> None:
    requests = [(0.0, 1, 2), (1.0, 1, 2), (2.0, 65, 1)]
    plan = plan_of((1, 1, 1, 1), window=4)
    report = HandRing(plan, (1.0,) * 4, prepare_run_dir(tmp_path)).run(requests)
    axes = draw_timeline(tmp_path, report).axes[0]
    assert len(axes.patches) == 4 + 4 * report.micro_batches  # A lane each, and the holds.
    hatched = [patch for patch in axes.patches if patch.get_hatch()]
    assert len(hatched) == 4 * 4  # Chunks: one each of A and B, two of C.
    labels = {text.get_text() for text in axes.texts}
    assert labels == {"0", "1", "2"}
    assert axes.get_xlim() == (0.0, report.elapsed_s)


def test_a_long_run_is_cut_to_a_window_in_which_no_stage_looks_starved_by_the_cut(
    tmp_path: Path,
) -> None:
    report = HandRing(plan_of(window=2), (1.0, 1.0), prepare_run_dir(tmp_path)).run(
        [(0, 1, 1500)] * 2
    )
    axes = draw_timeline(tmp_path, report).axes[0]
    start, stop = axes.get_xlim()
    assert stop - start == plot_ring.LAPS_SHOWN
    assert start > 100  # Far from the first laps.
    lanes, holds = boxes(axes)[:2], boxes(axes)[2:]
    for lane in lanes:
        widths = [hold.get_width() for hold in holds if hold.get_y() == lane.get_y()]
        assert sum(widths) == pytest.approx(stop - start)


def test_a_blocked_stage_is_drawn_as_blocked(tmp_path: Path) -> None:
    shown = {0: (Slice(0, is_decode=True, rows=1),)}
    hold = plot_ring.Hold(0, 0, 1.0, 2.0, 3.5, shown[0])
    figure = new_figure(4, 2)
    axes = figure.add_subplot()
    plot_ring._draw_holds(axes, [hold], (0.0, 4.0))
    plot_ring._legend(figure, [hold], 0)
    computing, blocked = boxes(axes)
    assert (computing.get_x(), computing.get_width()) == (1.0, 1.0)
    assert (blocked.get_x(), blocked.get_width()) == (2.0, 1.5)
    assert blocked.get_hatch() == "xxx"
    assert "blocked (holds, not computing)" in {
        text.get_text() for text in figure.legends[0].get_texts()
    }


def test_many_spans_become_few_slices_with_the_prompts_told_apart() -> None:
    decodes = [Slice(k, is_decode=True, rows=1) for k in range(40)]
    chunks = [Slice(100 + k, is_decode=False, rows=10) for k in range(9)]
    merged = plot_ring._merged([*decodes, *chunks])
    assert len(merged) == SLICES_MAX
    assert merged[0] == Slice(MERGED, is_decode=True, rows=40)
    assert [each.request for each in merged[1:]] == [100, 101, 102, 103, MERGED]
    assert sum(each.rows for each in merged) == 40 + 90
    assert plot_ring._merged(decodes[:SLICES_MAX]) == tuple(decodes[:SLICES_MAX])
    assert len(plot_ring._merged(chunks)) == SLICES_MAX


def test_thinning_keeps_peaks_and_order() -> None:
    at = np.arange(50_000.0)
    values = np.zeros(50_000)
    values[[17, 31_234]] = (5, 9)
    times, levels = thinned(at, values)
    assert times.size <= POINTS_MAX
    assert (np.diff(times) > 0).all()
    assert set(levels[levels > 0]) == {5, 9}
    assert thinned(at[:10], values[:10])[0].size == 10


def test_micro_batches_that_returned_out_of_order_are_one_block_still() -> None:
    one = (Slice(0, is_decode=True, rows=1),)
    ids = [*range(1, 200, 2), *range(0, 200, 2), 5000, 5001]
    block, shown = plot_ring.choose_window(dict.fromkeys(ids, one), 4)
    assert block == list(range(200))
    assert len(shown) == plot_ring.LAPS_SHOWN
