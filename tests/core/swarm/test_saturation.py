"""Saturation: a threshold, held for a dwell time; no data is not idle."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvasir_core.swarm import SwarmPolicy
from kvasir_core.swarm.saturation import Dwell, Gauge
from kvasir_core.swarm.words import Reading
from kvasir_core.units import Nanos, nanos

POLICY = SwarmPolicy()
E1 = Dwell(
    up_readings=1, up_ns=0, down_readings=1, down_ns=nanos(30), held_ns=0,
    valid_ns=nanos(45), blind_ns=nanos(300),
)  # fmt: skip


def changes(gauge: Gauge, readings: Sequence[tuple[float, int]]) -> list[tuple[float, bool]]:
    """When the state changed, and to what."""
    seen = []
    for at_s, busy in readings:
        before = gauge.is_saturated
        gauge.read(busy, 4, nanos(at_s))
        if gauge.is_saturated != before:
            seen.append((at_s, gauge.is_saturated))
    return seen


def test_case_e1_a_load_that_toggles_raises_the_target_once_and_drops_it_once() -> None:
    toggling = [(2.0 * i, 2 - i % 2) for i in range(300)]
    idle = [(600.0 + 2 * i, 0) for i in range(60)]
    gauge = Gauge(2, E1)
    seen = changes(gauge, toggling + idle)
    assert seen[0] == (0.0, True)
    assert len(seen) == 2
    last_high = max(at for at, busy in toggling if busy >= 2)
    assert seen[1][1] is False
    assert abs(seen[1][0] - last_high - 30) <= 2
    assert gauge.changes == 2


def test_case_e1_the_naive_rule_flips_with_every_reading() -> None:
    gauge = Gauge(2, E1, "naive")
    changes(gauge, [(2.0 * i, 2 - i % 2) for i in range(300)])
    assert gauge.changes == 300


def test_case_e1_a_spike_shorter_than_the_rise_delay_causes_nothing() -> None:
    gauge = Gauge.of_hub(POLICY)
    assert changes(gauge, [(0, 0), (10, 4), (20, 4), (30, 4), (39, 0), (50, 4), (60, 0)]) == []


def test_the_coordinator_rises_after_two_high_readings_in_a_row() -> None:
    gauge = Gauge.of_coordinator(POLICY)
    assert changes(gauge, [(0, 2), (3, 1), (6, 2), (9, 2)]) == [(9, True)]


def test_the_coordinator_falls_after_ten_low_readings_and_sixty_seconds() -> None:
    gauge = Gauge.of_coordinator(POLICY)
    low = [(6.0 + 3 * i, 1) for i in range(40)]
    assert changes(gauge, [(0, 2), (3, 2), *low]) == [(3, True), (63.0, False)]
    gauge = Gauge.of_coordinator(POLICY)
    high = [(3.0 * i, 2) for i in range(41)]
    low = [(123.0 + 3 * i, 1) for i in range(20)]
    assert changes(gauge, [*high, *low]) == [(3, True), (123.0 + 27, False)]


def test_the_hub_rises_after_thirty_seconds_and_falls_three_hundred_after_the_last_high() -> None:
    gauge = Gauge.of_hub(POLICY)
    high = [(10.0 * i, 3) for i in range(10)]
    low = [(100.0 + 10 * i, 0) for i in range(60)]
    assert changes(gauge, [*high, *low]) == [(30.0, True), (390.0, False)]


def test_missing_readings_count_neither_way() -> None:
    gauge = Gauge.of_hub(POLICY)
    assert changes(gauge, [(0, 3), (40, 3)]) == [(40, True)]  # A gap of 40 s is within 45 s.
    assert changes(gauge, [(60, 0), (359, 0)]) == []  # The gap is too long: counted anew.
    assert changes(gauge, [(360 + 10.0 * i, 0) for i in range(31)]) == [(660.0, False)]
    gauge = Gauge.of_hub(POLICY)
    assert changes(gauge, [(0, 3), (46, 3), (75, 3)]) == []  # As does a gap on the way up.
    assert changes(gauge, [(76, 3)]) == [(76, True)]


def test_a_reading_is_ok_then_stale_and_blind_falls() -> None:
    gauge = Gauge.of_hub(POLICY)
    assert gauge.reading(Nanos(0)) is Reading.FAILED
    changes(gauge, [(10.0 * i, 3) for i in range(4)])
    assert gauge.reading(nanos(74.9)) is Reading.OK
    assert gauge.reading(nanos(75)) is Reading.STALE
    assert gauge.look(nanos(329.9)) is True  # Frozen.
    assert gauge.look(nanos(330)) is False
    assert gauge.changes == 2


def test_resuming_after_a_restart_holds_the_state_until_readings_say_otherwise() -> None:
    gauge = Gauge.of_hub(POLICY)
    gauge.resume(nanos(5))
    assert gauge.look(nanos(10))
    seen = changes(gauge, [(10.0 * i, 0) for i in range(1, 40)])
    assert seen == [(310.0, False)]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 4)), max_size=200),
    st.sampled_from([Gauge.of_hub, Gauge.of_coordinator]),
)
def test_law_m5_changes_are_at_least_a_dwell_apart(
    steps: list[tuple[int, int]], make: type[Gauge]
) -> None:
    gauge = make(POLICY)  # type: ignore[arg-type, call-arg]
    at = 0.0
    readings = []
    for gap, busy in steps:
        at += gap
        readings.append((at, busy))
    seen = changes(gauge, readings)
    for (before, _), (after, is_up) in pairwise(seen):
        is_hub = make == Gauge.of_hub
        assert after - before >= ((30 if is_up else 300) if is_hub else (1 if is_up else 60))


@given(st.integers(1, 29), st.integers(1, 299), st.integers(0, 9))
def test_law_m5_load_that_toggles_faster_than_the_dwell_never_oscillates(
    high_s: int, low_s: int, phase: int
) -> None:
    gauge = Gauge.of_hub(POLICY)
    readings = [
        (float(t), 4 if t % (high_s + low_s) < high_s else 0) for t in range(phase, 7200, 10)
    ]
    assert len(changes(gauge, readings)) <= 1
