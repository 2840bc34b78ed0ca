"""The elastic loop with three workers, each behind a router of its own: nothing ever dials them."""

import socket
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.e2e.swarm_world import Load, WorldOptions, until, world
from tests.rt.swarm import nat
from tests.rt.tiny_models import TinyModel

LAYERS = 3
OPTIONS = WorldOptions(
    model=TinyModel(architecture="qwen3moe", layers=LAYERS, experts=16, experts_used=4),
    faster=40,
    overlap=3,
)
ROUND_TRIP_MS = 20  # What stands in for netem where the kernel has none: without loss.


def test_three_workers_behind_nat_are_recruited_serve_and_leave_and_nobody_dials_them(
    tmp_path: Path,
) -> None:
    why = nat.missing()
    if why:
        pytest.skip(why)
    with ExitStack() as stack:
        homes = [stack.enter_context(nat.home(index)) for index in range(3)]
        here = homes[0].here  # Every router reaches it.
        for home in homes[1:]:
            home.reach(here)
        delay = () if homes[0].is_slowed else ("--delay-ms", str(ROUND_TRIP_MS))
        if delay:
            print("no netem in this kernel: answers wait 20 ms instead, and nothing is lost")
        made = stack.enter_context(world(tmp_path, replace(OPTIONS, host=here)))
        right = made.complete("hello", 12)
        for index, home in enumerate(homes):
            made.start_worker(f"w{index}", "--max-experts", "16", *delay, prefix=home.prefix)
        workers = list(made.workers.values())
        with Load(made, 6, 12) as load:
            until("the target rises", lambda: made.recruitment()["effective_target"] == 1)
            until("three serve", lambda: made.recruitment()["workers"] == 3)
            until("all is covered", lambda: all(s["replicas"] == 1 for s in made.segments()))
            until("a worker proves itself", made.has_proven_worker)
            load.wait_rounds(6)
            for worker in workers:
                opened = psutil.Process(worker.process.pid).net_connections()
                assert all(found.status != psutil.CONN_LISTEN for found in opened)
        assert not load.errors
        until("they fade out", lambda: made.recruitment()["workers"] == 0)
        assert made.complete("hello", 12) == right
        for home in homes:
            assert home.knocks == 0
            with pytest.raises(OSError), socket.create_connection((home.address, 9), timeout=0.3):
                pass
            assert home.knocks > 0  # The counter counts, and the door is shut.
