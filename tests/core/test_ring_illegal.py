"""Law R9: an illegal event raises and changes nothing, whichever kind, in whichever state."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import IllegalEvent, Nanos, StageLost
from kvasir_core.packers import PACKERS
from tests.core.honest_shell import HonestShell, random_move, random_plan
from tests.core.illegal import illegal_events, state_of

KINDS = {
    "time goes back", "no such stage", "not lost", "another ring's", "no return link",
    "negative time", "empty prompt", "no output", "a prompt of less than nothing",
    "nothing left to compute", "cached less than nothing", "cancel of a stranger", "arrives twice",
    "not the shell's to say", "its number is still in the stages", "cancel of one that ended",
    "not launched", "an epoch to come", "its lap has ended", "a stranger stops", "no output row",
    "overtakes its earlier rows", "release of a stranger", "release of one that runs",
    "freed twice", "one of them is a stranger", "its rows are in flight",
}  # fmt: skip


def shell_after(seed: int, events: int) -> HonestShell:
    chance = random.Random(seed)
    plan = random_plan(chance, sorted(PACKERS)[seed % len(PACKERS)])
    shell = HonestShell(plan, overlaps=chance.random() < 0.3)
    for _ in range(events):
        random_move(shell, chance)()
    return shell


def report_all(shell: HonestShell) -> set[str]:
    """Every illegal event that the state allows is refused; the kinds that there were."""
    ring = shell.ring
    before = state_of(ring)
    kinds = set()
    for why, event, after_ns in illegal_events(shell):
        with pytest.raises(IllegalEvent):
            ring.handle(event, Nanos(ring.now + after_ns))
        kinds.add(why)
    assert state_of(ring) == before, f"one of {kinds} changed the ring"
    return kinds


@given(st.integers(0, 10**6), st.integers(0, 40))
def test_whatever_cannot_happen_raises_and_changes_nothing(seed: int, events: int) -> None:
    shell = shell_after(seed, events)
    report_all(shell)
    shell.drain()  # And the ring goes on as if nothing had been said.


def test_every_kind_of_illegal_event_is_tried() -> None:
    tried = set()
    for seed in range(60):
        tried |= report_all(shell_after(seed, 25))
    assert tried == KINDS


def test_the_message_names_the_event_and_the_time() -> None:
    shell = shell_after(3, 20)
    with pytest.raises(IllegalEvent, match=rf"StageLost\(stage=-1\).* {shell.ring.now} ns"):
        shell.ring.handle(StageLost(-1), shell.ring.now)


def test_the_state_that_is_compared_is_the_whole_state() -> None:
    """Or nothing would ever seem to change: a legal event changes it, and a copy is equal."""
    one, two = shell_after(5, 30), shell_after(5, 30)
    assert state_of(one.ring) == state_of(two.ring)
    for path in (("_tally", "offered"), ("_queues", "passed_over"), ("causes", "times")):
        before = state_of(one.ring)
        holder = getattr(one.ring, path[0])
        value = getattr(holder, path[1])
        setattr(holder, path[1], [*value, 9] if isinstance(value, list) else not value)
        assert state_of(one.ring) != before, path
