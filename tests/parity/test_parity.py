"""One log, two clocks: a real run's events, replayed through the core, give the same decisions."""

import os
import random
import signal
from pathlib import Path

import pytest

from kvasir_core import eventlog
from kvasir_core.decisions import BeginEpoch, Launch, Preempt, RingDecision
from kvasir_core.ring import Ring
from kvasir_core.units import Nanos
from kvasir_rt.engine import Engine
from tests.rt.rings import Clients, engine_of, plan_of, running, until


def remember_decisions(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[RingDecision]:
    """Note what the real ring decided, in order."""
    decided: list[RingDecision] = []
    obey = engine.driver._obey

    def note(decision: RingDecision, now: Nanos) -> None:
        decided.append(decision)
        obey(decision, now)

    monkeypatch.setattr(engine.driver, "_obey", note)
    return decided


def test_a_real_run_with_a_death_and_cancels_replays_to_identical_decisions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(3, window=1, window_max=6, window_auto=True, kv_tokens=(640,) * 3)
    log = tmp_path / "events.jsonl"
    engine = engine_of(plan, hold_s=0.002, events=log)
    decided = remember_decisions(engine, monkeypatch)
    with running(engine):
        clients = Clients(engine)
        chance = random.Random(5)
        clients.submit_many(24, 40, prompt=30)
        clients.submit(99, [1] * 600, 5)
        for victim in (3, 11):
            target = clients.total + chance.randrange(20, 60)
            clients.wait(lambda target=target: clients.total >= target, "progress")  # type: ignore[misc]
            engine.cancel(victim)
        pid = engine.snapshot().stages[1].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        clients.wait_all()
        clients.check(requests=[r for r in range(24) if r not in {3, 11}])
        until(lambda: engine.snapshot().statistics.kv_blocks_in_use == 0, "the ring is empty")
    for kind in (Launch, Preempt, BeginEpoch):
        assert any(isinstance(decision, kind) for decision in decided), kind.__name__
    with log.open() as lines:
        replayed = [
            decision
            for _, _, decisions in eventlog.replay(Ring(plan), lines)
            for decision in decisions
        ]
    assert replayed == decided
