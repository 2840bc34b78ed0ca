"""What the shipped scenarios must show."""

from pathlib import Path

import pandas as pd
import pytest

from kvasir_core.verdict import VerdictKind
from kvasir_scenario.report_schema import Report
from kvasir_sim.run import run
from tests.sim.shipped import ROOT, shared, shipped

OPENING = ("name:", "question:")


@pytest.mark.parametrize("path", sorted((ROOT / "scenarios").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_scenario_opens_with_its_question(path: Path) -> None:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == f"name: {path.stem}"
    assert lines[1].startswith("question: ")
    assert "?" in path.read_text()


def rate(report: Report) -> float:
    assert report.throughput.output_tokens_per_s is not None
    return report.throughput.output_tokens_per_s


@pytest.mark.parametrize(("stages", "factor"), [(4, 3.9), (8, 7.7)])
def test_in_flight_uses_all_of_an_equal_pipeline(stages: int, factor: float) -> None:
    report = run(shipped("equal_stages", [f"ring.stages={stages}"])).report
    drained = report.variants[0].report
    assert rate(report) >= factor * rate(drained)
    assert rate(report) <= stages * rate(drained) * 1.001, "nothing is faster than all stages busy"


def test_window_auto_covers_links_as_long_as_stages() -> None:
    links = ["ring.link={latency_s: 0.01}", "what_if={}", "workload.requests=1024"]
    report = run(shipped("equal_stages", links)).report
    assert all(stage.starved_s <= 0.03 * report.elapsed_s for stage in report.stages)
    narrow = run(shipped("equal_stages", [*links, "ring.window=4", "ring.window_max=null"])).report
    assert all(stage.starved_s >= 0.45 * narrow.elapsed_s for stage in narrow.stages)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("starved", VerdictKind.STARVED),
        ("saturated", VerdictKind.SATURATED),
        ("uneven_gpus", VerdictKind.BOTTLENECKED),
    ],
)
def test_verdict_kinds_are_told_apart(name: str, kind: VerdictKind) -> None:
    report = run(shipped(name, ["what_if={}"])).report
    assert report.verdict.kind is kind
    assert report.verdict.evidence
    assert report.verdict.stage == (1 if kind is VerdictKind.BOTTLENECKED else None)


def test_overload_says_first_that_results_depend_on_the_horizon() -> None:
    overloaded = ["what_if={}", "workload.rate_per_s=40", "workload.requests=400"]
    report = run(shipped("4stage", overloaded)).report
    assert report.verdict.kind is VerdictKind.OVERLOADED
    assert "depend on the horizon" in report.verdict.evidence[0]


def test_three_requests_are_at_one_instant_on_three_stages(tmp_path: Path) -> None:
    result = run(shipped("three_requests"), tmp_path / "run", events=True)
    stages, batches = result.stages, result.micro_batches.set_index("micro_batch_id")
    instants = sorted({*stages.start_s, *stages.end_s})
    assert any(_shows_a_and_b_decoding_and_c_in_prefill(stages, batches, t) for t in instants)


def _shows_a_and_b_decoding_and_c_in_prefill(
    stages: pd.DataFrame, batches: pd.DataFrame, at: float
) -> bool:
    """Two single decodes and a prompt chunk on three different stages (A and B came before C)."""
    held = stages[(stages.start_s <= at) & (at < stages.end_s)]
    of = batches.loc[held.micro_batch_id]
    decodes = (of.decode_rows == 1) & (of.prefill_rows == 0)
    prefill = (of.prefill_rows > 0) & (of.spans == 1)
    return int(decodes.sum()) >= 2 and int(prefill.sum()) >= 1 and held.stage.is_unique


def test_whole_azure_trace_runs_and_keeps_its_laws() -> None:
    shared("traces/azure_2023/AzureLLMInferenceTrace_conv.csv")
    report = run(shipped("azure_conv")).report  # Asserts conservation, Little and time sums.
    assert report.counts.offered == 19_366
    assert report.counts.finished + report.counts.refused == 19_366
    assert report.workload.trace_span_s == pytest.approx(3501.72, abs=0.01)


def test_a_missing_trace_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvasir_core import ScenarioError

    monkeypatch.setenv("KVASIR_DATA", str(tmp_path))
    with pytest.raises(ScenarioError, match="Azure LLM inference trace 2023"):
        run(shipped("azure_conv"))
