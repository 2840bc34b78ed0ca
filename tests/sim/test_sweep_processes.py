"""A sweep on real worker processes: killed, stopped and robbed of its workers."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvasir_sim.sweep import pool as pool_module
from kvasir_sim.sweep.evaluate import Task
from kvasir_sim.sweep.journal import journal_path
from kvasir_sim.sweep.points import Source
from kvasir_sim.sweep.pool import LocalPool
from tests.sim.sweeps import command, run_command, small

WAIT_S = 120.0
GRID = ("--grid", "ring.window=1:6:1", "--seeds", "2", "--jobs", "2")
LONG = ("requests: 12", "requests: 3000")  # Some 120 ms a point: longer than anybody takes to kill.


def wait_for(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"{what} within {WAIT_S:.0f} s"
        time.sleep(0.01)


def heed_interrupts() -> None:
    """What a shell starts in the background ignores SIGINT, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def journaled(out: Path) -> bool:
    """Whether some rows are written; others cannot read the journal, but it grows."""
    log = journal_path(out).with_name(f"{journal_path(out).name}-wal")
    return log.exists() and log.stat().st_size > 30_000


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """The scenario's file, and the table of a sweep that nobody disturbs."""
    folder = tmp_path_factory.mktemp("sweep")
    scenario = small(folder, **dict([LONG]))
    result = run_command(("sweep", scenario, *GRID, "--out", "whole.parquet", "--json"), folder)
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)
    assert (summary["points"], summary["known"], summary["failed"]) == (12, 0, 0)
    return scenario, (folder / "whole.parquet").read_bytes()


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_a_sweep_killed_in_the_midst_goes_on_and_ends_with_the_same_bytes(
    kill: signal.Signals, undisturbed: tuple[Path, bytes], tmp_path: Path
) -> None:
    scenario, whole = undisturbed
    out = tmp_path / "table.parquet"
    words = ("sweep", scenario, *GRID, "--out", out, "--json")
    process = subprocess.Popen(
        command(*words),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heed_interrupts,  # noqa: PLW1509 - It starts no thread.
    )
    try:
        wait_for("rows", lambda: journaled(out))
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(kill)
        _, said = process.communicate(timeout=WAIT_S)
    finally:
        process.kill()
        process.wait()
    assert len(workers) == 2
    wait_for("nobody running", lambda: not any(worker.is_running() for worker in workers))
    assert not out.exists()
    if kill != signal.SIGKILL:
        assert process.returncode == (143 if kill == signal.SIGTERM else -kill)
        assert "points are kept; the same command goes on from there" in said
    again = run_command(words, tmp_path)
    assert again.returncode == 0, again.stderr
    summary = json.loads(again.stdout)
    assert 0 < summary["known"] < 12, "what was done was not done again, and it was not all"
    assert out.read_bytes() == whole
    assert not list(tmp_path.glob("*journal*"))


def test_a_worker_that_dies_is_replaced_and_its_task_runs_again(tmp_path: Path) -> None:
    source = Source.of_file(small(tmp_path, **dict([LONG])))
    with LocalPool(source, 1) as pool:
        pool.wait_ready()
        pool.submit(Task(5, ()))
        os.kill(pool.pids[0], signal.SIGKILL)
        reply = pool.receive()
        assert (reply.number, reply.error, reply.figures["offered"]) == (5, None, 3000)


def test_a_task_that_kills_its_workers_is_lost_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "TRIES", 1)
    source = Source.of_file(small(tmp_path))
    with LocalPool(source, 1) as pool:
        pool.wait_ready()
        # So many take seconds to draw; the worker dies before it has them.
        pool.submit(Task(1, (("workload.requests", 40_000_000),)))
        pool.submit(Task(2, ()))
        os.kill(pool.pids[0], signal.SIGKILL)
        replies = {reply.number: reply for reply in (pool.receive(), pool.receive())}
    assert replies[1].is_lost
    assert "the process that ran it died" in str(replies[1].error)
    assert replies[2].error is None


def test_a_worker_that_cannot_begin_is_an_error_and_no_endless_loop(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = Source("model: 7\n", "broken.yaml", str(tmp_path))
    with LocalPool(source, 1) as pool, pytest.raises(ChildProcessError, match="before it began"):
        pool.wait_ready()
    assert "broken.yaml" in capfd.readouterr().err
