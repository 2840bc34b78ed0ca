"""Stages die at any moment; nobody hangs, no token comes twice, none is lost (law R15)."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from kvasir_core.microbatch import FinishReason
from kvasir_rt.engine import Engine
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.socket_directory import PREFIX, SocketDirectory
from tests.rt.rings import Clients, engine_of, is_alive, plan_of, running, until

ROOT = Path(__file__).resolve().parents[2]


def pid_of(engine: Engine, stage: int) -> int:
    pid = engine.snapshot().stages[stage].pid
    assert pid is not None
    return pid


def kill_under_load(stages: int, kills: int, seed: int) -> None:
    """Kill each stage in turn, each time after a random number of further tokens."""
    chance = random.Random(seed)
    engine = engine_of(plan_of(stages), hold_s=0.002, restarts_max=kills + 1)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(12, 40 * (kills + 1), prompt=20)
        pids = [pid_of(engine, stage) for stage in range(stages)]
        for kill in range(kills):
            target = clients.total + chance.randrange(1, 300)
            clients.wait(lambda target=target: clients.total >= target, "progress")  # type: ignore[misc]
            stage = kill % stages
            os.kill(pid_of(engine, stage), signal.SIGKILL)
            epoch = kill + 1
            until(lambda epoch=epoch: engine.snapshot().statistics.epoch >= epoch, "found", 2.0)  # type: ignore[misc]
            until(lambda: engine.snapshot().is_ready, "replaced", 30.0)
        clients.wait_all(120.0)
        clients.check()
        snapshot = engine.snapshot()
        assert [stage.restarts for stage in snapshot.stages] == [
            len(range(stage, kills, stages)) for stage in range(stages)
        ]
        for stage in range(min(kills, stages), stages):  # The others were never touched.
            assert snapshot.stages[stage].pid == pids[stage]
        until(lambda: engine.snapshot().statistics.kv_blocks_in_use == 0, "KV is free")


def test_each_stage_killed_in_turn_under_load_changes_no_token() -> None:
    kill_under_load(stages=4, kills=4, seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(5))
def test_each_stage_killed_in_turn_many_times_changes_no_token(seed: int) -> None:
    kill_under_load(stages=4, kills=4, seed=100 + seed)


def test_only_the_dead_stage_is_replaced() -> None:
    engine = engine_of(plan_of(3), hold_s=0.002)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(6, 100)
        clients.wait(lambda: clients.total > 60, "progress")
        before = [pid_of(engine, stage) for stage in range(3)]
        os.kill(before[1], signal.SIGKILL)
        clients.wait_all()
        clients.check()
        after = [pid_of(engine, stage) for stage in range(3)]
        assert (after[0], after[2]) == (before[0], before[2])
        assert after[1] != before[1]


def test_a_second_death_during_recovery_is_survived() -> None:
    engine = engine_of(plan_of(3), hold_s=0.002)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(6, 120, prompt=30)
        clients.wait(lambda: clients.total > 60, "progress")
        survivor = pid_of(engine, 2)
        os.kill(pid_of(engine, 0), signal.SIGKILL)
        until(lambda: engine.snapshot().statistics.epoch == 1, "the first death is found", 2.0)
        os.kill(survivor, signal.SIGKILL)
        clients.wait_all()
        clients.check()
        assert engine.snapshot().statistics.epoch == 2


def test_a_stopped_stage_is_found_within_two_seconds_and_replaced() -> None:
    engine = engine_of(plan_of(2), hold_s=0.002)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(4, 100)
        clients.wait(lambda: clients.total > 40, "progress")
        stopped = pid_of(engine, 1)
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        until(lambda: engine.snapshot().statistics.epoch == 1, "found", 10.0)
        assert time.monotonic() - began < 2.0
        clients.wait_all()
        clients.check()
        assert not is_alive(stopped)


def test_the_ring_gives_up_after_too_many_deaths_and_tells_every_client() -> None:
    engine = engine_of(plan_of(2), hold_s=0.002, restarts_max=2)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(4, 500)
        for death in range(3):
            until(lambda: engine.snapshot().is_ready, "ready")
            seen = clients.total
            clients.wait(lambda seen=seen: clients.total > seen, "progress")  # type: ignore[misc]
            os.kill(pid_of(engine, death % 2), signal.SIGKILL)
            epoch = death + 1
            until(
                lambda epoch=epoch: (  # type: ignore[misc]
                    engine.snapshot().statistics.epoch >= epoch or bool(engine.snapshot().down_why)
                ),
                "found",
            )
        clients.wait_all()
        for request, end in clients.ends.items():
            assert end.reason is FinishReason.FAILED
            assert "gave up: 3 stages were lost" in end.detail
            assert "killed by signal 9" in end.detail
            clients.check_prefix(request)
        clients.submit(99, [1], 1)
        clients.wait_all()
        assert "gave up" in clients.ends[99].detail


def test_a_stage_that_cannot_start_is_an_error_that_says_why() -> None:
    engine = engine_of(plan_of(2, hidden=1))
    with pytest.raises(RingDown, match="a boundary row has 2 bytes; a fixed stage needs 8"):
        engine.start()
    assert not engine._thread.is_alive()


PARENT = """
import sys, time
from kvasir_rt.socket_directory import PREFIX, SocketDirectory
from tests.rt.rings import Clients, engine_of, plan_of
engine = engine_of(plan_of(3), hold_s=0.002)
engine.start()
clients = Clients(engine)
clients.submit_many(4, 400)
print(*[stage.pid for stage in engine.snapshot().stages], flush=True)
sys.stdin.read()
"""


def test_no_stage_outlives_a_killed_parent() -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(PARENT)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert all(map(is_alive, pids))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        parent.stdin.close()
    until(lambda: not any(map(is_alive, pids)), "all stages are gone", 5.0)


def test_close_leaves_no_process_and_no_file() -> None:
    engine = engine_of(plan_of(2), hold_s=0.01)
    with running(engine):
        clients = Clients(engine)
        clients.submit_many(3, 400)
        clients.wait(lambda: clients.total > 3, "progress")
        pids = [pid_of(engine, stage) for stage in range(2)]
        directory = engine._lines._directory.path
        assert directory.stat().st_mode & 0o077 == 0
    assert not any(map(is_alive, pids))
    assert not directory.exists()
    clients.wait_all(1.0)
    assert {end.reason for end in clients.ends.values()} == {FinishReason.CANCELLED}


def test_a_killed_bridges_directory_is_removed_by_the_next_and_a_live_ones_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    live = SocketDirectory()
    old, young = tmp_path / f"{PREFIX}old", tmp_path / f"{PREFIX}young"
    for path in (old, young):
        path.mkdir()
    for path in (old, live.path):
        os.utime(path, (0, 0))
    SocketDirectory().close()
    assert not old.exists()
    assert young.exists()
    assert live.path.exists()
    live.close()
    assert not live.path.exists()
