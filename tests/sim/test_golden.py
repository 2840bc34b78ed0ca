"""An independent simulator's run, request by request; and the same input at other scales."""

from pathlib import Path

import pandas as pd
import pytest

from kvasir_sim.run import run
from tests.sim.shipped import shared, shipped

GOLDEN = "golden/pipeline_4stage_a100"
TOLERANCE_S = 1e-5


def test_golden_run_agrees_with_every_request(tmp_path: Path) -> None:
    expected = pd.read_csv(shared(f"{GOLDEN}/requests_out_scale0.2.csv"))
    result = run(shipped("golden_pipeline"), tmp_path / "run")
    ours = result.requests
    assert result.report.micro_batches == 16_276
    assert result.report.elapsed_s == pytest.approx(151.670, abs=5e-4)
    assert ours.request_id.tolist() == expected.id.tolist()
    for mine, theirs in (("ttft_s", "ttft"), ("e2e_s", "e2e"), ("queue_s", "sched_delay")):
        assert (ours[mine] - expected[theirs]).abs().max() <= TOLERANCE_S, mine
    latency = result.report.latency.ttft_s
    assert latency.mean == pytest.approx(7.924, abs=5e-4)
    assert latency.p99 == pytest.approx(16.768, abs=5e-4)


@pytest.mark.parametrize(("scale", "micro_batches"), [("0.1", 14_623), ("0.4", None)])
def test_golden_input_runs_at_other_scales(scale: str, micro_batches: int | None) -> None:
    shared(f"{GOLDEN}/requests_in.csv")
    report = run(shipped("golden_pipeline", [f"workload.time_scale={scale}"])).report
    assert report.counts.finished == 3000
    if micro_batches is not None:  # Counted by a second shell, written from the same page.
        assert report.micro_batches == micro_batches
