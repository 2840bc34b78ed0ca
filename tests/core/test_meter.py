"""Busy, blocked, starved and its causes against a reference that walks nanosecond by nanosecond."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import Cause, CauseClock, Nanos, StageMeter


@dataclass(frozen=True)
class Run:
    """One execution of a stage."""

    composed: int
    start: int
    end: int
    sent: int


@dataclass(frozen=True)
class History:
    """What happened: executions in order, and when the head's cause changed."""

    runs: Sequence[Run]
    switches: Sequence[tuple[int, Cause]]
    close: int

    def clock(self) -> CauseClock:
        clock = CauseClock()
        for time, cause in self.switches:
            clock.switch(cause, Nanos(time))
        return clock

    def cause_at(self, time: int) -> Cause:
        return [Cause.NO_DEMAND, *[cause for at, cause in self.switches if at <= time]][-1]

    def walk(self) -> dict[str, int]:
        """Each nanosecond's state, counted."""
        counts: dict[str, int] = {}
        for time in range(self.close):
            state = self._state(time)
            counts[state] = counts.get(state, 0) + 1
        return counts

    def _state(self, time: int) -> str:
        for run in self.runs:
            if run.start <= time < run.end:
                return "busy"
            if run.end <= time < run.sent:
                return "blocked"
            if time < run.start:
                return Cause.UPSTREAM if time >= run.composed else self.cause_at(time)
        return self.cause_at(time)


@st.composite
def histories(draw: st.DrawFn) -> History:
    runs, now = [], 0
    small = st.integers(0, 6)
    for _ in range(draw(st.integers(0, 8))):
        composed = max(0, now + draw(st.integers(-5, 5)))
        start = max(now, composed) + draw(small)
        end = start + draw(small)
        now = end + draw(small)
        runs.append(Run(composed, start, end, now))
    close = now + draw(small)
    times = sorted(draw(st.lists(st.integers(0, close + 3), max_size=12)))
    causes = st.sampled_from([Cause.NO_DEMAND, Cause.DEPENDENCY, Cause.CAPACITY])
    return History(runs, [(time, draw(causes)) for time in times], close)


def counted(meter: StageMeter) -> dict[str, int]:
    states = [("busy", meter.busy_ns), ("blocked", meter.blocked_ns), *meter.starved_by_ns.items()]
    return {state: ns for state, ns in states if ns}


def feed(meter: StageMeter, runs: Sequence[Run], clock: CauseClock) -> None:
    meter.add(
        [run.start for run in runs],
        [run.end for run in runs],
        [run.sent for run in runs],
        [run.composed for run in runs],
        clock,
    )


@given(histories(), st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_the_meter_counts_what_a_walk_counts_however_it_is_fed(
    history: History, sizes: list[int]
) -> None:
    """In batches of any size, the clock drained after each: every nanosecond once (R11)."""
    meter, clock = StageMeter(), history.clock()
    runs = list(history.runs)
    for size in sizes:
        feed(meter, runs[:size], clock)
        del runs[:size]
        clock.drain_before(meter.accounted_until)
    meter.close(Nanos(history.close), clock)
    assert counted(meter) == history.walk()
    assert meter.busy_ns + meter.blocked_ns + meter.starved_ns == meter.elapsed_ns == history.close


def feed_sums(meter: StageMeter, runs: Sequence[Run], clock: CauseClock) -> None:
    """What a caller does that walks its runs anyway."""
    free, upstream, waits = int(meter.accounted_until), 0, []
    for run in runs:
        known = min(max(run.composed, free), run.start)
        upstream += run.start - known
        waits.append((free, known))
        free = run.sent
    meter.add_summed(
        busy_ns=sum(run.end - run.start for run in runs),
        blocked_ns=sum(run.sent - run.end for run in runs),
        upstream_ns=upstream,
        waits=[(start, stop) for start, stop in waits if stop > start],
        until=Nanos(free),
        clock=clock,
    )


@given(histories(), st.integers(0, 8))
def test_known_sums_count_the_same(history: History, cut: int) -> None:
    meter, clock = StageMeter(), history.clock()
    for runs in (history.runs[:cut], history.runs[cut:]):
        feed_sums(meter, runs, clock)
        clock.drain_before(meter.accounted_until)
    meter.close(Nanos(history.close), clock)
    assert counted(meter) == history.walk()


def test_sums_that_leave_time_out_are_our_bug() -> None:
    meter, clock = StageMeter(), CauseClock()
    with pytest.raises(AssertionError, match="8 ns accounted of 9"):
        meter.add_summed(
            busy_ns=5, blocked_ns=1, upstream_ns=0, waits=[(0, 2)], until=Nanos(9), clock=clock
        )


@given(histories())
def test_intervals_spent_one_by_one_count_the_same(history: History) -> None:
    """`spend` is for stages that hold several micro-batches; here they hold one."""
    meter, clock = StageMeter(), history.clock()
    for index, run in enumerate(history.runs):
        composed = Nanos(run.composed)
        meter.spend("busy", Nanos(run.start), Nanos(run.end), composed, clock)
        kind = "experts" if index % 2 else "credit"
        meter.spend(kind, Nanos(run.end), Nanos(run.sent), composed, clock)
    meter.close(Nanos(history.close), clock)
    assert counted(meter) == history.walk()
    runs = history.runs
    assert meter.blocked_by_credit_ns == sum(run.sent - run.end for run in runs[::2])
    assert meter.blocked_by_experts_ns == sum(run.sent - run.end for run in runs[1::2])


@given(histories())
def test_sums_of_executions_count_the_same(history: History) -> None:
    """What a caller with the columns at hand adds up, in one piece."""
    meter, clock, runs = StageMeter(), history.clock(), history.runs
    if runs:
        free = [0, *(run.sent for run in runs[:-1])]
        known = [min(max(run.composed, at), run.start) for run, at in zip(runs, free, strict=True)]
        meter.add_summed(
            busy_ns=sum(run.end - run.start for run in runs),
            blocked_ns=sum(run.sent - run.end for run in runs),
            upstream_ns=sum(run.start - at for run, at in zip(runs, known, strict=True)),
            waits=list(zip(free, known, strict=True)),
            until=Nanos(runs[-1].sent),
            clock=clock,
        )
    meter.close(Nanos(history.close), clock)
    assert counted(meter) == history.walk()


def test_a_stage_that_joins_later_counts_from_then() -> None:
    meter, clock = StageMeter(since=Nanos(10)), CauseClock()
    feed(meter, [Run(composed=4, start=12, end=15, sent=15)], clock)
    assert counted(meter) == {"busy": 3, Cause.UPSTREAM: 2}
    assert meter.elapsed_ns == 5


def test_nothing_fed_and_closed_in_the_past_changes_nothing() -> None:
    meter, clock = StageMeter(), CauseClock()
    feed(meter, [], clock)
    assert counted(meter) == {}
    feed(meter, [Run(0, 0, 9, 9)], clock)
    meter.close(Nanos(5), clock)
    assert counted(meter) == {"busy": 9}


def test_overlapping_executions_are_our_bug() -> None:
    meter, clock = StageMeter(), CauseClock()
    with pytest.raises(AssertionError, match="12 ns accounted of 10"):
        feed(meter, [Run(0, 0, 6, 6), Run(0, 4, 10, 10)], clock)


def test_an_unknown_state_is_refused_and_nothing_is_counted() -> None:
    meter, clock = StageMeter(), CauseClock()
    with pytest.raises(ValueError, match="'idle'"):
        meter.spend("idle", Nanos(3), Nanos(5), Nanos(0), clock)
    assert counted(meter) == {}
    assert meter.accounted_until == 0
