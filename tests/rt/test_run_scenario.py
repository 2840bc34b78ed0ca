"""`kvasir-rt SCENARIO`: the simulator's scenario on real processes, and the simulator's report."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvasir_core import eventlog
from kvasir_core.errors import ScenarioError
from kvasir_core.ring import Ring
from kvasir_rt.run_scenario import run_scenario
from kvasir_rt.scenario_ring import fixed_ring, plan_layers, read_shape, ring_of
from kvasir_scenario.load import load_text
from kvasir_scenario.planning import plan_of
from kvasir_scenario.report_schema import Report
from kvasir_scenario.schema import Scenario
from tests.rt.tiny_models import TinyModel, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]

P1 = """
name: p1
model: {layers: 8, context: 4096}
ring:
  stages: 4
  micro_batch_width: 1
  row_width: 64
  window: 4
  kv_tokens: 100000
workload: {kind: trace, requests: [[0, 1, 10], [0, 1, 10], [0, 1, 10], [0, 1, 10]]}
"""


def scenario_of(text: str, base: Path = ROOT, *settings: str) -> Scenario:
    return load_text(
        text,
        label="test.yaml",
        base=base,
        overrides=settings,
        planner=plan_layers,
        read_shape=read_shape,
    )


def run_fixed(scenario: Scenario, hold_s: float, out: Path | None = None) -> Report:
    """On stages that hold each micro-batch for a time and compute nothing."""

    def ring_for(each: Scenario):  # type: ignore[no-untyped-def]
        return fixed_ring(each, (hold_s,) * each.ring.stage_count, 1000)

    return run_scenario(scenario, out, ring_for=ring_for, events=out is not None)


def test_four_requests_overlap_on_four_stages(tmp_path: Path) -> None:
    """P1 (c), with 50 ms for 1 s: 43 holds in all, three or more stages busy at one moment."""
    hold_s = 0.05
    report = run_fixed(scenario_of(P1), hold_s, tmp_path / "run")
    assert report.mode == "measured"
    assert report.counts.finished == 4
    assert report.micro_batches == 40
    assert 43 * hold_s <= report.elapsed_s < 1.5 * 43 * hold_s
    rows = pq.read_table(tmp_path / "run" / "stages.parquet").to_pylist()
    moments = [row["start_s"] + hold_s / 2 for row in rows]
    overlap = max(
        len({row["micro_batch_id"] for row in rows if row["start_s"] <= at < row["end_s"]})
        for at in moments
    )
    assert overlap == 4
    for stage in report.stages:
        assert stage.micro_batches == 40
        assert stage.busy_s >= 40 * hold_s
        total = stage.busy_s + stage.blocked_s + stage.starved_s
        assert total == pytest.approx(report.elapsed_s, abs=1e-6)


def test_one_request_or_a_window_of_one_leaves_stages_starved() -> None:
    """P1 (a) and (b): a quarter of the time busy, and not called saturated."""
    one = scenario_of(P1, ROOT, "workload.requests=[[0, 1, 10]]")
    for scenario, laps in ((one, 10), (scenario_of(P1, ROOT, "ring.window=1"), 40)):
        report = run_fixed(scenario, 0.02)
        assert report.micro_batches == laps
        assert report.verdict.kind.value in {"starved", "idle", "overloaded"}
        for stage in report.stages:
            assert stage.busy_s < 0.3 * report.elapsed_s


def test_a_ring_fed_one_request_starves_and_one_fed_thirty_two_names_its_bottleneck() -> None:
    """Each stage's three times sum to the elapsed time, and the verdict tells the two apart."""
    few = "workload={kind: closed, users: 1, prompt_tokens: 2, output_tokens: 12, requests: 2}"
    many = "workload={kind: closed, users: 32, prompt_tokens: 2, output_tokens: 12, requests: 64}"
    width = "ring.micro_batch_width=8"

    def uneven(each: Scenario):  # type: ignore[no-untyped-def]
        return fixed_ring(each, (0.01, 0.01, 0.04, 0.01), 1000)

    one, crowd = (
        run_scenario(scenario_of(P1, ROOT, width, load), ring_for=uneven) for load in (few, many)
    )
    for report in (one, crowd):
        for stage in report.stages:
            total = stage.busy_s + stage.blocked_s + stage.starved_s
            assert total == pytest.approx(report.elapsed_s, abs=1e-6)
    assert one.verdict.kind.value == "starved"
    assert all(stage.starved_s > 0.4 * one.elapsed_s for stage in one.stages)
    assert (crowd.verdict.kind.value, crowd.verdict.stage) == ("bottlenecked", 2)
    assert crowd.stages[2].busy_s > 0.8 * crowd.elapsed_s


def test_the_event_log_replays_to_the_counts_of_the_report(tmp_path: Path) -> None:
    scenario = scenario_of(P1, ROOT, "workload.requests=[[0, 5, 8], [0.05, 70, 3], [0.1, 1, 1]]")
    report = run_fixed(scenario, 0.005, tmp_path / "run")
    ring = Ring(plan_of(scenario))
    with (tmp_path / "run" / "events.jsonl").open() as lines:
        for _ in eventlog.replay(ring, lines):
            pass
    statistics = ring.statistics()
    assert statistics.finished == report.counts.finished == 3
    assert statistics.micro_batches == report.micro_batches
    saved = json.loads((tmp_path / "run" / "report.json").read_text())
    assert saved["mode"] == "measured"
    assert saved["counts"]["finished"] == 3


