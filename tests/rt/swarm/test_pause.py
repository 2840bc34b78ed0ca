"""How long a worker waits: what a hub asks for is heeded within bounds."""

import asyncio

import pytest

from kvasir_rt.worker.pause import Pause, heeded


@pytest.mark.parametrize(
    ("asked_s", "wait_s"),
    [(0.0, 0.05), (-5.0, 0.05), (45.0, 45.0), (1e300, 3600.0), (float("inf"), 3600.0)],
)
def test_no_hub_can_put_a_worker_to_sleep_for_ever(asked_s: float, wait_s: float) -> None:
    assert heeded(asked_s) == wait_s


def test_a_pause_heeds_no_more_either(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    asyncio.run(Pause().wait(float("inf")))
    assert 0.75 * 3600 <= slept[0] <= 1.25 * 3600
