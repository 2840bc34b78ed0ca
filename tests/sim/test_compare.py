"""`compare` and `report` on finished runs."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kvasir_core import ScenarioError
from kvasir_scenario.compare import compare, draw_scatter, read_run, relative
from kvasir_sim.cli import main
from kvasir_sim.run import run
from tests.sim.shipped import shipped

SMALL = ["workload.requests=80", "what_if={}"]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    run(shipped("saturated", SMALL), folder / "base")
    run(shipped("saturated", [*SMALL, "costs.pass_s=0.011"]), folder / "slower")
    return folder / "base", folder / "slower"


def command(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0)


def test_a_slower_ring_shows_its_relative_error(two_runs: tuple[Path, Path]) -> None:
    comparison = compare([read_run(path) for path in two_runs])
    rows = {row.name: row for row in comparison.rows}
    expected = rows["output_tokens_per_s"].values
    assert expected[0] is not None
    assert expected[1] is not None
    assert rows["output_tokens_per_s"].errors == (None, expected[1] / expected[0] - 1)
    assert -0.12 < expected[1] / expected[0] - 1 < -0.05
    worst = comparison.worst
    assert worst is not None
    assert worst[1] > 0.05


def test_a_run_equals_itself(two_runs: tuple[Path, Path]) -> None:
    comparison = compare([read_run(two_runs[0]), read_run(two_runs[0])])
    assert {row.errors[1] for row in comparison.rows} <= {0.0, None}


def test_runs_of_different_plans_and_loads_are_told_apart(
    two_runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ["workload.requests=81", "what_if={}", "runtime.dtype=float32", "ring.row_width=64"]
    run(shipped("saturated", other), tmp_path / "other")
    comparison = compare([read_run(path) for path in (*two_runs, tmp_path / "other")])
    (note,) = comparison.notes
    for difference in ("row_width 64, not ", "boundary_bytes_max", "requests offered 81, not 80"):
        assert difference in note
    main(["compare", str(two_runs[0]), str(tmp_path / "other")])
    assert "Note: other (simulated) differs from base (simulated)" in capsys.readouterr().out


def test_max_error_decides_the_exit_code(
    two_runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    base, slower = map(str, two_runs)
    assert command("compare", base, slower, "--max-error", "0.02") == 1
    assert "--max-error" in capsys.readouterr().err
    main(["compare", base, slower, "--max-error", "0.5", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert document["reference"] == 0
    assert document["figures"]["ttft_s.p50"]["unit"] == "s"


def test_scatter_is_drawn(two_runs: tuple[Path, Path], tmp_path: Path) -> None:
    draw_scatter(compare([read_run(path) for path in two_runs]), tmp_path / "scatter.png")
    assert (tmp_path / "scatter.png").read_bytes().startswith(b"\x89PNG")


def test_a_scatter_replaces_an_earlier_one_and_nothing_else(
    two_runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["compare", *map(str, two_runs), "--plot"]
    for _ in range(2):
        main([*words, str(tmp_path / "scatter.png")])
    (tmp_path / "photo.png").write_bytes(b"\x89PNG\r\n of my cat")
    capsys.readouterr()
    for name, why in (("photo.png", "did not write it"), ("thesis.txt", "must end in .png")):
        assert command(*words, str(tmp_path / name)) == 2
        said = capsys.readouterr()
        assert not said.out
        assert why in said.err
    assert (tmp_path / "photo.png").read_bytes() == b"\x89PNG\r\n of my cat"
    assert not (tmp_path / "thesis.txt").exists()


@pytest.mark.parametrize("damage", ["gone", "junk", "other columns"])
def test_a_scatter_of_a_damaged_table_is_refused(
    two_runs: tuple[Path, Path],
    tmp_path: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import pandas as pd

    shutil.copytree(two_runs[0], tmp_path / "run")
    table = tmp_path / "run" / "requests.parquet"
    table.unlink()
    if damage == "junk":
        table.write_bytes(b"junk" * 100)
    if damage == "other columns":
        pd.DataFrame({"a": [1]}).to_parquet(table)
    runs = [str(tmp_path / "run"), str(two_runs[1])]
    assert command("compare", *runs, "--plot", str(tmp_path / "plot.png")) == 2
    assert "requests.parquet: is " in capsys.readouterr().err
    assert not (tmp_path / "plot.png").exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match="finished run"):
        read_run(tmp_path)
    with pytest.raises(ScenarioError, match=r"no report\.json to read \(Not a directory\)"):
        read_run(Path(__file__))


def _with(text: str, key: str, value: str) -> str:
    changed = re.sub(rf'"{key}": [^\n{{\[]+?(,?)\n', rf'"{key}": {value}\1\n', text, count=1)
    assert changed != text
    return changed


@pytest.mark.parametrize(
    ("breakage", "said"),
    [
        (lambda text: "", "is empty"),
        (lambda text: text[: len(text) // 2], "it is no JSON: EOF while parsing"),
        (lambda text: "{}", r"missing \(and \d+ more\)"),
        (lambda text: "[1, 2]", "found a list of 2; "),
        (lambda text: "[" * 100_000, "it is no JSON: recursion limit"),
        (lambda text: _with(text, "elapsed_s", "NaN"), "elapsed_s: found nan; it must be a finite"),
        (lambda text: _with(text, "elapsed_s", '"long"'), 'elapsed_s: found "long"; it must be a'),
        (lambda text: _with(text, "offered", "1.5"), r"counts\.offered: found 1\.5; it must be a wh"),
        (lambda text: text.replace('"offered"', '"ofered"', 1), r"counts\.offered: missing"),
        (lambda text: "\udcff", "byte 0 is no UTF-8 text"),
        (lambda text: " " * ((64 << 20) + 1), "more than 67,108,864 bytes"),
    ],
)  # fmt: skip
def test_a_broken_report_is_one_line_with_file_key_and_what_is_right(
    breakage: Callable[[str], str], said: str, two_runs: tuple[Path, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    text = (two_runs[0] / "report.json").read_text()
    path = tmp_path / "report.json"
    path.write_bytes(breakage(text).encode(errors="surrogateescape"))
    for words in (["report", str(tmp_path)], ["compare", str(two_runs[0]), str(tmp_path)]):
        assert command(*words) == 2
        complaint = capsys.readouterr().err
        assert complaint.startswith(f"kvasir-sim: {path}: ")
        assert re.search(said, complaint)
        assert complaint.count("\n") == 1
        assert len(complaint) < 600


def test_a_report_that_is_no_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "report.json")
    assert command("report", str(tmp_path)) == 2, "and nobody waits for a writer"
    assert "is no file" in capsys.readouterr().err


def test_report_rebuilds_the_pictures(
    two_runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    main(["report", str(two_runs[0])])
    assert "Verdict" in capsys.readouterr().out
    first = (two_runs[0] / "timeline.png").read_bytes()
    main(["report", str(two_runs[0])])
    assert (two_runs[0] / "timeline.png").read_bytes() == first


@pytest.mark.parametrize(
    ("value", "base", "error"),
    [(1.1, 1.0, 0.1), (0.0, 0.0, 0.0), (1.0, 0.0, None), (None, 1.0, None), (1.0, None, None)],
)
def test_relative_error_is_undefined_where_it_must_be(
    value: float | None, base: float | None, error: float | None
) -> None:
    assert relative(value, base) == (None if error is None else pytest.approx(error))
