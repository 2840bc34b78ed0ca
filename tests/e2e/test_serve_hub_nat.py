"""The elastic loop with three workers, each behind a router and a poor line: nobody dials them."""

import socket
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.e2e.swarm_timeline import first, moments_of
from tests.e2e.swarm_world import Load, World, WorldOptions, until, world
from tests.rt.swarm import nat
from tests.rt.swarm.slow_link import Loss
from tests.rt.tiny_models import TinyModel

LAYERS = 3
OPTIONS = WorldOptions(
    model=TinyModel(architecture="qwen3moe", layers=LAYERS, experts=16, experts_used=4),
    faster=40,
    overlap=3,
)
CLIENTS, TOKENS = 6, 12
PROMPTS = [f"client {k}: tell me" for k in range(CLIENTS)]  # What `Load` asks.
DELAY_MS, LOSS_PERCENT = 10, 1  # Each way.


def test_three_workers_behind_nat_are_recruited_serve_and_leave_and_nobody_dials_them(
    tmp_path: Path,
) -> None:
    why = nat.missing()
    if why:
        pytest.skip(why)
    with ExitStack() as stack:
        line = [Loss(DELAY_MS, LOSS_PERCENT, seed) for seed in range(3)]
        homes = [stack.enter_context(nat.home(k, loss)) for k, loss in enumerate(line)]
        here = homes[0].here  # Every router reaches it.
        for home in homes[1:]:
            home.reach(here)
        made = stack.enter_context(world(tmp_path, replace(OPTIONS, host=here)))
        right = {prompt: made.complete(prompt, TOKENS) for prompt in PROMPTS}
        for index, home in enumerate(homes):
            made.start_worker(f"w{index}", "--max-experts", "16", prefix=home.prefix)
        workers = list(made.workers.values())
        until("idle workers ask", lambda: {w.status().get("state") for w in workers} == {"idle"})
        with Load(made, CLIENTS, TOKENS) as load:
            until("the target rises", lambda: made.recruitment()["effective_target"] == 1)
            until("three serve", lambda: made.recruitment()["workers"] == 3)
            until("all is covered", lambda: all(s["replicas"] == 1 for s in made.segments()))
            until("a worker proves itself", made.has_proven_worker)
            load.wait_rounds(CLIENTS)
            for worker in workers:
                opened = psutil.Process(worker.process.pid).net_connections()
                assert all(found.status != psutil.CONN_LISTEN for found in opened)
        gone_ns = time.monotonic_ns()
        assert not load.errors
        assert load.texts == {prompt: {text} for prompt, text in right.items()}
        until("they fade out", lambda: made.recruitment()["workers"] == 0)
        assert all(made.complete(prompt, TOKENS) == text for prompt, text in right.items())
        _tell(made, gone_ns)
        for home in homes:
            assert home.line is not None
            carried = home.line.carried()
            print(f"line: {carried.sent} packets, {carried.lost} lost")
            assert 0.002 < carried.lost / (carried.sent + carried.lost) < 0.05
            assert home.knocks == 0
            with pytest.raises(OSError), socket.create_connection((home.address, 9), timeout=0.3):
                pass
            assert home.knocks > 0  # The counter counts, and the door is shut.


def _tell(made: World, gone_ns: int) -> None:
    """The loop's moments, from the first high reading, and from the load's end."""
    moments = moments_of(made.events)
    high = first(moments, "hub reads high")
    assert high is not None
    accepted = [m for m in moments if m.kind == "accepts"]
    assert accepted
    assert all(m.at_ns >= high.at_ns for m in accepted)
    for kind in ("target rises", "assigned", "covers", "dials", "accepts"):
        found = first(moments, kind)
        assert found is not None, kind
        print(f"{kind}: {(found.at_ns - high.at_ns) / 1e9:.2f} s after saturation")
    for kind in ("disengages", "target falls", "leaves"):
        last_ns = max((m.at_ns for m in moments if m.kind == kind), default=None)
        assert last_ns is not None, kind  # Clients end one by one: it may be a moment before.
        print(f"last {kind}: {(last_ns - gone_ns) / 1e9:.2f} s after the load")
    print(f"{len(accepted)} answers entered sums")
