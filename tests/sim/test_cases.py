"""The cases of small inputs that others got wrong, with their exact numbers."""

import json
from pathlib import Path

import pandas as pd
import pytest

from kvasir_core import ScenarioError
from kvasir_core.verdict import VerdictKind
from kvasir_sim.run import Result
from tests.sim.rings import scenario_of, simulated

TRACES = {
    "a.csv": "arrival,prompt,output\n0,64,4\n0.5,64,4\n1.0,64,4\n",
    "b.jsonl": "".join(
        json.dumps({"timestamp": time, "input_length": 64, "output_length": 4, "hash_ids": []})
        + "\n"
        for time in (41000, 41500, 42000)
    ),
    "c.csv": "arrival,prompt,output\n"
    "1787000000000000,64,4\n1787000000500000,64,4\n1787000001000000,64,4\n",
}


def traced(folder: Path, name: str, **keys: object) -> Result:
    path = folder / name
    path.write_text(TRACES[name])
    kind = "mooncake" if name.endswith("jsonl") else "csv"
    workload = {"kind": "trace", "path": str(path), "format": kind, **keys}
    return simulated(folder / f"out-{name}", workload=workload)


@pytest.mark.parametrize("deadline", [{}, {"deadline_s": 60}], ids=["patient", "deadline"])
def test_s1_three_clocks_and_units_give_the_same_run(
    tmp_path: Path, deadline: dict[str, float]
) -> None:
    results = [
        traced(tmp_path, "a.csv", time_unit="s", **deadline),
        traced(tmp_path, "b.jsonl", **deadline),
        traced(tmp_path, "c.csv", time_unit="us", **deadline),
    ]
    frames = [result.requests for result in results]
    for result, frame in zip(results, frames, strict=True):
        assert frame.arrival_s.tolist() == pytest.approx([0, 0.5, 1.0], abs=1e-6)
        assert result.report.workload.trace_span_s == pytest.approx(1.0, abs=1e-6)
        assert result.report.counts.finished == 3
        assert result.report.counts.cancelled == 0
        pd.testing.assert_frame_equal(frame, frames[0])


def test_s1_microseconds_without_a_unit_are_refused_by_column(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"c\.csv:2: column 'arrival'"):
        traced(tmp_path, "c.csv")


def test_s3_a_failed_row_is_counted_and_gives_no_sample(tmp_path: Path) -> None:
    path = tmp_path / "burst.csv"
    path.write_text(
        "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
        "0,ChatGPT,100,10,110,Conversation log\n"
        "30,ChatGPT,100,0,100,Conversation log\n"
        "60,GPT-4,100,1,101,API log\n"
    )
    workload = {"kind": "trace", "path": str(path), "format": "burstgpt"}
    result = simulated(tmp_path, workload=workload)
    report = result.report
    assert (report.counts.offered, report.counts.finished, report.counts.failed) == (3, 2, 1)
    assert report.workload.trace_failed == 1
    assert report.latency.ttft_s.n == 2
    assert report.latency.tpot_s.n == 1
    assert report.latency.itl_s.n == 9
    frame = result.requests
    assert frame.finish_reason.tolist() == ["length", "failed", "length"]
    assert frame.ttft_s.isna().tolist() == [False, True, False]
    assert frame.tpot_s.isna().tolist() == [False, True, True]

    def refuse(text: str) -> float:
        raise AssertionError(text)

    text = (tmp_path / "run" / "report.json").read_text()
    json.loads(text, parse_constant=refuse)


def test_s3_a_row_without_prompt_is_an_error_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "zero.csv"
    path.write_text("arrival_s,prompt,output\n0,5,5\n1,0,5\n")
    workload = {"kind": "trace", "path": str(path), "format": "csv",
                "columns": {"arrival": "arrival_s"}}  # fmt: skip
    with pytest.raises(ScenarioError, match=r"zero\.csv:3"):
        simulated(tmp_path, workload=workload)


TENS: list[list[float]] = [[0, 10, 10], [20, 10, 10], [40, 10, 10]]


@pytest.mark.parametrize(("horizon", "seconds"), [(61, 46), (60, 45)])
def test_s5_the_window_counts_events_not_requests(
    tmp_path: Path, horizon: int, seconds: int
) -> None:
    keys = {"warmup_s": 15, "horizon_s": horizon}
    report = simulated(tmp_path, TENS, run=keys).report
    assert report.throughput.output_tokens_per_s == pytest.approx(23 / seconds, abs=1e-12)
    assert report.latency.ttft_s.n == 2
    assert report.latency.ttft_s.mean == 2.0
    assert report.latency.e2e_s.n == 3
    assert report.latency.e2e_s.mean == 20.0


