"""`kvasir-rt serve --hub URL` with real workers: the elastic loop, and what befalls it."""

import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvasir_core.swarm.words import Slice
from kvasir_rt.cli import main
from tests.e2e import serving
from tests.e2e.swarm_timeline import first, last, moments_of, replay_coordinator, replay_hub
from tests.e2e.swarm_world import Load, World, WorldOptions, until, world
from tests.rt.swarm.swarms import end_process, wait_for
from tests.rt.tiny_models import TinyModel, write_tiny_model

LAYERS = 4
MODEL = TinyModel(architecture="qwen3moe", layers=LAYERS, experts=16, experts_used=4)
PROMPTS = ("the ring has a head", "world", "hello stage boundary", "a lap")
TOKENS = 16
CLIENTS = 6
DEADLINE_S = 2.0  # Of one layer's call.
SLOW_MACHINE_S = 20.0


def test_load_comes_workers_are_recruited_serve_and_fade_out_again(tmp_path: Path) -> None:
    with world(tmp_path, WorldOptions(model=MODEL, faster=40, overlap=3)) as made:
        _story_of_the_loop(made)
    replays = [replay_hub(tmp_path / "events" / "hub.jsonl")]
    logs = sorted((tmp_path / "events").glob("coordinator-*.jsonl"))
    replays += map(replay_coordinator, logs)
    assert {log.name.split("-")[1] for log in logs} == {"0", "1"}
    ended = [each for each in replays if each.is_identical is not None]
    assert ended
    assert all(each.events > 100 and each.is_identical for each in ended)  # Parity.
    moments = moments_of(tmp_path / "events")
    order = ["hub reads high", "target rises", "assigned", "covers", "dials", "trial", "accepts"]
    found = [first(moments, kind) for kind in order]
    times = [moment.at_ns for moment in found if moment is not None]
    assert len(times) == len(order)
    assert times == sorted(times)
    falls, dispatched = first(moments, "target falls"), last(moments, "dispatch")
    assert falls is not None
    assert dispatched is not None
    assert dispatched.at_ns < falls.at_ns < moments[-1].at_ns  # Local long before they leave.


def _story_of_the_loop(made: World) -> None:
    right = {prompt: made.complete(prompt, TOKENS) for prompt in PROMPTS}
    at_rest = made.recruitment()
    assert (at_rest["effective_target"], at_rest["workers"]) == (0, 0)
    assert all(s["target"] == 0 and s["scarcity"] == 0 for s in made.segments())
    for name in ("a", "b", "c"):
        made.start_worker(name, "--max-experts", "32")
    until("three idle workers", lambda: _states(made) == ["idle"] * 3)

    with Load(made, CLIENTS, TOKENS) as load:
        until("slots saturate", lambda: made.recruitment()["saturated"])
        busy = made.recruitment()
        assert busy["busy"] <= CLIENTS  # Two stages read one bridge: it counts once.
        until("the target rises", lambda: made.recruitment()["effective_target"] == 1)
        until("somebody is wanted", lambda: any(s["target"] == 1 for s in made.segments()))
        until("all is covered", lambda: all(s["replicas"] == 1 for s in made.segments()))
        assert made.recruitment()["workers"] >= 2
        _slices_are_disjoint(made)
        until("a worker proves itself", made.has_proven_worker)
        _nobody_listens(made)
        load.wait_rounds(2 * CLIENTS)
        _coordinators_tell_of_it(made)
    assert not load.errors
    assert all(len(texts) == 1 for texts in load.texts.values())
    until("the target falls", lambda: made.recruitment()["effective_target"] == 0)
    until("they fade out", lambda: made.recruitment()["workers"] == 0)
    until("and are idle", lambda: _states(made) == ["idle"] * 3)
    assert {prompt: made.complete(prompt, TOKENS) for prompt in PROMPTS} == right
    _times_add_up(made)
    assert sum(s["blocked_by"]["experts"] for s in made.ring()["stages"]) > 0
    assert not made.ring()["swarm"]["is_engaged"]


def _coordinators_tell_of_it(made: World) -> None:
    """Counts begin anew with a stage's process, and a busy machine may cost one its life."""
    until("pairs come back", lambda: made.ring()["swarm"]["pairs"]["remote"] > 0)
    ring = made.ring()
    first, second = ring["swarm"]["coordinators"]
    assert (first["stage"], second["stage"]) == (0, 1)
    assert first["saturation"]["threshold"] == second["saturation"]["threshold"] == 2
    until("slots are read", lambda: _slots_read(made) == {ring["plan"]["running_max"]})
    until("they are known", lambda: made.ring()["swarm"]["workers_known"] >= 2)
    assert ring["swarm"]["mismatches"] == 0
    text = made.http.get(f"{made.url}/metrics").text
    assert 'kvasir_swarm_pairs_total{stage="1",where="remote"}' in text


def _slots_read(made: World) -> set[int]:
    return {each["saturation"]["slots"] for each in made.ring()["swarm"]["coordinators"]}


def _states(made: World) -> list[Any]:
    return [worker.status().get("state") for worker in made.workers.values()]


def _slices_are_disjoint(made: World) -> None:
    nodes = made.get(f"{made.hub_url}/api/swarm")["statistics"]["nodes"]
    experts = [
        (layer, expert)
        for node in nodes
        for layer, begin, end in node["segments"]
        for expert in range(*Slice(layer, begin, end)[1:])
    ]
    assert len(experts) == len(set(experts)) == LAYERS * 16


def _nobody_listens(made: World) -> None:
    """Law M9: a worker has outgoing connections only."""
    for worker in made.workers.values():
        connections = psutil.Process(worker.process.pid).net_connections()
        assert all(found.status != psutil.CONN_LISTEN for found in connections)


