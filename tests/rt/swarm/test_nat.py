"""A worker behind NAT: the same loop, and nothing ever dials it (law M9)."""

import socket
from pathlib import Path

import psutil
import pytest

from tests.rt.swarm import nat
from tests.rt.swarm.swarms import live_swarm, wait_for
from tests.rt.swarm.traffic import Traffic


def test_a_worker_behind_nat_serves_and_is_never_dialled(tmp_path: Path) -> None:
    why = nat.missing()
    if why:
        pytest.skip(why)
    with nat.home() as home, live_swarm(tmp_path, host=home.here, has_processes=True) as swarm:
        caller = swarm.caller()
        caller.start()
        try:
            worker = swarm.start_worker("far", "--max-experts", "32", prefix=home.prefix)
            wait_for("it serves", lambda: worker.is_serving)
            traffic = Traffic(caller)
            traffic.run_until_accepted()
            assert traffic.worst <= 1e-5
        finally:
            caller.close()
        opened = psutil.Process(worker.process.pid).net_connections()
        assert all(found.status != psutil.CONN_LISTEN for found in opened)
        assert home.knocks == 0
        for address in (home.router, home.address):  # The counter counts, and the door is shut.
            with pytest.raises(OSError), socket.create_connection((address, 9), timeout=0.5):
                pass
        assert home.knocks > 0
