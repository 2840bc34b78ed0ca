"""The simulator as a user meets it: command line, files, determinism, faults, replay."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from kvasir_core import Ring
from kvasir_core.eventlog import replay
from kvasir_scenario import run_dir
from kvasir_scenario.planning import plan_of
from kvasir_scenario.report_schema import parse_report
from kvasir_scenario.workload import build_workload
from kvasir_sim.cli import SUBCOMMANDS, main
from kvasir_sim.costs import build_costs
from kvasir_sim.prefix_cache import cached_tokens
from kvasir_sim.run import run
from tests.sim.rings import scenario_of, simulated
from tests.sim.shipped import ROOT, shared, shipped

SMALL = ["workload.requests=60", "what_if={}"]


def kvasir_sim(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvasir_sim.cli", *words]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        env={**os.environ, **(env or {})},
    )


def digests(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def test_same_scenario_and_seed_give_the_same_bytes(tmp_path: Path) -> None:
    words = ["scenarios/4stage.yaml", "--set", "workload.requests=40", "--quiet", "--events"]
    outs = []
    for seed, processes in (("0", "0"), ("7", "2")):
        out = tmp_path / f"run-{seed}"
        done = kvasir_sim(
            *words, "--out", str(out), "--processes", processes, env={"PYTHONHASHSEED": seed}
        )
        assert done.returncode == 0, done.stderr
        outs.append(digests(out))
    assert outs[0] == outs[1]
    assert {"report.json", "requests.parquet", "timeline.png"} <= set(outs[0])


def test_json_is_all_of_standard_output(tmp_path: Path) -> None:
    words = ["scenarios/starved.yaml", "--json", "--no-plots", "--out", str(tmp_path / "run")]
    done = kvasir_sim(*words)
    assert done.returncode == 0, done.stderr
    assert parse_report(done.stdout) == parse_report((tmp_path / "run/report.json").read_text())


def test_the_report_begins_with_the_verdict(tmp_path: Path) -> None:
    done = kvasir_sim("scenarios/starved.yaml", "--no-plots", "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    first = [line for line in done.stdout.splitlines() if line.strip()][:4]
    assert any("starved" in line.lower() for line in first), first
    assert str(tmp_path / "run") in done.stdout


@pytest.mark.parametrize("words", [["--help"], *([name, "--help"] for name in SUBCOMMANDS)])
def test_every_command_explains_itself(words: list[str]) -> None:
    done = kvasir_sim(*words)
    assert done.returncode == 0, done.stderr
    assert "Usage: kvasir-sim" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["absent.yaml"], "absent.yaml"),
        (["scenarios/starved.yaml", "--set", "ring.widow=3"], "did you mean"),
        (["scenarios/starved.yaml", "--set", "ring.window=0"], "ring.window"),
        (["scenarios/starved.yaml", "--set", "ring.stages=1"], "2"),
        (["scenarios/starved.yaml", "--no-such-option"], "no-such-option"),
        (["scenarios/starved.yaml", "--set", "ring.prefix_cache=true"], "prefix_cache"),
        (["plam", "scenarios/starved.yaml"], "did you mean plan?"),
        (["--schema", "extra"], "--schema stands alone"),
    ],
)
def test_wrong_input_exits_with_2_and_one_message(
    tmp_path: Path, words: list[str], complaint: str
) -> None:
    done = kvasir_sim(*words, "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert complaint in done.stderr.lower()
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years")
    done = kvasir_sim("scenarios/starved.yaml", "--out", str(tmp_path))
    assert done.returncode == 2
    assert (tmp_path / "thesis.txt").read_text() == "ten years"
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize(
    ("how", "status"),
    [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, -signal.SIGINT)],
)
def test_a_run_that_is_stopped_leaves_nothing_and_nobody(
    how: signal.Signals, status: int, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    long = ["--set", "workload.requests=1000000", "--set", "what_if={slow: {ring.window: 1}}"]
    words = ["scenarios/starved.yaml", *long, "--processes", "1", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-m", "kvasir_sim.cli", *words],
        stderr=subprocess.PIPE, text=True, cwd=ROOT,
        preexec_fn=heed_interrupts,  # noqa: PLW1509 - No threads here.
    )  # fmt: skip
    asker = psutil.Process(process.pid)
    end = time.monotonic() + 60
    while not (out / ".stages.parquet.partial").exists() or not asker.children():
        assert time.monotonic() < end, "the run begins within a minute"
        time.sleep(0.02)
    workers = asker.children()
    process.send_signal(how)
    _, said = process.communicate(timeout=60)
    assert (process.returncode, said.strip()) == (status, "stopped")
    assert not out.exists()
    assert not any(worker.is_running() for worker in workers)


def test_a_stopped_run_leaves_what_was_there_before(tmp_path: Path) -> None:
    run_dir.prepare_run_dir(tmp_path)
    (tmp_path / "thesis.txt").write_text("ten years")
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(KeyboardInterrupt), run_dir.nothing_of_a_stopped_run(tmp_path):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_off_a_terminal_no_name_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    name = "one-very-slow-link-between-the-second-and-the-third-stage"
    settings = ("workload.requests=20", f"what_if={{{name}: {{ring.window: 1}}}}")
    words = [word for setting in settings for word in ("--set", setting)]
    out = str(tmp_path / "run")
    main([str(ROOT / "scenarios/starved.yaml"), *words, "--no-plots", "--out", out])
    assert f" {name} " in capsys.readouterr().out


def test_the_schema_for_editors_takes_every_shipped_scenario() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import yaml

    done = kvasir_sim("--schema")
    schema = json.loads(done.stdout)
    for path in (ROOT / "scenarios").glob("*.yaml"):
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)


def test_the_simulator_needs_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from kvasir_sim.run import run\n"
        "print(run('scenarios/starved.yaml').report.verdict.kind)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout.strip() == "starved"


def decisions_of(log: Path, overrides: Sequence[str], name: str = "4stage") -> list[object]:
    scenario = shipped(name, overrides)
    plan = plan_of(scenario)
    ring = Ring(plan, predict=build_costs(scenario, plan).predict)
    return [decision for _, _, ds in replay(ring, log.read_text().splitlines()) for decision in ds]


def test_the_event_log_replays_to_the_same_micro_batches(tmp_path: Path) -> None:
    result = run(shipped("4stage", SMALL), tmp_path / "run", events=True)
    decisions = decisions_of(tmp_path / "run" / "events.jsonl", SMALL)
    launched = [d.micro_batch for d in decisions if type(d).__name__ == "Launch"]  # type: ignore[attr-defined]
    batches = result.micro_batches
    assert [b.id for b in launched] == batches.micro_batch_id.tolist()
    assert [b.row_count for b in launched] == batches.rows.tolist()


MOONCAKE = "'${KVASIR_DATA}/traces/mooncake/synthetic_trace.jsonl'"
LOSS = {"kind": "stage_lost", "at_s": 6.5, "stage": 1, "for_s": 3.0}


def test_a_lost_stage_delays_and_loses_no_token(tmp_path: Path) -> None:
    requests: list[list[float]] = [[0, 4, 6], [0.5, 7, 5]]
    whole = simulated(tmp_path / "whole", requests, micro_batch_width=4)
    scenario = scenario_of(requests, micro_batch_width=4)
    data = scenario.model_copy(update={"faults": _faults(LOSS)})
    broken = run(data, tmp_path / "broken")
    assert broken.report.counts.finished == 2
    assert broken.report.elapsed_s > whole.report.elapsed_s
    assert broken.report.kv.preemptions == 2
    frame = broken.requests
    assert frame.output_tokens.tolist() == [6, 5]
    stages = broken.stages
    dead = stages[(stages.stage == 1) & (stages.start_s > 6.5) & (stages.start_s < 9.5)]
    assert dead.empty


def _faults(*faults: dict[str, object]) -> object:
    from kvasir_scenario.load import load_text

    text = json.dumps(
        {
            "model": {"layers": 8, "context": 4096},
            "ring": {"stages": 2},
            "workload": {"kind": "trace", "requests": [[0, 1, 1]]},
            "faults": list(faults),
        }
    )
    return load_text(text).faults


def test_a_slow_stage_is_named_by_the_verdict() -> None:
    slow = "faults=[{kind: stage_slow, stage: 2, factor: 3, at_s: 0, for_s: 100000}]"
    report = run(shipped("saturated", ["workload.requests=300", slow])).report
    assert report.verdict.stage == 2


def test_random_faults_come_at_seeded_times_and_everything_still_finishes() -> None:
    faults = (
        "faults=[{kind: stage_lost, stage: any, rate_per_h: 400, for_s: 0.3},"
        "{kind: link_stop, hop: any, rate_per_h: 400, for_s: 0.2},"
        "{kind: link_slow, hop: any, rate_per_h: 400, factor: 2, add_s: 0.01, for_s: 1}]"
    )
    reports = [
        run(shipped("saturated", ["workload.requests=600", faults], seed=seed)).report
        for seed in (1, 1, 2)
    ]
    assert all(report.counts.finished == 600 for report in reports)
    assert reports[0] == reports[1]
    assert reports[0].elapsed_s != reports[2].elapsed_s
    assert reports[0].kv.preemptions > 0


def test_cancels_and_deadlines_end_requests_and_free_their_kv() -> None:
    report = run(
        shipped(
            "saturated",
            [
                "workload.requests=300",
                "workload.cancels={share: 0.3, after_s: 1.0}",
                "workload.deadline_s=4",
            ],
        )
    ).report
    assert report.counts.cancelled > 0
    assert report.counts.finished + report.counts.cancelled == 300


def test_a_prefix_cache_saves_prompt_rows() -> None:
    shared("traces/mooncake/synthetic_trace.jsonl")
    words = [
        "workload={kind: trace, format: mooncake, limit: 300, path: " + MOONCAKE + "}",
        "model.context=262144", "ring.kv_tokens=20000000", "ring.row_width=4096", "what_if={}",
        "costs={kind: fixed, pass_s: 0.01, per_token_s: 0.00001}", "devices={}",
        "ring.stages=4", "ring.link={}",
    ]  # fmt: skip
    cold = run(shipped("4stage", words)).report
    scenario = shipped("4stage", [*words, "ring.prefix_cache=true"])
    warm = run(scenario).report
    requests, _ = build_workload(scenario)
    cached = cached_tokens(scenario, requests)
    assert warm.counts == cold.counts
    assert cached is not None
    assert warm.stages[0].rows == cold.stages[0].rows - sum(cached) < cold.stages[0].rows
