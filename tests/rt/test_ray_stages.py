"""The watch over actors that hold stages, with a cluster that fails as it is told."""

import signal
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvasir_rt import ray_stages
from kvasir_rt.join import RESTARTS_MAX
from kvasir_rt.ray_stages import RayStages, Seat

SEAT = Seat(bridge="127.0.0.1:1", token="kvasir1-secret", model="tiny")
WAIT_S = 20.0


class RayError(Exception):
    """As Ray's own."""


class FakeRay:
    """Actors are numbers; those that `ends` names return at once, with a reason or an error."""

    exceptions = SimpleNamespace(RayError=RayError)

    def __init__(self, ends: Callable[[int], str | RayError | None]) -> None:
        self._ends = ends
        self.started: list[int] = []
        self.killed: list[int] = []

    def remote(self, **_resources: Any) -> Callable[[type], Any]:
        return lambda _kind: SimpleNamespace(remote=self._actor)

    def _actor(self) -> Any:
        number = len(self.started)
        self.started.append(number)
        return SimpleNamespace(number=number, run=SimpleNamespace(remote=lambda *_seat: number))

    def wait(self, answers: Sequence[int], timeout: float) -> tuple[list[int], list[int]]:
        assert answers, "Ray refuses to wait for nothing"
        done = [answer for answer in answers if self._ends(answer) is not None]
        return done, [answer for answer in answers if answer not in done]

    def get(self, answer: int) -> str:
        end = self._ends(answer)
        if isinstance(end, RayError):
            raise end
        return str(end)

    def kill(self, actor: Any) -> None:
        self.killed.append(actor.number)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_stages, "WATCH_S", 0.001)


def test_an_actor_that_dies_has_a_successor_and_the_others_stay() -> None:
    replaced = threading.Event()

    def ends(number: int) -> RayError | None:
        if number == 3:
            replaced.set()
        return RayError("its node is gone") if number == 1 else None

    ray = FakeRay(ends)
    stages = RayStages(ray, SEAT, 3, {"num_cpus": 1})
    assert replaced.wait(WAIT_S)
    stages.close()
    assert ray.started == [0, 1, 2, 3]
    assert sorted(ray.killed) == [0, 1, 2, 3], "nobody is left"
    assert not stages.failure


def test_actors_that_end_again_and_again_end_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    signals: list[int] = []

    def kill(_pid: int, how: int) -> None:
        signals.append(how)
        told.set()

    monkeypatch.setattr("kvasir_rt.ray_stages.os.kill", kill)
    ray = FakeRay(lambda number: "no model here" if number else None)
    stages = RayStages(ray, SEAT, 2, {"num_cpus": 1})
    assert told.wait(WAIT_S)
    stages.close()
    assert signals == [signal.SIGTERM]
    assert stages.failure.endswith("the last: no model here")
    assert len(ray.started) == 2 + RESTARTS_MAX


def test_a_seat_does_not_show_its_token() -> None:
    assert "secret" not in repr(SEAT)
