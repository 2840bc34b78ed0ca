"""`report.json`: its names, its strictness, what it says of latency and goodput; run directories."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from rich.console import Console

from kvasir_core.errors import ScenarioError
from kvasir_scenario import latency as latency_module
from kvasir_scenario.latency import LatencySamples, quantiles_of
from kvasir_scenario.report import Labels, write_report
from kvasir_scenario.report_schema import Report, Variant, parse_report
from kvasir_scenario.run_dir import MARKER, prepare_run_dir
from kvasir_scenario.terminal import print_report
from kvasir_scenario.wording import duration
from tests.scenario.hand_ring import HandRing, plan_of

DESIGNED: dict[str, Any] = {
    "schema_version": None, "mode": None, "elapsed_s": None, "micro_batches": None, "swarm": None,
    "verdict": ["kind", "stage", "evidence"],
    "plan": [
        "row_width", "micro_batch_width", "boundary_bytes_max", "result_bytes_max", "window",
        "digest",
    ],
    "counts": ["offered", "finished", "running", "waiting", "refused", "cancelled", "failed"],
    "throughput": ["requests_per_s", "output_tokens_per_s", "goodput_requests_per_s"],
    "latency": ["ttft_s", "tpot_s", "itl_s", "e2e_s"],
    "binding_limits": [
        "nothing_waiting", "row_width", "micro_batch_width", "cohort", "running_cap", "kv",
        "window", "dependency",
    ],
    "kv": ["blocks_total", "blocks_peak", "preemptions", "recomputed_tokens"],
    "workload": ["trace_span_s", "out_of_order", "ties", "clipped"],
}  # fmt: skip


def a_report(labels: Labels | None = None, **options: Any) -> Report:
    requests = [(1.5 * index, 1, 1 + index) for index in range(7)]
    return HandRing(plan_of(), (1.0, 1.0)).run(requests, labels=labels, **options)


def strict(text: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("options", [{}, {"horizon_s": 0.5}, {"horizon_s": 4, "warmup_s": 9}])
def test_every_designed_key_is_there_whatever_the_run_was_like(options: dict[str, Any]) -> None:
    document = strict(a_report(**options).to_json())
    for key, parts in DESIGNED.items():
        assert key in document
        assert parts is None or set(parts) <= set(document[key]), key
    for part in document["latency"].values():
        assert set(part) == {"mean", "p50", "p90", "p99", "n", "few_samples"}
    for index, stage in enumerate(document["stages"]):
        assert stage["index"] == index
        assert set(stage) == {
            "index", "layers", "held_s", "busy_s", "blocked_s", "starved_s", "blocked_by",
            "starved_by", "micro_batches", "rows",
        }  # fmt: skip
        assert set(stage["blocked_by"]) == {"credit", "experts"}
        assert set(stage["starved_by"]) == {"no_demand", "dependency", "capacity", "upstream"}


def test_an_empty_run_has_nulls_and_no_zeros_for_what_is_undefined() -> None:
    report = HandRing(plan_of(), (1.0, 1.0)).run([])
    document = strict(report.to_json())
    assert document["throughput"]["requests_per_s"] is None
    assert document["latency"]["ttft_s"]["p50"] is None
    assert document["little"]["in_system_mean"] is None
    assert document["verdict"]["kind"] == "idle"


def test_a_report_reads_back_as_it_was_written(tmp_path: Path) -> None:
    report = a_report()
    variants = [Variant(name="drained", report=a_report(Labels(name="d", mode="measured")))]
    report = report.model_copy(update={"variants": variants})
    path = write_report(prepare_run_dir(tmp_path / "run"), report)
    assert parse_report(path.read_text()) == report
    assert strict(path.read_text())["variants"][0]["report"]["mode"] == "measured"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_report_cannot_hold_what_json_cannot(value: float) -> None:
    with pytest.raises(ValidationError, match="finite"):
        Report.model_validate(a_report().model_dump() | {"elapsed_s": value})


def test_a_report_with_an_unknown_or_a_missing_key_is_refused() -> None:
    document = a_report().model_dump(mode="json")
    with pytest.raises(ValidationError, match="extra"):
        parse_report(json.dumps(document | {"speed": 1}))
    del document["swarm"]
    with pytest.raises(ValidationError, match="swarm"):
        parse_report(json.dumps(document))


def test_goodput_counts_finished_requests_within_every_limit() -> None:
    plan = plan_of(window=1)
    requests = [(0, 1, 2), (1, 1, 2), (20, 1, 1)]  # TTFT 2, 3 and 2 s; pace 4, 4 and none.

    def goodput(**limits: float) -> float | None:
        labels = Labels(name="slo", mode="simulated", **limits)  # type: ignore[arg-type]
        report = HandRing(plan, (1.0, 1.0)).run(requests, labels=labels, horizon_s=30)
        good = report.throughput.goodput_requests_per_s
        return None if good is None else good * 30

    assert goodput() is None
    assert goodput(slo_ttft_s=2.0) == pytest.approx(2)
    assert goodput(slo_ttft_s=1.9) == 0
    assert goodput(slo_tpot_s=3.9) == pytest.approx(1)  # One token has no pace to miss.
    assert goodput(slo_tpot_s=4.0) == pytest.approx(3)
    assert goodput(slo_ttft_s=2.0, slo_tpot_s=1.0) == pytest.approx(1)


def test_a_run_within_its_warm_up_measured_nothing_and_says_so() -> None:
    report = a_report(horizon_s=4, warmup_s=9)
    assert report.throughput.requests_per_s is None
    assert report.latency.ttft_s.n == 0
    assert report.measured_window_s == (4, 4)
    assert any("within the warm-up" in note for note in report.notes)
    assert report.counts.finished > 0  # Counts are over the whole run.


# ---------------------------------------------------------------------- percentiles


def test_percentiles_are_linear_and_marked_when_samples_are_few() -> None:
    quantiles = quantiles_of(np.arange(1, 12, dtype=np.int64) * 1_000_000_000)
    assert (quantiles.p50, quantiles.p90, quantiles.p99) == (6.0, 10.0, 10.9)
    assert quantiles.few_samples == ("p99",)
    assert quantiles_of(np.array([5])).few_samples == ("p50", "p90", "p99")
    assert quantiles_of(np.zeros(100, np.int64)).few_samples == ()


def test_too_many_samples_are_condensed_within_a_few_parts_in_ten_thousand(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latency_module, "EXACT_MAX", 1000)
    rng = np.random.default_rng(1)
    draws = [rng.lognormal(17, 3, 700).astype(np.int64) for _ in range(5)]
    samples = LatencySamples()
    for draw in draws:
        samples.add(draw)
    assert not samples.is_exact
    exact, rough = quantiles_of(np.concatenate(draws)), samples.quantiles()
    assert rough.n == exact.n
    assert rough.mean == pytest.approx(exact.mean)
    for name in ("p50", "p90", "p99"):
        assert getattr(rough, name) == pytest.approx(getattr(exact, name), rel=2.5e-4)


def test_condensed_samples_below_eight_microseconds_stay_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(latency_module, "EXACT_MAX", 3)
    samples = LatencySamples()
    samples.add(np.array([0, 4095, 8191, 8191, 1 << 62]))
    assert samples.quantiles().p50 == 8191e-9


def test_a_report_on_condensed_gaps_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(latency_module, "EXACT_MAX", 3)
    assert any("itl_s: percentiles within" in note for note in a_report().notes)


# ---------------------------------------------------------------------- run directories


def test_an_earlier_run_is_replaced_and_foreign_files_stay(tmp_path: Path) -> None:
    run = prepare_run_dir(tmp_path / "deep" / "run")
    report = a_report()
    for directory in (run, prepare_run_dir(run / "variants" / "drained")):
        write_report(directory, report)
        (directory / "stages.parquet").write_bytes(b"old")
    (run / ".requests.parquet.partial").write_bytes(b"half")
    (run / "notes.txt").write_text("mine")
    (run / "variants" / "drained" / "notes.txt").write_text("mine too")
    prepare_run_dir(run)
    left = sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file())
    assert left == [MARKER, "notes.txt", "variants/drained/notes.txt"]


def test_an_earlier_run_without_foreign_files_leaves_nothing(tmp_path: Path) -> None:
    run = prepare_run_dir(tmp_path)
    write_report(prepare_run_dir(run / "variants" / "a"), a_report())
    prepare_run_dir(run)
    assert [path.name for path in run.iterdir()] == [MARKER]


def test_a_folder_that_is_not_a_run_is_refused_and_untouched(tmp_path: Path) -> None:
    (tmp_path / "scenario.yaml").write_text("name: mine")
    with pytest.raises(ScenarioError, match=r"holds 'scenario.yaml' and is not an earlier run"):
        prepare_run_dir(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["scenario.yaml"]


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    for path in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(ScenarioError, match="name a new or empty directory"):
            prepare_run_dir(path)


def test_a_link_among_the_variants_is_not_followed(tmp_path: Path) -> None:
    elsewhere = prepare_run_dir(tmp_path / "elsewhere")
    write_report(elsewhere, a_report())
    run = prepare_run_dir(tmp_path / "run")
    (run / "variants").mkdir()
    (run / "variants" / "link").symlink_to(elsewhere)
    prepare_run_dir(run)
    assert (elsewhere / "report.json").is_file()


# ---------------------------------------------------------------------- on the screen


def on_screen(report: Report, width: int = 100) -> str:
    console = Console(record=True, width=width, file=StringIO())
    print_report(report, console)
    return console.export_text()


def test_the_screen_shows_the_verdict_first_then_counts_latency_stages_and_limits() -> None:
    text = on_screen(a_report(horizon_s=10.25))
    order = [
        "Verdict:", "Requests", "Throughput", "Latency", "Stages, share of the time",
        "Micro-batches", "KV",
    ]  # fmt: skip
    places = [text.index(heading) for heading in order]
    assert places == sorted(places)
    assert "simulated (stage times assumed), 10.25 s of virtual time" in text
    assert "too few samples to be trusted" in text


def test_an_overload_is_said_first_on_the_screen() -> None:
    requests = [(1.5 * index, 1, 1) for index in range(7)]
    report = HandRing(plan_of(window=1), (1.0, 1.0)).run(requests, horizon_s=10.25)
    lines = on_screen(report, 120).splitlines()
    assert lines[1] == "Verdict: overloaded"
    assert "depend on the horizon" in lines[2]


def test_variants_stand_side_by_side_and_measured_ones_are_labelled() -> None:
    other = a_report(Labels(name="x", mode="measured"))
    variants = [
        Variant(name="drained", report=a_report()),
        Variant(name="real[1]", report=other),
    ]
    text = on_screen(a_report().model_copy(update={"variants": variants}))
    head = text[text.index("What if") :]
    assert "baseline" in head
    assert "drained" in head
    assert "real[1]" in head
    assert head.count("(measured)") == 1
    assert head.count("1.00 x") == 3


def test_an_empty_run_can_be_shown_on_a_narrow_screen() -> None:
    report = HandRing(plan_of(), (1.0, 1.0)).run([])
    text = on_screen(report.model_copy(update={"variants": [Variant(name="v", report=report)]}), 60)
    assert "idle" in text


def test_the_slo_and_notes_are_on_the_screen() -> None:
    labels = Labels(name="slo", mode="measured", slo_ttft_s=1.0, notes=("stage 3 was slow",))
    text = on_screen(a_report(labels))
    assert "goodput" in text
    assert "TTFT <= 1 s" in text
    assert "stage 3 was slow" in text
    assert "real time" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0.0, "0 s"), (12.3456, "12.35 s"), (0.0123, "12.3 ms"), (4.5e-6, "4.5 us"),
        (123456.7, "123,457 s"),
    ],
)  # fmt: skip
def test_durations_are_given_in_the_unit_that_reads_best(value: float | None, text: str) -> None:
    assert duration(value) == text


def test_warnings_of_the_workload_are_notes_of_the_report() -> None:
    assert "times look like ms" in a_report(warnings=("times look like ms",)).notes
