"""A hub's event log replayed through a fresh core gives the identical decisions."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvasir_core.eventlog import replay
from kvasir_core.swarm import HUB_EVENTS, Hub, SwarmPolicy
from kvasir_core.swarm.decisions import Assign, HubDecision, SetTarget
from tests.rt.hub.hubs import Coordinator, RunningHub, Worker, quick, running_hub, wait_for


class RecordingHub(Hub):
    made: list["RecordingHub"] = []  # noqa: RUF012 - Cleared by the test.

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.decisions: list[list[HubDecision]] = []
        self.made.append(self)

    def handle(self, event: Any, now: Any) -> list[HubDecision]:
        decisions = super().handle(event, now)
        self.decisions.append(list(decisions))
        return decisions


def live(hub: RunningHub, coordinator: Coordinator) -> None:
    """Some of everything, refused requests included."""
    coordinator.busy = 3
    hub.register(coordinator)
    wait_for(lambda: hub.model()["recruiting"], "recruiting")
    worker, other = Worker(hub).login(), Worker(hub).login()
    offer = worker.volunteer(8)
    other.volunteer()
    slice_ = [offer.get("layer", 0), *offer.get("experts", [0, 8])]
    session = worker.cover(slice_)["relay_session"]
    worker.dial(session)
    assert worker.dial(session).status_code == 409
    bad = {"worker": worker.node, "model": "tiny", "segments": [[0, 8, 0]]}
    assert hub.post("/api/expert-coverage", worker.token, **bad).status_code == 400
    row = {"worker": worker.node, "layer": slice_[0], "experts": slice_[1:],
           "standing": "suspect", "last_serve_ms": 3, "pairs": 5}  # fmt: skip
    hub.post("/api/expert-serving", hub.token, coordinator="c", rows=[row])
    coordinator.mode = "error"
    wait_for(lambda: hub.service.control.targets, "targets")
    coordinator.mode = "good"
    coordinator.busy = 0
    wait_for(lambda: not hub.model()["recruiting"], "the end of recruiting")
    worker.cover()


@pytest.fixture(autouse=True)
def _recording(monkeypatch: pytest.MonkeyPatch) -> None:
    RecordingHub.made.clear()
    monkeypatch.setattr("kvasir_rt.hub.control.Hub", RecordingHub)


def test_replay_gives_the_identical_decisions_also_after_a_restart(tmp_path: Path) -> None:
    policy = quick()
    with Coordinator() as coordinator:
        for life in range(2):
            log = tmp_path / f"{life}.jsonl"
            with running_hub(tmp_path, policy=policy, events=log) as hub:
                live(hub, coordinator)
            recorded = RecordingHub.made[life].decisions
            core = json.loads((tmp_path / f"{life}.jsonl.core.json").read_text())
            fresh = Hub(SwarmPolicy(**core["policy"]), random.Random(core["seed"]))
            lines = log.read_text().splitlines()
            replayed = [list(d) for _, _, d in replay(fresh, lines, HUB_EVENTS)]
            assert replayed == recorded
            kinds = {type(decision) for each in recorded for decision in each}
            assert SetTarget in kinds
            assert (Assign in kinds) == (life == 0)  # Quiet after the restart.
            assert ("StateRestored" in lines[0]) == (life == 1)
