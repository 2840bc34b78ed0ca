"""The recorder, fed by a real ring on hand-set clocks: what it measures, writes and asserts."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from kvasir_core.causes import Cause, CauseClock
from kvasir_core.microbatch import BindingLimit, FinishReason, MicroBatch
from kvasir_core.ring import Ring
from kvasir_core.statistics import RingStatistics
from kvasir_core.units import Epoch, MicroBatchId, Nanos, RequestId
from kvasir_core.verdict import VerdictKind
from kvasir_scenario import recorder as recorder_module
from kvasir_scenario import tables
from kvasir_scenario.recorder import Recorder
from kvasir_scenario.report import Labels
from kvasir_scenario.report_schema import Report
from kvasir_scenario.run_dir import prepare_run_dir
from tests.scenario.hand_ring import Facts, HandRing, plan_of

LABELS = Labels(name="hand", mode="simulated")


def frame(out: Path, table: str) -> pd.DataFrame:
    return pd.read_parquet(out / f"{table}.parquet")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return prepare_run_dir(tmp_path / "run")


# ---------------------------------------------------------------------- cases with exact numbers


@pytest.mark.parametrize(("horizon_s", "span"), [(61, 46), (60, 45)])
def test_s5_events_are_credited_when_they_happen_and_the_horizon_itself_counts(
    horizon_s: float, span: float
) -> None:
    requests = [(20.0 * index, 10, 10) for index in range(3)]
    report = HandRing(plan_of(), (1.0, 1.0)).run(requests, warmup_s=15, horizon_s=horizon_s)
    assert report.throughput.output_tokens_per_s == 23 / span
    assert report.measured_window_s == (15, horizon_s)
    assert (report.latency.ttft_s.n, report.latency.ttft_s.p50) == (2, 2.0)
    assert (report.latency.e2e_s.n, report.latency.e2e_s.mean) == (3, 20.0)
    assert report.latency.itl_s.n == 21  # 23 tokens, two of them first ones.


def test_s7_counts_are_conserved_and_littles_law_is_exact_at_the_horizon() -> None:
    requests = [(1.5 * index, 1, 1) for index in range(7)]
    report = HandRing(plan_of(window=1), (1.0, 1.0)).run(requests, horizon_s=10.25)
    counts = report.counts
    assert (counts.offered, counts.finished, counts.running, counts.waiting) == (7, 5, 1, 1)
    assert counts.refused == 0
    little = report.little
    assert little.in_system_mean == pytest.approx(1.853659, abs=1e-6)
    assert little.residence_mean_s == pytest.approx(2.714286, abs=1e-6)
    assert little.arrival_rate_per_s == pytest.approx(7 / 10.25)
    assert [stage.busy_s for stage in report.stages] == [5.25, 5.0]
    assert report.latency.e2e_s.mean == 3.0
    assert "end-to-end and TPOT are of the finished requests only: 5 of 7" in report.notes
    assert report.verdict.kind is VerdictKind.OVERLOADED
    assert "still growing" in report.verdict.evidence[0]
    assert "depend on the horizon" in report.verdict.evidence[0]
    assert report.notes[0] == report.verdict.evidence[0]


def test_p1_one_request_leaves_a_ring_of_four_starved() -> None:
    report = HandRing(plan_of((1, 1, 1, 1), window=4), (1.0,) * 4).run([(0, 1, 10)])
    assert report.elapsed_s == 40.0
    assert {stage.busy_s / 40 for stage in report.stages} == {0.25}
    assert {stage.starved_s / 40 for stage in report.stages} == {0.75}
    assert report.stages[0].starved_by.dependency == 30.0
    assert report.verdict.kind is VerdictKind.STARVED


def test_p1_four_requests_one_at_a_time_are_held_back_by_the_window() -> None:
    report = HandRing(plan_of((1, 1, 1, 1), window=1), (1.0,) * 4).run([(0, 1, 10)] * 4)
    assert report.elapsed_s == 160.0
    assert report.stages[0].busy_s == 40.0
    assert report.stages[0].starved_by.capacity > 100
    assert report.verdict.kind is VerdictKind.STARVED


def test_p1_four_requests_fill_the_ring_and_all_stages_hold_another_one(out: Path) -> None:
    report = HandRing(plan_of((1, 1, 1, 1), window=4), (1.0,) * 4, out).run([(0, 1, 10)] * 4)
    assert frame(out, "requests")["e2e_s"].tolist() == [40.0, 41.0, 42.0, 43.0]
    assert [stage.busy_s for stage in report.stages] == [40.0] * 4
    assert report.verdict.kind is VerdictKind.BALANCED
    spans = frame(out, "spans").set_index("micro_batch_id")["request_id"]
    stages = frame(out, "stages")
    now = stages[(stages["start_s"] <= 10.5) & (stages["end_s"] > 10.5)]
    assert sorted(spans[now["micro_batch_id"]]) == [0, 1, 2, 3]


def test_p5_the_slow_stage_of_an_uneven_split_is_named() -> None:
    plan = plan_of((5, 3, 2), window=6)
    report = HandRing(plan, (5.0, 3.0, 2.0)).run([(0, 1, 40)] * 6)
    assert report.elapsed_s == 1205.0
    assert [stage.busy_s for stage in report.stages] == [1200.0, 720.0, 480.0]
    assert report.throughput.output_tokens_per_s == pytest.approx(0.1992, abs=1e-4)
    assert (report.verdict.kind, report.verdict.stage) == (VerdictKind.BOTTLENECKED, 0)


def test_p3_recomputation_is_counted_and_the_ring_is_kv_bound() -> None:
    plan = plan_of(micro_batch_width=8, kv_tokens=(100, 100))
    report = HandRing(plan, (0.01, 0.01)).run([(0, 30, 40)] * 3)
    assert report.counts.finished == 3
    assert report.kv.blocks_peak <= 100
    assert 0 < report.kv.preemptions <= 12
    assert report.kv.recomputed_tokens > 0
    assert report.verdict.kind is VerdictKind.KV_BOUND


def test_s3_rows_that_failed_in_their_trace_are_offered_and_never_samples(out: Path) -> None:
    ring = HandRing(plan_of(row_width=128), (1.0, 1.0), out)
    report = ring.run([(0, 100, 10), (30, 100, 0), (60, 100, 1)], bulk=True)
    assert (report.counts.offered, report.counts.finished, report.counts.failed) == (3, 2, 1)
    assert report.workload.trace_failed == 1
    assert report.latency.ttft_s.n == 2
    assert report.latency.tpot_s.n == 1
    assert report.latency.itl_s.n == 9
    requests = frame(out, "requests")
    assert requests["finish_reason"].tolist() == ["length", "failed", "length"]
    failed = requests.iloc[1]
    assert failed[["queue_s", "ttft_s", "tpot_s", "e2e_s"]].isna().all()
    assert failed["output_tokens"] == 0
    assert np.isnan(requests["tpot_s"].iloc[2])  # One token has no pace.


# ---------------------------------------------------------------------- hand-made laps


def batch(number: int, *requests: int, decodes: int = 0, rows: int = 1) -> MicroBatch:
    """Prompts of `rows` rows, the first `decodes` of them decode rows."""
    rows_of = tuple(1 if k < decodes else rows for k in range(len(requests)))
    return MicroBatch(
        id=MicroBatchId(number),
        epoch=Epoch(0),
        requests=tuple(map(RequestId, requests)),
        starts=(0,) * len(requests),
        rows=rows_of,
        decodes=decodes,
        completing=tuple(range(decodes, len(requests))),
        row_count=sum(rows_of),
        decode_context=decodes,
        binding=BindingLimit.NOTHING_WAITING,
    )


def statistics(**changes: Any) -> RingStatistics:
    known = Ring(plan_of()).statistics()
    ended = dict.fromkeys(FinishReason, 0) | changes.pop("ended", {})
    return replace(known, ended=ended, **changes)


def ids(*requests: int) -> tuple[RequestId, ...]:
    return tuple(map(RequestId, requests))


def test_time_without_credit_is_blocked_and_time_on_the_way_is_upstream(out: Path) -> None:
    clock = CauseClock()
    recorder = Recorder(out, plan_of(), clock)
    recorder.offered(RequestId(5), 1, 3)
    clock.switch(Cause.DEPENDENCY, Nanos(2))
    recorder.lap(batch(0, 5, rows=3), 2, 30, ids(5), [2, 4, 10, 13, 14, 15, 29, 29])
    recorder.finished(RequestId(5), 30, FinishReason.LENGTH)
    clock.switch(Cause.NO_DEMAND, Nanos(30))
    done = statistics(offered=1, ended={FinishReason.LENGTH: 1}, in_system_ns=29)
    report = recorder.close(40, done, Facts(), LABELS)
    head, tail = report.stages
    assert (head.busy_s, head.blocked_by.credit, head.held_s) == (6e-9, 3e-9, 9e-9)
    assert (head.starved_by.no_demand, head.starved_by.upstream) == (12e-9, 2e-9)
    assert head.starved_by.dependency == 17e-9
    assert (tail.busy_s, tail.starved_by.upstream) == (14e-9, 13e-9)
    stages = frame(out, "stages")
    assert stages.columns.tolist() == [field.name for field in tables.STAGES]
    assert stages["stage"].tolist() == [0, 1]
    assert stages["sent_s"].tolist() == [13e-9, 29e-9]
    assert frame(out, "micro_batches").iloc[0].to_dict() == {
        "micro_batch_id": 0, "composed_s": 2e-9, "returned_s": 30e-9, "rows": 3,
        "prefill_rows": 3, "decode_rows": 0, "spans": 1, "binding_limit": "nothing_waiting",
    }  # fmt: skip
    assert frame(out, "requests").iloc[0][:8].to_dict() == {
        "request_id": 5, "arrival_s": 1e-9, "prompt_tokens": 3, "output_tokens": 1,
        "queue_s": 1e-9, "ttft_s": 29e-9, "tpot_s": pytest.approx(np.nan, nan_ok=True),
        "e2e_s": 29e-9,
    }  # fmt: skip


def test_a_lost_micro_batch_keeps_its_stages_busy_until_it_was_lost(out: Path) -> None:
    clock = CauseClock()
    recorder = Recorder(out, plan_of((1, 1, 1)), clock)
    recorder.offered(RequestId(0), 0, 1)
    recorder.lost(batch(0, 0), 0, 15, [0, 0, 10, 10, 10, 10, 20, 20])  # Stage 1 was cut at 15.
    recorder.preempted(RequestId(0))
    recorder.lap(batch(1, 0), 20, 50, ids(0), [20, 20, 30, 30, 30, 30, 40, 40, 40, 40, 50, 50])
    recorder.finished(RequestId(0), 50, FinishReason.LENGTH)
    done = statistics(offered=1, ended={FinishReason.LENGTH: 1}, in_system_ns=50, preemptions=1)
    report = recorder.close(50, done, Facts(), LABELS)
    assert [round(stage.busy_s * 1e9) for stage in report.stages] == [20, 15, 10]
    assert [stage.micro_batches for stage in report.stages] == [2, 2, 1]
    assert [stage.rows for stage in report.stages] == [2, 2, 1]
    assert round(report.stages[2].starved_by.upstream * 1e9) == 15 + 20  # On its way, until cut.
    assert round(report.stages[2].starved_by.no_demand * 1e9) == 5
    assert report.micro_batches == 2
    assert pd.isna(frame(out, "micro_batches")["returned_s"].iloc[0])
    stages = frame(out, "stages")
    assert stages["stage"].tolist() == [0, 1, 0, 1, 2]  # It never reached stage 2.
    assert stages["end_s"].isna().tolist() == [False, True, False, False, False]
    request = frame(out, "requests").iloc[0]
    assert (request["queue_s"], request["preemptions"]) == (0.0, 1)  # The first composition.


def test_requests_that_leave_without_a_token_have_no_latency(out: Path) -> None:
    recorder = Recorder(out, plan_of(), CauseClock())
    for request, at in ((0, 0), (1, 5), (2, 6)):
        recorder.offered(RequestId(request), at, 4)
    recorder.refused(RequestId(0), 0)
    recorder.finished(RequestId(1), 9, FinishReason.DEADLINE)
    ended = {FinishReason.REFUSED: 1, FinishReason.DEADLINE: 1}
    over = statistics(offered=3, waiting=1, ended=ended, in_system_ns=8)
    report = recorder.close(10, over, Facts(), LABELS)
    assert (report.counts.refused, report.counts.cancelled, report.counts.waiting) == (1, 1, 1)
    assert report.latency.ttft_s.n == report.latency.e2e_s.n == 0
    assert report.latency.ttft_s.p50 is None
    requests = frame(out, "requests")
    assert requests["finish_reason"].tolist()[:2] == ["refused", "deadline"]
    assert requests["finish_reason"].isna().tolist() == [False, False, True]
    assert requests[["queue_s", "ttft_s", "tpot_s", "e2e_s"]].isna().all(axis=None)
    assert report.verdict.kind is VerdictKind.IDLE


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        ({"offered": 2}, "lost or doubled"),
        ({"offered": 2, "waiting": 1}, "1 rows for 2 requests"),
        ({"in_system_ns": 28}, "Little's law"),
    ],
)
def test_a_run_that_breaks_a_law_gets_no_report(wrong: dict[str, int], law: str) -> None:
    recorder = Recorder(None, plan_of(), CauseClock())
    recorder.offered(RequestId(0), 1, 3)
    recorder.finished(RequestId(0), 30, FinishReason.LENGTH)
    right = {"offered": 1, "in_system_ns": 29}
    with pytest.raises(AssertionError, match=law):
        recorder.close(
            40, statistics(ended={FinishReason.LENGTH: 1}, **(right | wrong)), Facts(), LABELS
        )


def test_requests_after_the_end_were_never_offered(out: Path) -> None:
    requests = [(0, 10, 2), (1, 10, 0), (30, 10, 2), (30, 10, 0)]
    report = HandRing(plan_of(), (1.0, 1.0), out).run(requests, bulk=True, horizon_s=20)
    assert (report.counts.offered, report.counts.finished, report.counts.failed) == (2, 1, 1)
    assert frame(out, "requests")["request_id"].tolist() == [0, 1]


# ---------------------------------------------------------------------- files

LOAD = [(0.05 * index, 20 + 7 * (index % 5), 1 + index % 9) for index in range(120)]


def run_load(out: Path | None, *, csv: bool = False) -> Report:
    plan = plan_of((2, 2, 2), window=3, micro_batch_width=4, kv_tokens=(900,) * 3)
    return HandRing(plan, (0.01, 0.012, 0.009), out).run(LOAD, warmup_s=1, csv=csv)


def test_flushing_often_changes_nothing(
    out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run_load(out)
    monkeypatch.setattr(recorder_module, "FLUSH_LAPS", 7)
    pieces = prepare_run_dir(tmp_path / "pieces")
    assert run_load(pieces) == whole
    assert run_load(None) == whole
    for table in ("requests", "micro_batches", "stages", "samples"):
        pd.testing.assert_frame_equal(frame(pieces, table), frame(out, table))


def test_the_tables_agree_with_the_report(out: Path) -> None:
    report = run_load(out)
    batches, stages = frame(out, "micro_batches"), frame(out, "stages")
    assert len(batches) == report.micro_batches
    assert len(stages) == 3 * len(batches)
    assert batches["rows"].sum() == report.stages[0].rows
    assert (batches["prefill_rows"] + batches["decode_rows"]).equals(batches["rows"])
    assert batches["binding_limit"].value_counts().sum() == len(batches)
    busy = (stages["end_s"] - stages["start_s"]).groupby(stages["stage"]).sum()
    assert busy.tolist() == pytest.approx([stage.busy_s for stage in report.stages])
    requests = frame(out, "requests")
    assert requests["output_tokens"].tolist() == [output for _, _, output in LOAD]
    first = requests["arrival_s"] + requests["ttft_s"]
    credited = requests["ttft_s"][first > 1]
    assert report.latency.ttft_s.n == len(credited)
    assert report.latency.ttft_s.p90 == pytest.approx(np.percentile(credited, 90))
    paced = requests["tpot_s"][(requests["arrival_s"] + requests["e2e_s"] > 1)].dropna()
    assert report.latency.tpot_s.mean == pytest.approx(paced.mean())


def test_members_are_kept_for_some_laps_only(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "FLUSH_LAPS", 16)
    monkeypatch.setattr(recorder_module, "PICTURE_LAPS", 4)
    report = run_load(out)
    recorded = frame(out, "spans")["micro_batch_id"].nunique()
    assert 4 * 3 <= recorded < report.micro_batches / 2


def test_csv_files_hold_the_same_rows(out: Path) -> None:
    run_load(out, csv=True)
    for table in ("requests", "micro_batches", "stages", "spans", "samples"):
        text = pd.read_csv(out / f"{table}.csv")
        assert text.columns.tolist() == frame(out, table).columns.tolist()
        pd.testing.assert_frame_equal(text, frame(out, table), check_dtype=False)


def test_files_get_their_names_only_when_the_run_is_complete(out: Path) -> None:
    recorder = Recorder(out, plan_of(), CauseClock())
    assert not list(out.glob("*.parquet"))
    recorder.close(0, statistics(), Facts(), LABELS)
    assert len(list(out.glob("*.parquet"))) == 5
    assert not list(out.glob(".*.partial"))


def test_no_file_says_when_or_where_it_was_made(out: Path) -> None:
    run_load(out)
    for path in out.glob("*.parquet"):
        metadata = pq.read_metadata(path)
        assert metadata.metadata is None
        assert str(out).encode() not in path.read_bytes()


SCRIPT = """
import sys
from pathlib import Path
from kvasir_scenario.report import write_report
from kvasir_scenario.run_dir import prepare_run_dir
from tests.scenario.test_recorder import run_load
out = prepare_run_dir(Path(sys.argv[1]))
write_report(out, run_load(out, csv=True))
"""


def test_the_same_run_leaves_the_same_bytes_whatever_the_hash_seed(tmp_path: Path) -> None:
    digests = []
    for seed in ("0", "1"):
        path = tmp_path / seed
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path.cwd())}
        subprocess.run([sys.executable, "-c", SCRIPT, str(path)], env=environment, check=True)
        digests.append(
            {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in path.iterdir()}
        )
    assert digests[0] == digests[1]
    assert len(digests[0]) == 12
