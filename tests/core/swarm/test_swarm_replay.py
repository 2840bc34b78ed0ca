"""The same events give the same decisions: from a log, and whatever PYTHONHASHSEED is."""

import json
import os
import random
import subprocess
import sys
from math import nan

import pytest

from kvasir_core.eventlog import decode, replay
from kvasir_core.swarm import COORDINATOR_EVENTS, HUB_EVENTS, Coordinator, Hub, SwarmPolicy, encode
from kvasir_core.swarm.events import AnswerChecked, CoverageReported
from kvasir_core.swarm.words import CallId, Failure, ModelName, Session, Slice, WorkerId
from kvasir_core.units import Nanos
from tests.core.swarm.hubs import HubWorld
from tests.core.swarm.worlds import FakeWorker, World, seconds


def coordinator_story() -> World:
    world = World(seed=7, busy=4)
    for name in "PQRS":
        world.prove(name, (0, 0, 8))
    world.every(0.05, lambda: world.route([(0, 3), (2, 30), (7, 1)]), 40)
    world.after(10, lambda: world.workers.update(P=FakeWorker(latency_s=None)))
    world.after(15, lambda: world.workers.update(Q=FakeWorker(error=nan)))
    world.after(20, lambda: world.workers.update(R=FakeWorker(failure=Failure.ERROR)))
    world.after(25, lambda: world.detach("S"))
    world.run_until(seconds(45))
    world.check_sums()
    return world


def hub_story() -> HubWorld:
    world = HubWorld(SwarmPolicy(base=1), seed=7, busy=4)
    for second in range(200):
        node = f"n{second % 13}"
        world.volunteer(node, 5 + second % 9, (1, 4, 9))
        if second % 3:
            claims = [c for c in world.hub.snapshot().claims if c.node == node]
            world.cover(node, *[(c.layer, c.begin, c.end) for c in claims])
        world.run(1)
    return world


def test_a_coordinators_log_replays_to_the_identical_decisions() -> None:
    world = coordinator_story()
    lines = [encode(event, Nanos(at)) for event, at, _ in world.log]
    again = Coordinator(world.policy, random.Random(7))
    decided = [decisions for _, _, decisions in replay(again, lines, COORDINATOR_EVENTS)]
    assert decided == [decisions for _, _, decisions in world.log]
    assert again.statistics() == world.coordinator.statistics()
    calls = again.statistics().calls
    assert min(calls.hedges, calls.mismatches, calls.pairs_accepted, calls.late) > 0


def test_a_hubs_log_replays_to_the_identical_decisions() -> None:
    world = hub_story()
    lines = [encode(event, Nanos(at)) for event, at, _ in world.log]
    again = Hub(world.policy, random.Random(7))
    decided = [decisions for _, _, decisions in replay(again, lines, HUB_EVENTS)]
    assert decided == [decisions for _, _, decisions in world.log]
    assert again.snapshot() == world.hub.snapshot()
    assert again.statistics().claims_confirmed > 0


def test_a_measure_that_is_not_finite_is_logged_as_none() -> None:
    event = AnswerChecked(CallId(1), 2, WorkerId("w"), Session(3), nan)
    line = encode(event, Nanos(5))
    assert json.loads(line) == [5, "AnswerChecked", 1, 2, "w", 3, None]
    assert decode(line, COORDINATOR_EVENTS) == (event._replace(error=None), 5)


def test_nested_values_come_back_typed() -> None:
    event = CoverageReported(WorkerId("w"), ModelName("m"), (Slice(0, 1, 2),))
    back, _ = decode(encode(event, Nanos(5)), HUB_EVENTS)
    assert back == event
    assert isinstance(back.segments[0], Slice)


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_decisions_do_not_depend_on_the_hash_seed(seed: str) -> None:
    code = (
        "from tests.core.swarm.test_swarm_replay import *\n"
        "print([w.log for w in (coordinator_story(), hub_story())])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert run.stdout.strip() == str([w.log for w in (coordinator_story(), hub_story())])
