"""Case E5: clocks that jump and a hub that sleeps mark nobody lost; real silence does, once."""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvasir_core.events import TimePassed
from kvasir_core.swarm import SwarmPolicy
from kvasir_core.swarm.decisions import LoseWorker
from kvasir_core.swarm.events import CoverageReported, ModelRegistered
from kvasir_core.swarm.words import ModelName, Slice, WorkerId
from kvasir_core.units import NANOS_PER_SECOND, nanos
from kvasir_rt.hub.control import Control
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.record import Record
from tests.rt.hub.hubs import Worker, quick, running_hub

POLICY = replace(
    SwarmPolicy(), coverage_ttl_ns=nanos(15), heartbeat_ns=nanos(5), tick_ns=nanos(1)
)  # fmt: skip
M, W = ModelName("m"), WorkerId("w")
BEAT = CoverageReported(W, M, (Slice(0, 0, 8),))


class World:
    """A control whose clock the test turns: no timer of it ever fires by itself."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.control = Control(
            POLICY, random.Random(1), limits=HubLimits(), record=Record(100),
            clock=lambda: round(self.now_s * NANOS_PER_SECOND),
        )  # fmt: skip
        self.lost_at: list[float] = []

    async def start(self) -> None:
        await self.control.start()
        self.control.add_model(ModelRegistered(M, (0,), 8, 64))

    def pass_time(self, seconds: float, *, beats: bool) -> None:
        """Ticks every second and, if asked, a heartbeat every five."""
        for second in range(round(seconds)):
            self.now_s += 1
            decisions = self.control.tell(TimePassed())
            if beats and second % 5 == 0:
                decisions += self.control.tell(BEAT)
            self.lost_at += [self.now_s for d in decisions if isinstance(d, LoseWorker)]
            assert all(n.age_s >= 0 for n in self.control.hub.statistics().nodes)


def run(story: Callable[[World], Coroutine[Any, Any, None]]) -> World:
    world = World()

    async def main() -> None:
        await world.start()
        await story(world)
        await world.control.close()

    asyncio.run(main())
    return world


def test_steps_of_the_wall_clock_mark_nobody_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(world: World) -> None:
        wall = time.time()
        for step in (3600, -7200, 600, -600):
            monkeypatch.setattr(time, "time", lambda step=step: wall + step)
            world.pass_time(30, beats=True)
        assert world.lost_at == []

    run(story)


def test_real_silence_marks_it_lost_once_also_during_a_backward_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def story(world: World) -> None:
        world.pass_time(60, beats=True)
        silent_from = world.now_s - 4  # The last heartbeat.
        wall = time.time()
        monkeypatch.setattr(time, "time", lambda: wall - 7200)
        world.pass_time(60, beats=False)
        assert len(world.lost_at) == 1
        assert 15 < world.lost_at[0] - silent_from <= 16
        model = world.control.hub.demand(M).models[0]
        assert model.layers[0].segments[0].replicas == 0
        assert [entry.kind for entry in world.control.record.recent].count("lost") == 1

    run(story)


def test_a_hub_that_was_stopped_gives_everybody_one_full_limit(tmp_path: Path) -> None:
    async def story(world: World) -> None:
        world.pass_time(10, beats=True)
        world.now_s += 40  # SIGSTOP, SIGCONT.
        stopped_until = world.now_s
        world.pass_time(30, beats=False)
        assert len(world.lost_at) == 1
        assert world.lost_at[0] - stopped_until > 15

    run(story)


def test_the_monotonic_clock_going_back_is_survived() -> None:
    async def story(world: World) -> None:
        world.pass_time(10, beats=True)
        world.now_s -= 500
        world.pass_time(10, beats=True)
        assert world.lost_at == []

    run(story)


def test_a_heartbeat_says_nothing_of_the_workers_clock(tmp_path: Path) -> None:
    with running_hub(tmp_path, policy=quick()) as hub:
        worker = Worker(hub).login()
        worker.cover([0, 0, 8])
        for name in ("time", "at_s", "timestamp", "age_s"):
            answer = hub.post(
                "/api/expert-coverage", worker.token,
                worker=worker.node, model="tiny", segments=[[0, 0, 8]], **{name: time.time() - 600},
            )  # fmt: skip
            assert answer.status_code == 400
        assert len(hub.service.control.hub.statistics().nodes) == 1


def test_the_timer_itself_loses_a_silent_worker(tmp_path: Path) -> None:
    policy = quick(coverage_ttl_ns=nanos(0.3))
    with running_hub(tmp_path, policy=policy) as hub:
        worker = Worker(hub).login()
        started = time.monotonic()  # Before it covers: this thread may rest on the way back.
        worker.cover([0, 0, 8])
        while hub.service.control.hub.statistics().nodes:
            assert time.monotonic() - started < 10
            time.sleep(0.01)
        assert time.monotonic() - started >= 0.3
        assert hub.segments()[0]["replicas"] == 0
        assert not hub.service.control.segments
