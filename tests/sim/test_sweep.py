"""Axes, points, samples and the table of a sweep; points are run in this process."""

import sqlite3
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvasir_core.errors import ScenarioError
from kvasir_scenario.load import load_scenario
from kvasir_scenario.report_schema import Report
from kvasir_scenario.schema import Scenario
from kvasir_sim.simulate import simulate
from kvasir_sim.sweep import evaluate
from kvasir_sim.sweep.axes import Range, read_axes
from kvasir_sim.sweep.figures import FIGURES, figures_of
from kvasir_sim.sweep.journal import journal_path
from kvasir_sim.sweep.points import Source, Sweep, hash_of
from kvasir_sim.sweep.run import Run, Stopped
from kvasir_sim.sweep.samples import draw_samples
from kvasir_sim.sweep.table import read_table
from tests.sim.sweeps import HerePool, refusal, small, sweep_of

SHIPPED = Path(__file__).parents[2] / "scenarios"


def values_of(text: str) -> tuple[object, ...]:
    (axis,), _ = read_axes([text], [])
    return axis.values


def finished(sweep: Sweep, out: Path) -> HerePool:
    run, pool = Run(sweep, out), HerePool(sweep.source)
    run.work(pool)
    run.finish()
    return pool


def test_values_are_yaml_and_ranges_include_their_stop() -> None:
    assert values_of("ring.window=1,2,auto") == (1, 2, "auto")
    assert values_of("workload.rate_per_s=2:12:2") == (2, 4, 6, 8, 10, 12)
    assert values_of("workload.rate_per_s=0.1:0.3:0.1,5") == (0.1, 0.2, 0.3, 5)
    assert values_of("x=3:1:-1") == (3, 2, 1)
    assert values_of("ring.kv_tokens=[100, 200],300") == ([100, 200], 300)
    assert values_of("runtime.device=cuda:0,cpu") == ("cuda:0", "cpu")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--grid", "ring.windw=1,2"], "unknown key; did you mean window?"),
        (["--grid", "ring.window=1:8:0"], "the step of 1:8:0 is 0"),
        (["--grid", "ring.window=8:1:1"], "8:1:1 is empty"),
        (["--grid", "ring.window=1:many:1"], "found 'many' in start:stop:step"),
        (["--grid", "ring.window=1:nan:1"], "must be a finite number"),
        (["--grid", "ring.window=1:8"], "a range is start:stop:step"),
        (["--grid", "ring.window="], "found no value"),
        (["--grid", "ring.window"], "its value is missing; it must be KEY=v1,v2"),
        (["--grid", "ring.window=1,2,1"], "1 stands there twice"),
        (["--grid", "ring.window=zero,one"], "no value of it fits"),
        (["--grid", "ring.window=1", "--grid", "ring.window=2"], "is an axis twice"),
        (["--grid", "run.seed=1,2"], "run.seed cannot be an axis; give --seeds"),
        (["--grid", "ring.window=1:1e9:1"], "at most 100000 points"),
        (["--grid", "workload.rate_per_s=1:1000:1", "--seeds", "101"], "101000 points"),
        (["--seeds", "1"], "nothing to sweep"),
        (["--range", "ring.window=1:8"], "go together"),
        (["--sample", "lhs", "--points", "4", "--range", "ring.window=8:1"], "is empty"),
        (["--sample", "lhs", "--points", "4", "--range", "ring.window=1:x"], "found 'x' in lo:hi"),
        (["--grid", "ring.window=1,2", "--out", "table.csv"], "must end in .parquet or .sqlite"),
    ],
)
def test_bad_axes_are_refused_with_what_would_be_right(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refusal(capsys, "sweep", small(tmp_path), *words)
    assert said in error
    assert not (tmp_path / "runs").exists()


def test_points_are_all_combinations_in_order_with_seeds_innermost(tmp_path: Path) -> None:
    points = list(
        sweep_of(small(tmp_path), "ring.window=1,2", "workload.requests=3,4", seeds=2).points()
    )
    assert [(*point.axes, point.seed) for point in points] == [
        (window, requests, seed) for window in (1, 2) for requests in (3, 4) for seed in (7, 8)
    ]
    assert len({point.key for point in points}) == 8


def test_a_point_has_the_same_key_however_it_was_asked_for(tmp_path: Path) -> None:
    path = small(tmp_path)
    (wide,) = sweep_of(path, "ring.window=2").points()
    (long,) = sweep_of(path, "ring.credits=2").points()
    assert wide.key == long.key, (
        "both are the scenario as it stands: 2 is the file's, 2 the default"
    )
    path.write_text(path.read_text().replace("pass_s: 0.01", "pass_s: 0.02"))
    (other,) = sweep_of(path, "ring.window=2").points()
    assert other.key != wide.key


def test_a_price_decides_no_result_and_changes_no_key() -> None:
    for name, key in (("4stage", "devices.gpu"), ("moe_swarm", "experts.workers.0")):
        path = SHIPPED / f"{name}.yaml"
        plain = Source.of_file(path).load()
        priced = Source.of_file(path, (f"{key}.price_per_hour=1.5",)).load()
        assert priced != plain
        assert hash_of(priced, {}) == hash_of(plain, {})


def test_a_key_covers_the_contents_of_the_files_that_a_point_reads(tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    path = small(tmp_path)
    head, _, tail = path.read_text().partition("workload:")
    path.write_text(
        f"{head}workload: {{kind: trace, path: trace.csv, format: csv, time_unit: s}}\n"
        + tail.partition("\n")[2]
    )
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,5,3\n")
    (before,) = sweep_of(path, "ring.window=2").points()
    trace.write_text("arrival,prompt_tokens,output_tokens\n0,5,4\n")
    (after,) = sweep_of(path, "ring.window=2").points()
    assert before.key != after.key


@pytest.mark.parametrize("kind", ["parquet", "sqlite"])
def test_the_table_has_a_row_per_point_with_what_the_report_says(kind: str, tmp_path: Path) -> None:
    path = small(tmp_path)
    out = tmp_path / f"table.{kind}"
    sweep = sweep_of(path, "ring.window=1,0,2", "policy.packer=cohort,drained")
    finished(sweep, out)
    assert not journal_path(out).exists()
    rows = read_table(out)
    points = list(sweep.points())
    assert list(rows) == [point.key for point in points]
    report = simulate(load_scenario(path, ["ring.window=2", "policy.packer=drained"]))
    assert rows[points[-1].key] == {**figures_of(report), "error": None}
    refused = rows[points[2].key]
    assert refused["error"] == "ring.window = 0: ring.window: found 0; it must be at least 1"
    assert {refused[figure.name] for figure in FIGURES} == {None}


def test_the_same_points_make_the_same_bytes(tmp_path: Path) -> None:
    sweep = sweep_of(small(tmp_path), "ring.window=1,2,4")
    for kind in ("parquet", "sqlite"):
        contents = set()
        for attempt in range(2):
            out = tmp_path / f"{attempt}.{kind}"
            finished(sweep, out)
            contents.add(out.read_bytes())
        assert len(contents) == 1


def test_columns_have_the_narrowest_type_that_holds_all_values(tmp_path: Path) -> None:
    out = tmp_path / "table.parquet"
    finished(
        sweep_of(
            small(tmp_path),
            "ring.window=1,auto",
            "workload.rate_per_s=5,7.5",
            "ring.kv_tokens=[320, 480]",
        ),
        out,
    )
    table = pq.read_table(out)
    assert table["ring.window"].to_pylist() == ["1", "1", "auto", "auto"]
    assert table["workload.rate_per_s"].to_pylist() == [5.0, 7.5] * 2
    assert set(table["ring.kv_tokens"].to_pylist()) == {"[320, 480]"}
    assert table["seed"].to_pylist() == [7] * 4
    units = Counter(name.rsplit("_", 1)[-1] for name in table.column_names)
    assert units["s"] > 15


def test_a_stopped_sweep_goes_on_without_running_a_point_twice(tmp_path: Path) -> None:
    sweep, out = sweep_of(small(tmp_path), "ring.window=1:6:1"), tmp_path / "table.parquet"
    run = Run(sweep, out)
    with pytest.raises(Stopped) as stop:
        run.work(HerePool(sweep.source, stop_after=4))
    run.close()
    assert stop.value.done == 4
    assert not out.exists()
    again = finished(sweep, out)
    assert again.count == 2
    finished(sweep, tmp_path / "undisturbed.parquet")
    assert out.read_bytes() == (tmp_path / "undisturbed.parquet").read_bytes()


def test_a_finished_sweep_can_grow_and_keeps_its_rows(tmp_path: Path) -> None:
    path, out = small(tmp_path), tmp_path / "table.sqlite"
    assert finished(sweep_of(path, "ring.window=1,2"), out).count == 2
    assert finished(sweep_of(path, "ring.window=1,2,3", "ring.credits=2"), out).count == 1
    with pytest.raises(ScenarioError, match="2 of 3 points that this sweep does not have"):
        Run(sweep_of(path, "ring.window=2"), out)
    with sqlite3.connect(out) as base:
        assert base.execute("SELECT count(*) FROM points").fetchone() == (3,)
    base.close()


def test_what_is_no_sweep_is_never_replaced(tmp_path: Path) -> None:
    sweep = sweep_of(small(tmp_path), "ring.window=1")
    for name in ("mine.parquet", "mine.sqlite"):
        mine = tmp_path / name
        mine.write_text("my thesis\n" * 200)
        with pytest.raises(ScenarioError, match="is no result of a sweep"):
            Run(sweep, mine)
        assert mine.read_text().startswith("my thesis")
    journal_path(tmp_path / "new.parquet").write_text("my other thesis\n" * 200)
    with pytest.raises(ScenarioError, match="is no journal of a sweep"):
        Run(sweep, tmp_path / "new.parquet")


def test_two_sweeps_cannot_write_one_file(tmp_path: Path) -> None:
    sweep, out = sweep_of(small(tmp_path), "ring.window=1"), tmp_path / "table.parquet"
    first = Run(sweep, out)
    with pytest.raises(ScenarioError, match="another sweep is writing it"):
        Run(sweep, out)
    first.close()
    Run(sweep, out).close()


def test_a_simulation_that_breaks_is_a_row_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(scenario: Scenario) -> Report:
        if scenario.ring.window == 2:
            raise AssertionError("planted")
        return simulate(scenario)

    monkeypatch.setattr(evaluate, "simulate", broken)
    out = tmp_path / "table.parquet"
    finished(sweep_of(small(tmp_path), "ring.window=1,2,3"), out)
    errors = [row["error"] for row in read_table(out).values()]
    assert errors == [None, "internal error: AssertionError: planted", None]


@pytest.mark.parametrize("method", ["sobol", "lhs"])
def test_samples_cover_every_axis_evenly_and_repeat(method: str) -> None:
    drawn = draw_samples("sobol" if method == "sobol" else "lhs", 16, 3, seed=5)
    assert drawn == draw_samples("sobol" if method == "sobol" else "lhs", 16, 3, seed=5)
    assert drawn != draw_samples("sobol" if method == "sobol" else "lhs", 16, 3, seed=6)
    for axis in zip(*drawn, strict=True):
        assert sorted(int(share * 16) for share in axis) == list(range(16)), "one in each slice"


def test_sampled_whole_numbers_reach_both_ends_and_doubles_come_once(tmp_path: Path) -> None:
    _, (span,) = read_axes([], ["ring.window=1:4"])
    assert [span.at(share) for share in (0.0, 0.25, 0.999999, 1.0)] == [1, 2, 4, 4]
    _, (rate,) = read_axes([], ["workload.rate_per_s=1:4.0"])
    assert rate.at(0.5) == 2.5
    sweep = Sweep(
        Source.of_file(small(tmp_path)), [], [span], draw_samples("sobol", 64, 1, seed=1), seeds=1
    )
    assert sorted(point.axes for point in sweep.points()) == [(1,), (2,), (3,), (4,)]
    assert isinstance(span, Range)