def test_a_slowed_stage_holds_so_many_times_as_long_until_the_fault_ends(tmp_path: Path) -> None:
    scenario = scenario_of(
        P1, ROOT,
        "faults=[{kind: stage_slow, stage: 1, at_s: 0, factor: 3, for_s: 0.6},"
        " {kind: stage_slow, stage: 1, at_s: 0, factor: 2, for_s: 0.6}]",
        "workload.requests=[[0, 1, 30], [0, 1, 30]]",
    )  # fmt: skip
    hold_s = 0.01
    report = run_fixed(scenario, hold_s, tmp_path / "run")
    assert report.counts.finished == 2
    holds: dict[int, list[float]] = {}
    for row in pq.read_table(tmp_path / "run" / "stages.parquet").to_pylist():
        holds.setdefault(row["stage"], []).append(row["end_s"] - row["start_s"])
    assert sorted(holds[1])[-5] >= 6 * hold_s
    assert min(holds[1]) < 3 * hold_s, "it is well again in the end"
    for other in (0, 2, 3):
        assert sorted(holds[other])[len(holds[other]) // 2] < 3 * hold_s


def test_a_killed_stage_is_part_of_the_scenario_and_costs_no_request(tmp_path: Path) -> None:
    scenario = scenario_of(
        P1, ROOT,
        "faults=[{kind: stage_lost, stage: 2, at_s: 0.3, for_s: 1}]",
        "workload.requests=[[0, 5, 30], [0, 9, 30]]",
    )  # fmt: skip
    report = run_fixed(scenario, 0.01, tmp_path / "run")
    assert report.counts.finished == 2
    assert report.kv.recomputed_tokens > 0
    requests = pq.read_table(tmp_path / "run" / "requests.parquet").to_pylist()
    assert [row["output_tokens"] for row in requests] == [30, 30]


def test_a_horizon_ends_the_run_and_counts_what_is_left() -> None:
    scenario = scenario_of(
        P1, ROOT, "run.horizon_s=1.0", "workload.requests=[[0, 1, 5], [0, 1, 400]]"
    )
    report = run_fixed(scenario, 0.02)
    counts = report.counts
    assert (counts.offered, counts.finished, counts.running) == (2, 1, 1)
    assert report.elapsed_s == pytest.approx(1.0, abs=0.3)


def test_closed_loop_users_think_and_send_again() -> None:
    workload = (
        "workload={kind: closed, users: 3, think_s: 0.02, requests: 12, "
        "prompt_tokens: 4, output_tokens: 3}"
    )
    report = run_fixed(scenario_of(P1, ROOT, workload), 0.003)
    assert report.counts.finished == 12


def test_deadlines_and_leaving_clients_end_requests() -> None:
    scenario = scenario_of(
        P1, ROOT,
        "workload={kind: constant, rate_per_s: 50, requests: 4, prompt_tokens: 3, "
        "output_tokens: 400, deadline_s: 0.5}",
    )  # fmt: skip
    report = run_fixed(scenario, 0.01)
    assert report.counts.cancelled == 4


@pytest.mark.parametrize(
    ("setting", "key", "words"),
    [
        ("name=x", "model.path", "missing; kvasir-rt runs a real model"),
        ("ring.prefix_cache=true", "ring.prefix_cache", "only kvasir-sim"),
        (
            "faults=[{kind: link_stop, hop: 1, at_s: 1, for_s: 1}]",
            "faults.0.kind",
            "only stage_lost and stage_slow",
        ),
    ],
)
def test_what_cannot_be_run_for_real_is_refused_by_key(setting: str, key: str, words: str) -> None:
    scenario = scenario_of(P1, ROOT, setting)
    ring_for = (
        ring_of if key == "model.path" else partial(fixed_ring, hold_s=(0.0,) * 4, vocabulary=9)
    )
    with pytest.raises(ScenarioError, match=words) as caught:
        run_scenario(scenario, ring_for=ring_for)
    assert key in str(caught.value)


def tiny_scenario(folder: Path) -> str:
    write_tiny_model(folder / "tiny.gguf", TinyModel(layers=5))
    return """
name: tiny
model: {path: tiny.gguf, context: 128, dtype: float32}
ring: {stages: 2, layers: auto, row_width: 16, micro_batch_width: 4, running_max: 4}
workload: {kind: poisson, rate_per_s: 20, requests: 6, prompt_tokens: 12, output_tokens: 5}
what_if: {drained: {policy.packer: drained}}
"""


def test_the_command_runs_a_real_model_and_prints_the_report(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_scenario(tmp_path))
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvasir_rt.cli",
            str(path),
            "--out",
            str(tmp_path / "run"),
            "--json",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["counts"]["finished"] == 6
    assert report["mode"] == "measured"
    assert [part["name"] for part in report["variants"]] == ["drained"]
    names = {entry.name for entry in (tmp_path / "run").iterdir()}
    assert {"report.json", "scenario.yaml", "requests.parquet", "stages.parquet"} <= names


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("model.path=nowhere.gguf",), "model.path"),
        (("model.layers=9", "ring.layers=even"), "model.layers: found 9"),
        (("model.context=4096",), "was made for 512"),
        (("runtime.dtype=float16",), "runtime.dtype"),
        (("runtime.device=cuda:7",), "--device cpu"),
        (("devices={gpu: {preset: a100-80g}}", "ring.device=gpu"), "--device cpu"),
    ],
)
def test_a_model_or_device_that_does_not_fit_is_exit_2_and_names_the_key(
    tmp_path: Path, settings: tuple[str, ...], words: str
) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(tiny_scenario(tmp_path))
    arguments = [word for setting in settings for word in ("--set", setting)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "kvasir_rt.cli",
            str(path),
            "--out",
            str(tmp_path / "run"),
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