def _times_add_up(made: World) -> None:
    """Law R11, on a ring whose stages overlap."""
    for stage in made.ring()["stages"]:
        parts = stage["busy_s"] + stage["blocked_s"] + stage["starved_s"]
        assert abs(parts - stage["elapsed_s"]) < 1e-6


def test_tokens_are_equal_while_workers_hub_and_a_stage_come_and_go(tmp_path: Path) -> None:
    options = WorldOptions(model=MODEL, faster=20, base=1, boost=0, overlap=3)
    with world(tmp_path, options) as made:
        right = {prompt: made.complete(prompt, TOKENS) for prompt in PROMPTS}
        for name in ("a", "b", "c"):
            made.start_worker(name, "--max-experts", "32")
        with Load(made, CLIENTS, TOKENS) as load:
            until("all is covered", lambda: all(s["replicas"] >= 1 for s in made.segments()))
            until("a worker proves itself", made.has_proven_worker)
            _kill_and_restart(made, load)
            _freeze_one(made, load)
            _take_the_hub_away(made, load)
            _kill_a_stage(made, load)
            load.wait_rounds(CLIENTS)
        assert not load.errors
        assert all(len(texts) == 1 for texts in load.texts.values())
        assert {prompt: made.complete(prompt, TOKENS) for prompt in PROMPTS} == right
        _times_add_up(made)


def _kill_and_restart(made: World, load: Load) -> None:
    """At moments of chance, never in order."""
    chance = random.Random(11)
    for _ in range(2):
        name = chance.choice(["a", "b", "c"])
        time.sleep(chance.uniform(0.0, 0.3))
        end_process(made.workers[name].process)
        made.start_worker(name, "--max-experts", "32")
        load.wait_rounds(2)


def _freeze_one(made: World, load: Load) -> None:
    """It costs one deadline a call at most, and soon nothing."""
    frozen = made.workers["b"]
    frozen.signal(signal.SIGSTOP)
    load.wait_rounds(CLIENTS)
    since = len(load.seconds)
    load.wait_rounds(CLIENTS)
    assert max(load.seconds[since:]) < LAYERS * DEADLINE_S + SLOW_MACHINE_S
    frozen.signal(signal.SIGCONT)


def _take_the_hub_away(made: World, load: Load) -> None:
    """For longer than a map is valid (6 s here): running requests do not notice."""
    port = int(made.hub_url.rpartition(":")[2])
    hub = made.processes[0]
    hub.kill()
    hub.wait()
    until_s = time.monotonic() + 8.0
    while time.monotonic() < until_s:
        load.wait_rounds(1)
    made.start_hub(port)
    load.wait_rounds(CLIENTS)


def _kill_a_stage(made: World, load: Load) -> None:
    """With micro-batches parked in it: replayed, and its successor's coordinator takes over."""
    before = made.ring()["stages"][1]["pid"]
    psutil.Process(before).kill()
    wait_for("it is replaced", lambda: made.ring()["stages"][1]["pid"] not in (before, None))
    load.wait_rounds(CLIENTS)


def test_what_cannot_be_shared_is_refused_and_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("a-token-of-nobody")
    dense = write_tiny_model(tmp_path / "dense.gguf", TinyModel(layers=2))
    sparse = write_tiny_model(tmp_path / "sparse.gguf", TinyModel(architecture="qwen3moe"))
    hub = ("--hub", "http://127.0.0.1:9", "--hub-token-file", str(token))
    for arguments, said in (
        ((str(dense), *hub), "the model is dense"),
        ((str(sparse), "--hub", "ftp://x", "--hub-token-file", str(token)), "must start with http"),
        ((str(sparse), "--hub", "http://127.0.0.1:9", "--hub-token-file", "/nowhere"), "/nowhere"),
        ((str(sparse), "--experts-overlap", "4"), "--experts-overlap needs --hub"),
        ((str(sparse), *hub, "--experts-policy", "speed=3"), "--experts-policy speed=3"),
        ((str(sparse), *hub, "--experts-overlap", "0"), "--experts-overlap"),
        ((str(sparse), "--hub", "http://10.9.9.9:9", *hub[2:]), "give --slots-url"),
        ((str(sparse), *hub, "--experts-events", "/nowhere"), "/nowhere is no directory"),
        ((str(sparse), *hub, "--dtype", "bfloat16", "--experts-dtype", "f32"), "as bf16"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["serve", *arguments, "--port", "0"])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err


def test_a_wrong_service_token_is_refused_and_an_absent_hub_is_waited_for(tmp_path: Path) -> None:
    made = World(tmp_path, WorldOptions(model=MODEL))
    try:
        made.start_hub()
        wrong = tmp_path / "wrong"
        wrong.touch(mode=0o600)
        wrong.write_text("not-the-token-of-this-hub")
        done = serving.run(
            "serve", str(made.model_file), "--port", "0", "--hub", made.hub_url,
            "--hub-token-file", str(wrong),
        )  # fmt: skip
        assert done.returncode == 2
        assert "refuses the service token" in done.stderr
        port = int(made.hub_url.rpartition(":")[2])
        hub = made.processes.pop()
        hub.terminate()
        hub.wait()
        made.start_server()
        text = made.complete(PROMPTS[0], TOKENS)
        assert "all experts are computed here until it does" in made.logs()
        made.start_hub(port)
        until("it registers", lambda: made.get(f"{made.hub_url}/api/swarm")["coordinators"])
        assert made.complete(PROMPTS[0], TOKENS) == text
    finally:
        made.close()
