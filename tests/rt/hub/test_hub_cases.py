"""Case E1 with a real hub: load that toggles changes the target once up, and once down."""

import json
import random
from functools import partial
from pathlib import Path

from kvasir_core.eventlog import replay
from kvasir_core.swarm import HUB_EVENTS, Hub, SwarmPolicy
from kvasir_core.swarm.decisions import SetTarget
from kvasir_core.swarm.events import SlotsPolled
from kvasir_core.units import nanos
from tests.rt.hub.hubs import Coordinator, quick, running_hub, wait_for

HOLD_S = 1.5  # The case's 30 s; its poll of 2 s is 0.1 s here.
READINGS = 60
LATE_S = 1.0  # On a machine that does much else.


def _was_polled(coordinator: Coordinator, before: int) -> bool:
    return len(coordinator.asked) > before


def test_a_load_that_toggles_changes_the_target_once_up_and_once_down(tmp_path: Path) -> None:
    policy = quick(
        poll_period_ns=nanos(0.1), hub_up_ns=nanos(1e-9), hub_down_ns=nanos(HOLD_S),
        reading_valid_ns=nanos(HOLD_S), blind_base_ns=nanos(60),
    )  # fmt: skip
    log = tmp_path / "hub.jsonl"
    with running_hub(tmp_path, policy=policy, events=log) as hub, Coordinator() as coordinator:
        coordinator.busy = 2
        hub.register(coordinator)
        wait_for(lambda: hub.model()["recruiting"], "two readings")  # A hub never rises at one.
        for _ in range(READINGS):
            polled = len(coordinator.asked)
            wait_for(partial(_was_polled, coordinator, polled), "a poll")
            coordinator.busy = 3 - coordinator.busy  # 2, 1, 2, 1 and so on.
        coordinator.busy = 0
        wait_for(lambda: not hub.model()["recruiting"], "the end of recruiting")
    core = json.loads((tmp_path / "hub.jsonl.core.json").read_text())
    fresh = Hub(SwarmPolicy(**core["policy"]), random.Random(core["seed"]))
    high_at, targets = 0, []
    for event, now, decisions in replay(fresh, log.read_text().splitlines(), HUB_EVENTS):
        if isinstance(event, SlotsPolled) and event.busy >= 2:
            high_at = now
        targets += [
            (order.target, now - high_at) for order in decisions if isinstance(order, SetTarget)
        ]
    assert [target for target, _ in targets] == [1, 0]
    fell_s = targets[1][1] / 1e9
    assert HOLD_S <= fell_s <= HOLD_S + LATE_S
