"""The hub as its clients see it: the elastic loop over real HTTP."""

import sys
import threading
from functools import partial
from pathlib import Path

import pytest

from kvasir_core.swarm.events import StateRestored
from kvasir_rt.hub.command import EXIT_BROKEN, keep_known
from tests.rt.hub.hubs import (
    BAD_SLOTS,
    EXPERTS,
    LAYERS,
    MODEL,
    Coordinator,
    RunningHub,
    Worker,
    bearer,
    quick,
    running_hub,
    wait_for,
)


def saturated(hub: RunningHub, coordinator: Coordinator) -> None:
    coordinator.busy = 3
    assert hub.register(coordinator).status_code == 200
    wait_for(lambda: hub.model()["recruiting"], "recruiting")


def test_load_raises_the_target_and_idle_nodes_get_disjoint_slices(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub, Coordinator() as coordinator:
        workers = [Worker(hub).login() for _ in range(LAYERS)]
        assert hub.register(coordinator).json() == {"ok": True, "lease_s": 600.0, "poll_s": 0.05}
        wait_for(lambda: hub.model()["reason"] == "not saturated", "a reading")
        assert workers[0].volunteer()["assigned"] is False
        coordinator.busy = 3
        wait_for(lambda: hub.model()["recruiting"], "recruiting")
        shown = hub.model()
        assert (shown["busy"], shown["slots"], shown["effective_target"]) == (3, 4, 1)
        assert shown["saturated"]
        assert 0 <= shown["age_s"] < 5
        given = [worker.volunteer() for worker in workers]
        assert {each["layer"] for each in given} == set(range(LAYERS))
        assert all(each["experts"] == [0, EXPERTS] for each in given)
        assert all(each["scarcity"] == 1.0 and each["target"] == 1 for each in given)
        assert {each["hidden_size"] for each in given} == {64}
        assert Worker(hub).login().volunteer()["reason"] == "no demand"
        coordinator.busy = 0
        wait_for(lambda: not hub.model()["recruiting"], "the end of recruiting")
        assert hub.segments()[0]["target"] == 0


def test_a_worker_goes_from_claim_to_map_to_release(tmp_path: Path) -> None:
    policy = quick(idle_exit_ns=300_000_000)
    with running_hub(tmp_path, policy=policy) as hub, Coordinator() as coordinator:
        saturated(hub, coordinator)
        worker = Worker(hub).login()
        offer = worker.volunteer()
        slice_ = [offer["layer"], *offer["experts"]]
        assert worker.volunteer()["claim"] == offer["claim"]  # A lost answer costs nothing.
        assert hub.segments(offer["layer"])[0]["claimed"] == 1
        answer = worker.cover(slice_, claim=offer["claim"])
        assert answer["heartbeat_s"] == 15.0
        found = hub.segments(offer["layer"])[0]
        assert (found["claimed"], found["replicas"], found["scarcity"]) == (0, 1, 0.0)
        rows = hub.get("/api/expert-dispatch-map", hub.token, model=MODEL).json()["rows"]
        assert rows == []  # Not connected yet.
        assert worker.dial(answer["relay_session"]).json()["worker"] == worker.node
        assert worker.dial(answer["relay_session"]).status_code == 409  # One per generation.
        (row,) = hub.get("/api/expert-dispatch-map", hub.token, model=MODEL).json()["rows"]
        assert row == {
            "worker": worker.node, "session": answer["relay_session"], "layer": slice_[0],
            "experts": slice_[1:],
        }  # fmt: skip
        served = {"worker": worker.node, "layer": slice_[0], "experts": slice_[1:],
                  "standing": "proven", "last_serve_ms": 7, "pairs": 12}  # fmt: skip
        report = hub.post("/api/expert-serving", hub.token, coordinator="c", rows=[served])
        assert report.status_code == 200
        (node,) = hub.service.control.hub.statistics().nodes
        assert node.last_serve_ms == 7
        coordinator.busy = 0
        release = wait_for(lambda: worker.cover(slice_)["release"], "the release")
        assert release == [slice_]
        assert hub.get("/api/expert-dispatch-map", hub.token, model=MODEL).json()["rows"] == []
        assert worker.cover()["relay_session"] == 0
        assert hub.model()["workers"] == 0
        story = [entry.kind for entry in hub.service.control.record.recent if entry.node]
        assert story == ["assigned", "covers", "connected", "relay_refused", "left"]


def test_a_closed_relay_session_needs_a_new_generation(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub, Coordinator() as coordinator:
        saturated(hub, coordinator)
        worker = Worker(hub).login()
        first = worker.cover([0, 0, 8])["relay_session"]
        assert worker.dial(first).status_code == 200
        closed = hub.post(
            "/api/relay-sessions/closed", hub.token, worker=worker.node, session=first
        )
        assert closed.status_code == 200
        assert worker.dial(first).status_code == 409
        second = worker.cover([0, 0, 8])["relay_session"]
        assert second > first
        assert worker.dial(second).status_code == 200


def test_a_quarantined_worker_is_offered_nothing(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub, Coordinator() as coordinator:
        saturated(hub, coordinator)
        worker = Worker(hub).login()
        worker.cover([0, 0, 8])
        row = {"worker": worker.node, "layer": 0, "experts": [0, 8], "standing": "quarantined",
               "last_serve_ms": 0, "pairs": 1}  # fmt: skip
        hub.post("/api/expert-serving", hub.token, coordinator="c", rows=[row])
        assert worker.volunteer()["reason"] == "quarantined"
        assert hub.segments()[0]["replicas"] == 0
        assert Worker(hub).login().volunteer()["assigned"]


def test_a_hung_coordinator_delays_no_other(tmp_path: Path) -> None:
    with (
        running_hub(tmp_path, policy=quick(poll_max_ns=4_000_000_000)) as hub,
        Coordinator(busy=3) as good,
        Coordinator() as hung,
    ):
        hung.mode = "hang"
        hub.register(hung, coordinator="hung")
        wait_for(lambda: hung.asked, "the hung poll")
        hub.register(good, coordinator="good")
        wait_for(lambda: hub.model()["recruiting"], "recruiting", seconds=3.0)
        assert hub.model()["busy"] == 3  # Of the one with a valid reading.


def test_a_broken_coordinator_is_a_failed_reading(tmp_path: Path) -> None:
    found = {
        "drip": "no answer within 1 s",
        "flood": "more than 1048576 bytes",
        "redirect": "answered 302",
        "error": "answered 500",
        **dict.fromkeys(BAD_SLOTS, "no list of slots"),
    }
    policy = quick(poll_max_ns=1_000_000_000)
    with running_hub(tmp_path, policy=policy) as hub, Coordinator(busy=4) as coordinator:
        hub.register(coordinator)
        for mode, words in found.items():
            coordinator.mode = "good"
            wait_for(lambda: not problem(hub), "a good reading")
            coordinator.mode = mode
            wait_for(partial(has_problem, hub, words), f"the problem with {mode}")
        assert {path for path, _ in coordinator.asked} == {"/slots"}
        assert hub.model()["busy"] == 4  # Of the last good one.


def has_problem(hub: RunningHub, words: str) -> bool:
    return words in problem(hub)


def problem(hub: RunningHub) -> str:
    return next(iter(hub.service.control.targets.values())).problem


def test_a_coordinators_key_goes_to_that_coordinator(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub, Coordinator() as coordinator:
        hub.register(coordinator, slots_key="bridge-key")
        wait_for(lambda: coordinator.asked, "a poll")
        assert coordinator.asked[0][1]["Authorization"] == "Bearer bridge-key"
        assert "bridge-key" not in hub.get("/api/swarm").text


def test_a_coordinator_leaves_and_its_model_wants_nothing(tmp_path: Path) -> None:
    with running_hub(tmp_path) as hub, Coordinator() as coordinator:
        saturated(hub, coordinator)
        assert hub.client.delete(
            "/api/coordinators/c", headers={"Authorization": f"Bearer {hub.token}"}
        ).json() == {"ok": True}
        assert hub.model()["effective_target"] == 0
        assert hub.model()["reason"] == "no coordinator"


def test_a_coordinator_on_this_machine_brings_its_model(tmp_path: Path) -> None:
    with running_hub(tmp_path, has_model=False) as hub, Coordinator(busy=3) as coordinator:
        assert hub.register(coordinator).status_code == 404
        assert hub.register(coordinator, model_file=str(hub.model_path)).status_code == 200
        assert hub.register(coordinator, model_file=str(hub.model_path)).status_code == 200
        wait_for(lambda: hub.model()["recruiting"], "recruiting")
        again = hub.register(coordinator, experts=8, model_file=str(hub.model_path))
        assert (again.status_code, again.json()["error"]["code"]) == (409, "other_model")
        copy = tmp_path / "copy.gguf"
        copy.write_bytes(hub.model_path.read_bytes())
        other = hub.register(coordinator, model_file=str(copy))
        assert (other.status_code, other.json()["error"]["code"]) == (409, "other_model_file")


def test_a_model_whose_file_changed_keeps_nothing_of_the_old_one() -> None:
    from kvasir_core.swarm.events import ModelRegistered, ProvenRow
    from kvasir_core.swarm.words import ClaimId, ModelName, Session, WorkerId

    old = ModelRegistered(ModelName("m"), (0,), 8, 64)
    idle = ModelRegistered(ModelName("idle"), (0,), 8, 64)
    restored = StateRestored(
        (old, idle), (old.model,), (), (),
        (ProvenRow(WorkerId("w"), old.model, 0, 0, 8, 5),), ClaimId(1), Session(1),
    )  # fmt: skip
    assert keep_known(restored, {}) == restored._replace(models=(old,))

    class Changed:
        facts = old._replace(experts=16)

    kept = keep_known(restored, {old.model: Changed()})  # type: ignore[dict-item]
    assert kept == restored._replace(models=(), recruiting=(), proven=())


def test_the_hub_dials_coordinators_and_nobody_else(tmp_path: Path) -> None:
    """Law M9, watched at the socket."""
    dialled: set[tuple[str, int]] = set()
    is_on = True

    def watch(event: str, args: tuple[object, ...]) -> None:
        if is_on and event == "socket.connect" and threading.current_thread().name == "hub":
            address = args[1]
            assert isinstance(address, tuple)
            dialled.add(address[:2])

    sys.addaudithook(watch)
    with running_hub(tmp_path) as hub, Coordinator() as coordinator:
        saturated(hub, coordinator)
        worker = Worker(hub).login()
        offer = worker.volunteer()
        session = worker.cover([offer["layer"], *offer["experts"]])["relay_session"]
        worker.dial(session)
        query = f"layer={offer['layer']}&begin=0&end=4"
        url = f"/api/models/{MODEL}/expert-shard?{query}"
        assert hub.client.get(url, headers=bearer(worker.token)).status_code == 200
        worker.cover()
        port = coordinator.server.server_address[1]
    is_on = False
    assert dialled == {("127.0.0.1", port)}


def test_a_core_that_contradicts_itself_ends_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = tmp_path / "events.jsonl"
    with running_hub(tmp_path, events=events) as hub:
        worker = Worker(hub).login()

        def broken(*_: object) -> None:
            raise AssertionError("counts differ")

        monkeypatch.setattr(hub.service.control.hub, "_cover", broken)
        answer = hub.post(
            "/api/expert-coverage", worker.token,
            worker=worker.node, model=MODEL, segments=[[0, 0, 8]],
        )  # fmt: skip
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal"
        wait_for(lambda: hub.run.status == EXIT_BROKEN, "the end")
    assert "CoverageReported" in events.read_text().splitlines()[-1]
