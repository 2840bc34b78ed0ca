"""`kvasir-rt SCENARIO --hub URL`: a scenario's experts are shared with real workers."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kvasir_core.units import nanos
from kvasir_rt.cli import main
from kvasir_rt.hub.dials import parse_origin
from kvasir_rt.run_scenario import run_scenario
from kvasir_rt.scenario_ring import plan_layers, read_shape, ring_of
from kvasir_rt.scenario_swarm import HubAccess, slots_server
from kvasir_rt.serve_cli import read_access
from kvasir_scenario.load import load_scenario, load_text
from kvasir_scenario.page import write_page
from kvasir_scenario.report_schema import Report
from kvasir_scenario.tables import SWARM
from kvasir_sim.run import run as simulate
from tests.rt.swarm.swarms import SERVICE_TOKEN, ThreadHub, live_swarm, wait_for
from tests.rt.tiny_models import TinyModel, write_tiny_model

SCENARIO = """
name: tiny
model: {{path: {model}, context: 128}}
ring: {{stages: 2, row_width: 32, micro_batch_width: 2, running_max: 8, kv_tokens: 2000}}
workload: {{kind: closed, users: 6, prompt_tokens: 6, output_tokens: 12, duration_s: 9}}
experts:
  overlap: 3
  coordinator: {{period_s: 0.3, poll_timeout_s: 0.3, map_period_s: 0.3, engaged_min_s: 5, no_gain_s: 3600}}
run: {{horizon_s: 20}}
"""
SIMULATED = """
name: tiny
model: {layers: 2, context: 128, experts: 16, experts_used: 4}
ring: {stages: 2, row_width: 32, micro_batch_width: 2, running_max: 8, kv_tokens: 2000}
costs: {kind: fixed, pass_s: 0.004}
workload: {kind: closed, users: 6, prompt_tokens: 6, output_tokens: 12, duration_s: 9}
experts:
  overlap: 3
  local: {per_row_s: 0.001}
  model: {bytes_per_expert: 1000}
  hub: {base: 1, boost: 0}
  workers:
    - {name: w, count: 2, per_expert_s: 0.001, link: {latency_s: 0.001}, download_bytes_per_s: 1e6}
run: {horizon_s: 20}
"""


def test_its_stages_overlap_and_the_report_says_what_they_waited_for(tmp_path: Path) -> None:
    with live_swarm(tmp_path) as swarm:
        assert isinstance(swarm.hub, ThreadHub)
        path = tmp_path / "scenario.yaml"
        path.write_text(SCENARIO.format(model=swarm.model_file))
        scenario = load_scenario(path, (), planner=plan_layers, read_shape=read_shape)
        for name in ("a", "b"):
            swarm.thread_worker(name, experts_max=16, delay_s=0.01)
        access = read_access(swarm.hub_url, _token_file(tmp_path))
        assert access is not None
        report = run_scenario(
            scenario,
            tmp_path / "run",
            ring_for=lambda given: ring_of(given, has_hub=True),
            access=access,
        )
        computed = sum(t.worker.desk.counts.computed for t in swarm.threads if t.worker)
        assert computed > 0
        wait_for("they say goodbye", lambda: not swarm.hub or not swarm.hub.service.control.targets)
    assert report.counts.finished > 0
    assert report.counts.failed == 0
    for stage in report.stages:
        blocked = stage.blocked_by.credit + stage.blocked_by.experts
        assert stage.blocked_s == pytest.approx(blocked)
        parts = stage.busy_s + stage.blocked_s + stage.starved_s
        assert nanos(parts) == pytest.approx(nanos(report.elapsed_s), abs=10)
    assert sum(stage.blocked_by.experts for stage in report.stages) > 0
    _the_swarm_is_told_of(report, tmp_path / "run", computed)


def _the_swarm_is_told_of(report: Report, run: Path, computed: int) -> None:
    swarm = report.swarm
    assert swarm is not None
    assert (swarm.workers, swarm.workers_covering_max, swarm.target_base) == (2, 2, 1)
    assert swarm.downloads == swarm.slice_starts == 2
    assert swarm.download_bytes > 0
    assert swarm.trials > 0
    assert 0 < swarm.dispatches <= computed + swarm.late_answers
    assert swarm.share_remote_pairs is not None
    assert 0 < swarm.share_remote_pairs < 1
    assert swarm.time_to_first_relief_s is not None
    assert 0 < swarm.engaged_s <= report.elapsed_s
    assert swarm.quarantined["real"].quarantined == swarm.mismatches == 0
    assert swarm.peak.output_tokens_per_s == pytest.approx(
        report.throughput.output_tokens_per_s, rel=0.01
    )
    assert swarm.control_decisions > swarm.dispatches
    table = pq.read_table(run / "swarm.parquet")
    assert table.schema.equals(SWARM)
    assert max(table["workers_covering"].to_pylist()) == 2
    assert any(share for share in table["remote_share"].to_pylist())
    saved = json.loads((run / "report.json").read_text())
    assert saved["swarm"]["dispatches"] == swarm.dispatches
    simulated = simulate(load_text(SIMULATED, label="sim.yaml", base=run)).report.swarm
    assert simulated is not None
    assert list(saved["swarm"]) == list(simulated.model_dump())
    for part in ("peak", "rest"):
        assert (saved["swarm"][part] is None) == (getattr(simulated, part) is None)
    write_page(run, report)
    assert "The swarm over time" in (run / "report.html").read_text()


def _token_file(folder: Path) -> Path:
    path = folder / "service.token"
    path.touch(mode=0o600)
    path.write_text(SERVICE_TOKEN)
    return path


@pytest.mark.parametrize(
    ("architecture", "section", "options", "said"),
    [
        ("qwen3moe", "experts: {overlap: 2}", (), "give --hub URL"),
        ("qwen3moe", "", ("--hub", "http://127.0.0.1:9"), "experts: missing"),
        ("llama", "experts: {overlap: 2}", ("--hub", "http://127.0.0.1:9"), "is dense"),
        ("qwen3moe", "experts: {overlap: 2}", ("--hub", "http://10.1.1.1:9"), "must run on this"),
        ("qwen3moe", "experts: {overlap: 0}", ("--hub", "http://127.0.0.1:9"), "overlap"),
    ],
)
def test_what_cannot_be_shared_is_refused_and_names_the_key(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    architecture: str,
    section: str,
    options: tuple[str, ...],
    said: str,
) -> None:
    model = write_tiny_model(tmp_path / "m.gguf", TinyModel(architecture=architecture, layers=2))
    path = tmp_path / "scenario.yaml"
    head = SCENARIO.format(model=model).partition("experts:")[0]
    path.write_text(f"{head}{section}\n")
    token = ("--hub-token-file", str(_token_file(tmp_path))) if options else ()
    with pytest.raises(SystemExit) as ended:
        main([str(path), "--out", str(tmp_path / "run"), *options, *token])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_slots_of_a_run_that_has_no_engine_yet_are_unknown() -> None:
    with slots_server() as slots:
        assert slots.answer("/slots") == (503, [])
        assert slots.answer("/other") == (404, [])
    access = HubAccess(parse_origin("http://127.0.0.1:1"), "a secret")
    assert "secret" not in repr(access)
