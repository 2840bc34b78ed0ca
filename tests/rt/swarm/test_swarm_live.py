"""Hub, relay, workers and a stage's caller on real sockets: what enters the sum is always right."""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvasir_core.eventlog import replay
from kvasir_core.swarm import Coordinator
from kvasir_core.swarm.eventlog import COORDINATOR_EVENTS
from kvasir_core.units import nanos
from kvasir_rt.experts.caller import ExpertCaller
from kvasir_rt.hub import slices as hub_slices
from kvasir_rt.hub.cutting import CutSlice
from kvasir_rt.worker import pause as pauses
from kvasir_rt.worker.worker import Worker
from tests.rt.swarm.proxies import CuttingProxy
from tests.rt.swarm.swarms import POLICY, Swarm, ThreadHub, live_swarm, wait_for
from tests.rt.swarm.traffic import Traffic

EXACT = 1e-5
WIRE_TOLERANCES = {"f32": 1e-5, "f16": 5e-3, "bf16": 1e-2}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "PAUSE_S", 0.1)


@contextmanager
def calling(swarm: Swarm, **options: Any) -> Iterator[ExpertCaller]:
    caller = swarm.caller(**options)
    caller.start()
    try:
        yield caller
    finally:
        caller.close()


def test_experts_computed_by_workers_equal_those_computed_here(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    with live_swarm(tmp_path) as swarm, calling(swarm, events=events) as caller:
        traffic = Traffic(caller)
        traffic.run(5)  # Nobody is there: all local.
        assert caller.statistics().calls.calls == 0
        for name in ("a", "b"):
            swarm.thread_worker(name)
        traffic.run_until_accepted(500)
        assert traffic.worst <= EXACT
        counts = caller.statistics().calls
        assert counts.mismatches == 0
        swarm.busy[0] = 0  # Load goes: everything returns here.
        traffic.run_until("disengaged", lambda: not caller.statistics().is_engaged)
        traffic.run_until(
            "idle timeout is over",
            lambda: _dispatches_of(caller, traffic) == 0,
        )
        assert traffic.worst <= EXACT
        caller.close()
        assert _replayed(events).statistics() == caller.statistics()


def _dispatches_of(caller: ExpertCaller, traffic: Traffic) -> int:
    """How many dispatches one more round of calls makes."""
    before = caller.statistics().calls.dispatches
    traffic.run(1)
    return caller.statistics().calls.dispatches - before


def _replayed(path: Path) -> Coordinator:
    """A fresh core that was told what the caller's was told."""
    core = Coordinator(replace(POLICY, tolerance=1e-4), random.Random(1))
    told = list(replay(core, path.read_text().splitlines(), COORDINATOR_EVENTS))
    assert len(told) > 100
    return core


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_narrow_rows_stay_within_the_tolerance_of_their_format(tmp_path: Path, dtype: Any) -> None:
    with live_swarm(tmp_path) as swarm, calling(swarm, dtype=dtype) as caller:
        swarm.thread_worker("a")
        traffic = Traffic(caller)
        traffic.run_until_accepted()
        assert EXACT < traffic.worst <= WIRE_TOLERANCES[dtype]
        assert caller.statistics().calls.mismatches == 0


def _all_cut(proxies: list[CuttingProxy], before: list[int]) -> bool:
    return all(proxy.cuts > cuts for proxy, cuts in zip(proxies, before, strict=True))


def test_workers_cut_off_at_any_byte_leave_every_result_right(tmp_path: Path) -> None:
    chance = random.Random(7)
    with (
        live_swarm(tmp_path) as swarm,
        CuttingProxy(swarm.hub_url) as first,
        CuttingProxy(swarm.hub_url) as second,
        calling(swarm) as caller,
    ):
        for proxy in (first, second):
            swarm.thread_worker(f"w{proxy.port}", hub=proxy.url)
        traffic = Traffic(caller)
        traffic.run_until_accepted()
        for budget in (0, 1, 17, 300, 1500, *(chance.randrange(4000) for _ in range(5))):
            cut = [first, second] if budget % 2 else [chance.choice([first, second])]
            before = [proxy.cuts for proxy in cut]
            for proxy in cut:
                proxy.cut_after(budget)
            traffic.run_until(f"cut after {budget} bytes", partial(_all_cut, cut, before))
            traffic.run(3)
            traffic.run_until_accepted(50)  # They come back by themselves.
        assert traffic.worst <= EXACT
        assert max(traffic.seconds) < 3.0  # The deadline, and a slow machine.
        assert caller.statistics().calls.mismatches == 0


def _scale(factor: list[float]) -> Any:
    """Spoils a worker: its sums are scaled."""

    def spoil(worker: Worker) -> None:
        honest = worker.desk._sum
        worker.desk._sum = lambda *a: honest(*a) * factor[0]  # type: ignore[method-assign]

    return spoil


@pytest.mark.parametrize("factor", [1.02, float("nan"), 0.0, 1e30])
def test_a_worker_that_lies_from_the_start_never_enters_a_sum(
    tmp_path: Path, factor: float
) -> None:
    with live_swarm(tmp_path) as swarm, calling(swarm) as caller:
        liar = swarm.thread_worker("liar", spoil=_scale([factor]))
        traffic = Traffic(caller)
        traffic.run_until("it is caught", lambda: caller.statistics().calls.mismatches)
        traffic.run(20)
        assert traffic.worst <= EXACT
        assert caller.statistics().calls.pairs_accepted == 0
        assert swarm.hub is not None
        assert liar.worker is not None
        node = liar.worker.node
        hub = swarm.hub.service.control.hub
        wait_for("the hub bans it", lambda: node in {ban.node for ban in hub.snapshot().bans}, 10)


def test_a_proven_worker_that_begins_to_lie_is_caught_by_the_samples(tmp_path: Path) -> None:
    factor = [1.0]
    with live_swarm(tmp_path) as swarm, calling(swarm) as caller:
        swarm.thread_worker("sleeper", spoil=_scale(factor))
        traffic = Traffic(caller)
        traffic.run_until_accepted()
        assert traffic.worst <= EXACT
        factor[0] = 1.01
        traffic.run_until("it is caught", lambda: caller.statistics().calls.mismatches)
        accepted = caller.statistics().calls.pairs_accepted
        traffic.run(20)
        assert caller.statistics().calls.pairs_accepted == accepted


def test_a_worker_that_answers_nothing_gets_its_trials_and_no_more(tmp_path: Path) -> None:
    def spoil(worker: Worker) -> None:
        worker.desk._answer = lambda *_: None  # type: ignore[method-assign]

    with live_swarm(tmp_path) as swarm, calling(swarm) as caller:
        swarm.thread_worker("mute", spoil=spoil)
        traffic = Traffic(caller)
        traffic.run_until("a trial is over", lambda: caller.statistics().calls.late)
        traffic.run(50)
        counts = caller.statistics().calls
        assert counts.dispatches == 0
        assert counts.trials <= 3
        assert all(row.last_serve_ms == 0 for row in caller.statistics().slices)
        assert traffic.worst <= EXACT
        assert max(traffic.seconds) < 1.0  # A trial holds nobody up.


def test_when_relay_and_hub_are_gone_calls_go_on_here(tmp_path: Path) -> None:
    with (
        live_swarm(tmp_path) as swarm,
        CuttingProxy(swarm.hub_url) as proxy,
        calling(replace(swarm, hub_url=proxy.url)) as caller,
    ):
        swarm.thread_worker("a")
        traffic = Traffic(caller)
        traffic.run_until_accepted()
        proxy.refuse()
        traffic.run_until("cut", lambda: not caller.is_connected)
        started = len(traffic.seconds)
        traffic.run(50)
        assert traffic.worst <= EXACT
        assert max(traffic.seconds[started:]) < 1.0
        proxy.accept()
        traffic.run_until_accepted(50)


def test_a_hub_that_was_restarted_finds_its_workers_and_callers_again(tmp_path: Path) -> None:
    with live_swarm(tmp_path) as swarm, calling(swarm) as caller:
        worker = swarm.thread_worker("a")
        traffic = Traffic(caller)
        traffic.run_until_accepted()
        assert swarm.hub is not None
        swarm.hub.__exit__()
        traffic.run(10)
        port = int(swarm.hub_url.rpartition(":")[2])
        with ThreadHub(tmp_path, swarm.model_file, port):
            traffic.run_until_accepted()
            assert worker.worker is not None
            assert worker.worker.desk.counts.computed > 0
            assert traffic.worst <= EXACT
            worker.stop()
            swarm.threads.clear()


def test_when_the_callers_own_thread_has_ended_results_are_still_right(tmp_path: Path) -> None:
    with live_swarm(tmp_path) as swarm, calling(swarm) as caller:
        swarm.thread_worker("a")
        traffic = Traffic(caller)
        traffic.run_until_accepted()
        caller.close()
        started = time.monotonic()
        traffic.run(10)
        assert traffic.worst <= EXACT
        assert time.monotonic() - started < 5


def test_a_worker_that_fetched_a_web_page_covers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hashlib

    page = b"<!doctype html><title>Sign in to the captive portal</title>" * 10
    cuts: list[Path] = []

    def write_page(_model: Any, _cut: Any, path: Path) -> CutSlice:
        path.write_bytes(page)
        cuts.append(path)
        return CutSlice(path, len(page), hashlib.sha256(page).hexdigest())

    monkeypatch.setattr(hub_slices, "write_slice", write_page)
    with live_swarm(tmp_path) as swarm, calling(swarm):
        worker = swarm.thread_worker("a")
        assert swarm.hub is not None
        service = swarm.hub.service
        wait_for("it was fetched twice", lambda: service.slices.bytes_sent >= 2 * len(page))
        assert service.control.hub.statistics().nodes == ()
        assert not worker.is_serving
        assert worker.worker is not None
        assert list((tmp_path / "a" / "slices").glob("*.gguf")) == []


def test_a_worker_with_little_memory_asks_for_less(tmp_path: Path) -> None:
    each = 3 * 64 * 32 * 4  # Bytes of one expert.
    with live_swarm(tmp_path) as swarm, calling(swarm):
        worker = swarm.thread_worker("a", memory_bytes=each * 9)
        wait_for("it serves", lambda: worker.is_serving)
        assert worker.worker is not None
        held = worker.worker.desk.loaded
        assert 0 < sum(slice_.weight_bytes for slice_ in held) <= each * 9


def test_a_mute_worker_beside_a_proven_one_gets_its_trial_and_the_other_all_the_work(
    tmp_path: Path,
) -> None:
    """Case E3: registration is not ability; a worker that answers later becomes proven."""
    is_mute = [True]

    def spoil(worker: Worker) -> None:
        honest = worker.desk._answer
        worker.desk._answer = lambda *a: None if is_mute[0] else honest(*a)  # type: ignore[method-assign]

    policy = {"grace_ns": nanos(2.0), "trial_backoff_ns": nanos(1.0)}
    with live_swarm(tmp_path) as swarm, calling(swarm, policy=policy) as caller:
        swarm.thread_worker("able")  # One layer each: 16 experts.
        traffic = Traffic(caller)
        traffic.run_until_accepted(200)
        mute = swarm.thread_worker("mute", spoil=spoil)
        wait_for("it serves", lambda: mute.is_serving)
        assert mute.worker is not None
        node = mute.worker.node
        traffic.run_until("its trial is over", lambda: caller.statistics().calls.late)
        before = caller.statistics().calls.pairs_accepted
        traffic.run(30)
        rows = [row for row in caller.statistics().slices if row.worker == node]
        assert rows
        assert all(row.last_serve_ms == 0 and row.standing != "proven" for row in rows)
        assert caller.statistics().calls.pairs_accepted > before  # The able one goes on.
        assert max(traffic.seconds) < 1.0  # A trial holds nobody up.
        is_mute[0] = False
        traffic.run_until("it is proven", lambda: _standing_of(caller, node) == "proven")
        assert traffic.worst <= EXACT


def _standing_of(caller: ExpertCaller, node: str) -> str:
    return next((row.standing for row in caller.statistics().slices if row.worker == node), "")
