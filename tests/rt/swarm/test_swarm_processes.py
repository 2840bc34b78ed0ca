"""A hub and workers as processes of their own: frozen, killed, drained, started again."""

import signal
from pathlib import Path

import psutil

from kvasir_core.swarm.words import ModelName
from kvasir_rt.experts.caller import ExpertCaller
from tests.rt.swarm.swarms import (
    Swarm,
    WorkerProcess,
    end_process,
    live_swarm,
    read_status,
    run_command,
    wait_for,
)
from tests.rt.swarm.traffic import Traffic

EXACT = 1e-5
TINY_NAME = ModelName("tiny")
DEADLINE_S = 2.0
SLOW_MACHINE_S = 1.5


def test_workers_freeze_die_drain_and_return_and_every_result_is_right(tmp_path: Path) -> None:
    with live_swarm(tmp_path, has_processes=True) as swarm:
        caller = swarm.caller()
        caller.start()
        try:
            _story(swarm, caller)
        finally:
            caller.close()


def _story(swarm: Swarm, caller: ExpertCaller) -> None:
    traffic = Traffic(caller)
    first = swarm.start_worker("first", "--max-experts", "16")
    second = swarm.start_worker("second", "--max-experts", "16")
    wait_for("both serve", lambda: first.is_serving and second.is_serving)
    traffic.run_until_accepted(300)
    _nobody_listens(first, second)

    # Frozen: the layer of the other one goes on as before, and nothing waits beyond the deadline.
    frozen, other = first.status()["segments"][0][0], second.status()["segments"][0][0]
    first.signal(signal.SIGSTOP)
    traffic.run_until("its silence is noticed", lambda: caller.statistics().calls.pairs_fallback)
    traffic.run(30)
    layers = {row.layer: row for row in caller.statistics().slices}
    assert layers[other].standing == "proven"
    assert max(traffic.seconds) < DEADLINE_S + SLOW_MACHINE_S
    assert sum(seconds > 0.5 for seconds in traffic.seconds) < 10
    assert traffic.worst <= EXACT
    first.signal(signal.SIGCONT)
    traffic.run_until("it serves again", lambda: _standing(caller, frozen) == "proven")

    # Killed in the middle of calls.
    traffic.run(3)
    second.signal(signal.SIGKILL)
    second.process.wait()
    traffic.run_until("it is missed", lambda: _standing(caller, other) in ("gone", "suspect", ""))
    traffic.run(20)
    assert traffic.worst <= EXACT

    # Started again: its slice is on disk, offered, and not downloaded twice.
    downloads = _slice_files(swarm)
    log_size = second.log.stat().st_size
    again = swarm.start_worker("second", "--max-experts", "16")
    wait_for("it serves again", lambda: again.is_serving)
    assert again.status()["segments"][0][0] == other
    traffic.run_until("it is proven again", lambda: _standing(caller, other) == "proven")
    assert _slice_files(swarm) == downloads
    assert log_size < second.log.stat().st_size

    # Drained: it leaves the offer first, and with status 0.
    again.signal(signal.SIGTERM)
    traffic.run_until("it has left", lambda: again.process.poll() is not None)
    assert again.process.returncode == 0
    assert read_status(again.status_path)["state"] == "stopped"
    traffic.run(20)
    assert traffic.worst <= EXACT
    assert caller.statistics().calls.mismatches == 0


def _standing(caller: ExpertCaller, layer: int) -> str:
    for row in caller.statistics().slices:
        if row.layer == layer:
            return str(row.standing)
    return ""


def _slice_files(swarm: Swarm) -> dict[str, int]:
    """Slices on the workers' disks, by when each was written."""
    found = swarm.root.glob("*/store/slices/*.gguf")
    return {path.name: path.stat().st_ino for path in found}


def _nobody_listens(*workers: WorkerProcess) -> None:
    """Law M9: a worker has outgoing connections only."""
    for worker in workers:
        connections = psutil.Process(worker.process.pid).net_connections()
        assert connections
        assert all(found.status != psutil.CONN_LISTEN for found in connections)


def test_a_relay_that_runs_alone_carries_the_calls(tmp_path: Path) -> None:
    log = tmp_path / "relay.txt"
    with live_swarm(tmp_path) as swarm:
        process = run_command("relay", "--hub", swarm.hub_url, "--port", "0", log=log)
        try:
            url = wait_for("the relay is ready", lambda: _address_in(log))
            assert swarm.hub is not None
            hub = swarm.hub.service.control.hub
            caller = swarm.caller(relay=url)
            caller.start()
            try:
                worker = swarm.thread_worker("a", relay=url)
                traffic = Traffic(caller)
                traffic.run_until_accepted()
                worker.stop()
                swarm.threads.clear()
                traffic.run_until("the hub knows", lambda: not hub.dispatch_map(TINY_NAME))
                assert traffic.worst <= EXACT
            finally:
                caller.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            end_process(process)


def _address_in(log: Path) -> str | None:
    text = log.read_text() if log.exists() else ""
    return text.split()[0] if text.startswith("ws://") and text.endswith("\n") else None