def test_s7_unfinished_requests_are_counted_and_littles_law_is_exact(tmp_path: Path) -> None:
    requests = [[1.5 * i, 1, 1] for i in range(7)]
    report = simulated(tmp_path, requests, window=1, run={"horizon_s": 10.25}).report
    counts = report.counts
    assert (counts.offered, counts.finished, counts.running, counts.waiting) == (7, 5, 1, 1)
    assert counts.refused == 0
    assert report.little.in_system_mean == pytest.approx(19 / 10.25, abs=1e-6)
    assert report.little.residence_mean_s == pytest.approx(19 / 7, abs=1e-6)
    assert report.latency.e2e_s.mean == 3.0
    assert report.latency.e2e_s.n == 5
    assert [stage.busy_s for stage in report.stages] == [5.25, 5.0]
    assert report.verdict.kind is VerdictKind.OVERLOADED
    assert "growing" in report.verdict.evidence[0]
    assert any("5 of 7" in line for line in [*report.notes, *report.verdict.evidence])


def test_p1a_one_request_starves_a_ring_of_four(tmp_path: Path) -> None:
    report = simulated(tmp_path, [[0, 1, 10]], stages=4, window=4).report
    assert report.elapsed_s == 40.0
    for stage in report.stages:
        assert stage.busy_s == 10.0
        assert stage.starved_s == 30.0
    assert report.verdict.kind is VerdictKind.STARVED


def test_p1b_a_window_of_one_is_no_pipeline(tmp_path: Path) -> None:
    report = simulated(tmp_path, [[0, 1, 10]] * 4, stages=4, window=1).report
    assert report.elapsed_s == 160.0
    assert [stage.busy_s / report.elapsed_s for stage in report.stages] == [0.25] * 4


def test_p1c_four_requests_fill_four_stages(tmp_path: Path) -> None:
    result = simulated(tmp_path, [[0, 1, 10]] * 4, stages=4, window=4)
    assert sorted(result.requests.e2e_s) == [40.0, 41.0, 42.0, 43.0]
    assert [stage.busy_s for stage in result.report.stages] == [40.0] * 4
    held = result.stages
    at = held[(held.start_s <= 20.5) & (held.end_s > 20.5)]
    assert at.stage.nunique() == at.micro_batch_id.nunique() == 4


def test_p3_preemption_ends_and_spares_the_oldest(tmp_path: Path) -> None:
    result = simulated(
        tmp_path, [[0, 30, 40]] * 3, kv_tokens=100, micro_batch_width=8, window=2,
        costs={"kind": "fixed", "pass_s": 0.01},
    )  # fmt: skip
    report = result.report
    assert report.counts.finished == 3
    assert report.kv.blocks_peak <= 100
    assert result.requests.preemptions.tolist()[0] == 0
    assert 0 < report.kv.preemptions <= 12
    assert report.kv.recomputed_tokens > 0
    rows = result.micro_batches.rows.sum()
    assert rows == 3 * (30 + 39) + report.kv.recomputed_tokens
    for stage in report.stages:
        assert stage.rows == rows
        assert stage.busy_s == pytest.approx(0.01 * report.micro_batches)


def test_p5c_the_slow_stage_is_named(tmp_path: Path) -> None:
    stages = [{"layers": n, "pass_s": float(n)} for n in (5, 3, 2)]
    report = simulated(
        tmp_path, [[0, 1, 40]] * 6, stages=stages, layers=10, window=6
    ).report  # fmt: skip
    assert report.elapsed_s == 1205.0
    assert [stage.busy_s for stage in report.stages] == [1200.0, 720.0, 480.0]
    assert report.throughput.output_tokens_per_s == pytest.approx(240 / 1205, abs=1e-12)
    assert report.verdict.kind is VerdictKind.BOTTLENECKED
    assert report.verdict.stage == 0


def test_p7_a_prompt_wider_than_a_row_goes_in_chunks(tmp_path: Path) -> None:
    requests: list[list[float]] = [[0, 200, 3]]
    narrow = simulated(tmp_path / "narrow", requests, context=512)
    chunks = narrow.micro_batches[narrow.micro_batches.prefill_rows > 0]
    assert chunks.prefill_rows.tolist() == [64, 64, 64, 8]
    assert narrow.requests.ttft_s.tolist() == [5.0]
    wide = simulated(tmp_path / "wide", requests, context=512, row_width=256)
    assert wide.requests.ttft_s.tolist() == [2.0]
    assert (wide.micro_batches.prefill_rows > 0).sum() == 1


def test_p7_whole_prompts_wider_than_a_row_are_refused_with_both_numbers() -> None:
    with pytest.raises(ScenarioError, match=r"64.*512"):
        scenario_of([[0, 200, 3]], context=512, policy={"chunked_prefill": False})
