"""The same events give the same decisions: in a replay, and whatever PYTHONHASHSEED."""

import hashlib
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import Ring
from kvasir_core.eventlog import replay
from kvasir_core.packers import PACKERS
from tests.core.honest_shell import HonestShell, random_run

ROOT = Path(__file__).parents[2]
RUNS = 24  # Some of each packer; each with losses, cancels and preemptions.
EVENTS = 60


def digest_of(runs: list[HonestShell]) -> str:
    """Of plans, events and decisions, in order."""
    digest = hashlib.sha256()
    for run in runs:
        for part in (run.plan.digest, run.log, run.decisions, run.ring.statistics()):
            digest.update(repr(part).encode())
    return digest.hexdigest()


@given(st.integers(0, 10**6))
def test_a_replay_of_the_log_gives_identical_decisions(seed: int) -> None:
    run = random_run(seed, 30)
    ring = Ring(run.plan, predict=run.predict)
    replayed = [decisions for _, _, decisions in replay(ring, run.log)]
    assert replayed == run.decisions
    assert ring.statistics() == run.ring.statistics()


def test_decisions_do_not_depend_on_the_hash_seed() -> None:
    digests = []
    for seed in ("1", "31337"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.core.test_determinism"]
        digests.append(
            subprocess.run(
                command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True
            ).stdout
        )
    assert digests[0] == digests[1] == f"{digest_of(seeded_runs())}\n"


@cache
def seeded_runs() -> list[HonestShell]:
    names = sorted(PACKERS)
    return [random_run(seed, EVENTS, packer=names[seed % len(names)]) for seed in range(RUNS)]


def test_the_seeded_runs_meet_everything_that_can_happen() -> None:
    """Or the digest would say little."""
    runs = seeded_runs()
    seen = {type(order).__name__ for run in runs for orders in run.decisions for order in orders}
    assert seen == {"Launch", "Deliver", "Finish", "Refuse", "Preempt", "Release", "BeginEpoch"}
    assert any(run.ring.statistics().epoch > 0 for run in runs)
    assert all(run.ring.now > 0 for run in runs)


if __name__ == "__main__":
    sys.stdout.write(f"{digest_of(seeded_runs())}\n")
