"""The report page as a file: complete, bounded, escaped, and the same bytes for the same run."""

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvasir_core.errors import ScenarioError
from kvasir_scenario import page as page_module
from kvasir_scenario import page_figures, page_ring
from kvasir_scenario.page import write_page
from kvasir_scenario.report import write_report
from kvasir_scenario.report_schema import Report, Variant
from kvasir_scenario.run_dir import PAGE, prepare_run_dir
from tests.scenario.hand_ring import HandRing, plan_of

OUTSIDE = re.compile(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""")
SCRIPT = re.compile(r"<script>.*?</script>", re.DOTALL)


def a_run(out: Path, requests: int = 12, **plan: Any) -> Report:
    load = [(0.4 * index, 64 * (1 + index % 3), 1 + index % 4) for index in range(requests)]
    ring = HandRing(
        plan_of((1, 1, 1), window=3, micro_batch_width=4, **plan),
        (0.3, 0.4, 0.3),
        prepare_run_dir(out),
    )
    report = ring.run(load)
    write_report(out, report)
    return report


def words(path: Path) -> str:
    """The page without its scripts."""
    return SCRIPT.sub("", path.read_text())


def drawings(path: Path) -> dict[str, Any]:
    found = re.search(r"id=drawings>(.*?)</script>", path.read_text(), re.DOTALL)
    assert found is not None
    read: dict[str, Any] = json.loads(found[1])
    return read


def test_the_verdict_comes_first_and_every_stage_and_request_is_in_it(tmp_path: Path) -> None:
    report = a_run(tmp_path)
    text = words(write_page(tmp_path, report))
    assert text.index(f">{report.verdict.kind.value}") < text.index("<table>")
    for sentence in report.verdict.evidence:
        assert sentence in unescape(text)
    assert text.count("<tr>") >= 3 + report.counts.offered
    assert not OUTSIDE.search(text)


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    pages = [write_page(tmp_path / name, a_run(tmp_path / name)).read_bytes() for name in "ab"]
    assert pages[0] == pages[1]


def test_the_command_makes_the_page_anew(tmp_path: Path) -> None:
    from kvasir_sim.commands.report import command

    first = write_page(tmp_path, a_run(tmp_path)).read_bytes()
    (tmp_path / PAGE).unlink()
    result = CliRunner().invoke(command, [str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert (tmp_path / PAGE).read_bytes() == first


def test_another_run_in_the_same_directory_takes_the_page_away(tmp_path: Path) -> None:
    write_page(tmp_path, a_run(tmp_path))
    prepare_run_dir(tmp_path)
    assert not (tmp_path / PAGE).exists()


@pytest.mark.parametrize("requests", [[], [(0.0, 1, 1)], [(0.0, 9000, 1)]])
def test_runs_with_next_to_nothing_in_them_have_a_page(
    tmp_path: Path, requests: list[tuple[float, int, int]]
) -> None:
    report = HandRing(plan_of(), (1.0, 1.0), prepare_run_dir(tmp_path)).run(requests)
    text = words(write_page(tmp_path, report))
    assert report.verdict.kind.value in text
    assert "NaN" not in json.dumps(drawings(tmp_path / PAGE))


def test_the_timeline_is_the_table_of_stages_with_members_and_limits(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    report = a_run(tmp_path)
    drawing = drawings(write_page(tmp_path, report))["timeline"]
    bars = sorted(
        (stage, base, length)
        for trace in drawing["data"]
        if "blocked" not in trace["name"]
        for stage, base, length in zip(trace["y"], trace["base"], trace["x"], strict=True)
    )
    rows = pq.read_table(tmp_path / "stages.parquet").to_pylist()
    expected = sorted((row["stage"], row["start_s"], row["end_s"] - row["start_s"]) for row in rows)
    assert len(bars) == 3 * report.micro_batches
    assert np.allclose(bars, expected, rtol=1e-5)
    texts = [text for trace in drawing["data"] for text in trace["hovertext"]]
    assert all("stopped by: " in text and "request " in text for text in texts)


def test_a_long_run_shows_an_excerpt_and_says_so(tmp_path: Path) -> None:
    report = HandRing(plan_of(window=2), (1.0, 1.0), prepare_run_dir(tmp_path)).run(
        [(0, 1, 1500)] * 2
    )
    path = write_page(tmp_path, report)
    drawing = drawings(path)["timeline"]
    bars = sum(len(trace["x"]) for trace in drawing["data"])
    assert bars <= page_ring.BARS_MAX
    laps = bars // 2
    assert f"An excerpt: {laps} of {report.micro_batches:,} micro-batches" in words(path)
    assert drawing["layout"]["xaxis"]["range"][0] > 100  # Far from the first laps.
    own = path.stat().st_size - len(page_module._library())
    assert own < 1_000_000


def test_many_members_are_counted_and_many_requests_are_cut(tmp_path: Path) -> None:
    out = prepare_run_dir(tmp_path)
    report = HandRing(plan_of(micro_batch_width=64, row_width=512), (1.0, 1.0), out).run(
        [(0.0, 2, 3)] * 300
    )
    path = write_page(tmp_path, report)
    assert "and 56 more" in json.dumps(drawings(path)["timeline"])
    assert "The 200 that waited longest of 300" in words(path)


def test_busy_shares_over_time_add_up_to_the_report(tmp_path: Path) -> None:
    report = a_run(tmp_path, 40)
    busy = page_figures._busy_shares(tmp_path, 3, report.elapsed_s)
    for stage, shares in zip(report.stages, busy, strict=True):
        assert shares.mean() * report.elapsed_s == pytest.approx(stage.busy_s)
        assert shares.min() >= 0
        assert shares.max() <= 1


def test_names_from_a_scenario_are_escaped_wherever_they_stand(tmp_path: Path) -> None:
    hostile = "</script><b onclick=x>"
    report = a_run(tmp_path)
    variant = Variant(name=hostile, report=report)
    report = report.model_copy(update={"name": hostile, "notes": [hostile], "variants": [variant]})
    path = write_page(tmp_path, report)
    assert "<b onclick" not in path.read_text()
    assert "&lt;/script&gt;&lt;b onclick=x&gt;" in words(path)
    assert "&lt;b onclick" in drawings(path)["limits"]["data"][0]["y"][1]


def test_a_variant_that_is_called_baseline_is_told_from_the_baseline(tmp_path: Path) -> None:
    report = a_run(tmp_path)
    report = report.model_copy(update={"variants": [Variant(name="baseline", report=report)]})
    path = write_page(tmp_path, report)
    assert drawings(path)["variants"]["data"][0]["y"] == ["(baseline)", "baseline"]


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    report = a_run(tmp_path)
    (tmp_path / "samples.parquet").unlink()
    with pytest.raises(ScenarioError, match=r"samples.parquet: cannot be read"):
        write_page(tmp_path, report)


def test_a_page_without_the_plotting_library_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = a_run(tmp_path)
    monkeypatch.setattr(page_module, "find_spec", lambda _name: None)
    with pytest.raises(ScenarioError, match="needs the package plotly"):
        write_page(tmp_path, report)
