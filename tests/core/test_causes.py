"""The head's causes as a step function of time, and the ring's own history of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import Cause, CauseClock, Nanos, Ring, RingEvent
from tests.core.stories import arrived, lap, lost, plan_of, ready, tell

causes = st.sampled_from(list(Cause))
histories = st.lists(st.tuples(st.integers(0, 5), causes), max_size=12)
gap_lists = st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=8)


def play(history: list[tuple[int, Cause]]) -> tuple[CauseClock, list[Cause]]:
    """The clock, and the cause of each nanosecond."""
    clock, walk = CauseClock(), [Cause.NO_DEMAND] * 200
    now = 0
    for step, cause in history:
        now += step
        clock.switch(cause, Nanos(now))
        walk[now:] = [cause] * (len(walk) - now)
    return clock, walk


@given(histories, gap_lists, st.integers(0, 30))
def test_a_gap_is_split_by_the_causes_that_held(
    history: list[tuple[int, Cause]], steps: list[tuple[int, int]], drained: int
) -> None:
    """As a walk splits it; what is drained before the first gap is not missed."""
    clock, walk = play(history)
    clock.drain_before(Nanos(drained))
    gaps, now = [], drained
    for step, length in steps:
        gaps.append((now + step, now + step + length))
        now += step + length
    found = dict.fromkeys(Cause, 0)
    clock.split(gaps, found)
    expected = dict.fromkeys(Cause, 0)
    for start, stop in gaps:
        for time in range(start, stop):
            expected[walk[time]] += 1
    assert found == expected


@given(histories, st.integers(0, 80))
def test_draining_forgets_all_that_it_may(history: list[tuple[int, Cause]], time: int) -> None:
    clock, walk = play(history)
    clock.drain_before(Nanos(time))
    assert clock.causes[0] is walk[time]
    assert all(at > time for at in clock.times[1:])
    assert clock.cause is clock.causes[-1]


def test_a_cause_that_held_for_no_time_leaves_no_trace() -> None:
    clock = CauseClock()
    for cause in (Cause.CAPACITY, Cause.DEPENDENCY, Cause.DEPENDENCY):
        clock.switch(cause, Nanos(4))
    assert (clock.times, clock.causes) == ([0, 4], [Cause.NO_DEMAND, Cause.DEPENDENCY])


def test_a_ring_says_why_it_composes_nothing_more() -> None:
    """Nobody there; all in flight; some wait for the window; nobody again; a lost stage."""
    ring = Ring(plan_of(window=1))
    story: list[tuple[RingEvent, Cause]] = [
        (arrived(0, output=1), Cause.DEPENDENCY),
        (arrived(1, output=1), Cause.CAPACITY),
        (lap(0), Cause.DEPENDENCY),
        (lap(1), Cause.NO_DEMAND),
        (lost(0), Cause.NO_DEMAND),
        (arrived(2), Cause.CAPACITY),
        (ready(0), Cause.DEPENDENCY),
    ]
    for event, cause in story:
        tell(ring, event)
        assert ring.causes.cause is cause, event
    assert ring.causes.times == [0, 1, 2, 3, 4, 6, 7]
    assert ring.statistics().stalls == {"window": 1, "dependency": 3}


@pytest.mark.parametrize("running_max", [1, 2])
def test_the_running_cap_is_a_capacity(running_max: int) -> None:
    ring = Ring(plan_of(window=2, running_max=running_max))
    tell(ring, arrived(0))
    tell(ring, arrived(1))
    assert ring.causes.cause is (Cause.CAPACITY if running_max == 1 else Cause.DEPENDENCY)
