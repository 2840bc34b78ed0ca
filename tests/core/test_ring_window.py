"""How many micro-batches may be open: the law, its rounding, and what the ring does with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import IllegalEvent, Nanos, Ring, StageTimesMeasured
from kvasir_core.window import overlapped, window_for
from tests.core.stories import arrivals, lap, launches, measured, plan_of, ring_of, tell

MS = 1_000_000
PLENTY = 1 << 62  # Requests for any number of micro-batches.


@pytest.mark.parametrize(
    ("holds", "links", "turnaround", "jitter", "window"),
    [
        ([5, 5, 5, 5], [0, 0, 0, 0], 0, 0, 4),
        ([5, 5, 5, 5], [5, 5, 5, 5], 0, 0, 8),  # As much on the way as on the stages.
        ([5, 5, 5, 5], [0, 0, 0, 40], 0, 0, 12),  # A slow return.
        ([10, 2, 2, 2], [0, 0, 0, 0], 0, 0, 2),  # Not the number of stages.
        ([5, 5], [0, 0], 1, 0, 3),  # The head's turnaround counts,
        ([5, 5], [0, 0], 0, 6, 4),  # and the jitter of a lap.
        ([0, 0, 0], [0, 0, 0], 0, 0, 3),  # Nothing measured yet: one each.
        ([7, 0], [0, 0], 0, 0, 1),
    ],
)
def test_the_window_is_the_lap_over_the_longest_hold(
    holds: list[int], links: list[int], turnaround: int, jitter: int, window: int
) -> None:
    times = measured([h * MS for h in holds], [k * MS for k in links], turnaround * MS, jitter * MS)
    assert isinstance(times, StageTimesMeasured)
    assert window_for(times, PLENTY) == window


def test_rounding_of_equal_times_costs_no_window_place() -> None:
    times = measured([5 * MS, 5 * MS + 1, 5 * MS - 1, 5 * MS], [3, 2, 1, 0])
    assert isinstance(times, StageTimesMeasured)
    assert window_for(times, PLENTY) == 4


@given(
    st.lists(st.integers(0, 10**10), min_size=2, max_size=8),
    st.integers(0, 10**10),
    st.integers(0, 10**10),
)
def test_the_law_within_its_tolerance(holds: list[int], link: int, jitter: int) -> None:
    """Never less than what keeps the slowest stage busy, never a whole place more."""
    times = measured(holds, [link] * len(holds), 0, jitter)
    assert isinstance(times, StageTimesMeasured)
    longest = max(holds)
    if longest:
        lap_ns = sum(holds) + link * len(holds) + jitter
        places = window_for(times, PLENTY)
        assert places >= 1
        assert places * longest >= lap_ns - longest / 50 - 1
        assert places == 1 or (places - 1) * longest < lap_ns


@pytest.mark.parametrize(
    ("holds", "links", "jitter", "fillable", "window"),
    [
        ([50, 47], [1, 1], 30, 2, 2),  # Two full micro-batches, or three narrower ones: two.
        ([50, 47], [1, 1], 30, 3, 3),  # With requests for three, jitter has its place,
        ([50, 47], [1, 1], 30, 9, 3),  # and no more.
        ([50, 50], [1, 2], 0, 2, 2),  # A gap of 3 of 50 ms on the links,
        ([50, 50], [1, 2], 0, 3, 3),
        ([50, 50], [5, 5], 0, 1, 3),  # A large one is always covered,
        ([50, 47], [100, 100], 30, 1, 6),  # however few requests there are.
        ([50, 47], [1, 1], 500, 0, 2),
    ],
)
def test_places_for_jitter_and_small_gaps_must_be_filled(
    holds: list[int], links: list[int], jitter: int, fillable: int, window: int
) -> None:
    times = measured([h * MS for h in holds], [k * MS for k in links], 0, jitter * MS)
    assert isinstance(times, StageTimesMeasured)
    assert window_for(times, fillable) == window


@pytest.mark.parametrize(
    ("requests", "window"), [(4, 2), (8, 2), (9, 3), (12, 3), (17, 4), (40, 4)]
)
def test_how_many_micro_batches_are_filled_is_asked_of_the_live_requests(
    requests: int, window: int
) -> None:
    """Micro-batches of four, holds of 50 ms, a lap's jitter of 100 ms."""
    plan = plan_of(window=4, window_max=4, window_auto=True, micro_batch_width=4, row_width=64)
    ring = ring_of(plan, *arrivals(range(requests), prompt=1, output=60))
    for micro_batch in range(20):  # By then all prompts are in.
        tell(ring, lap(micro_batch))
    tell(ring, measured([50, 50], [0, 0], 0, 100))
    assert ring.statistics().window == window


def test_auto_opens_places_up_to_the_plans_bound() -> None:
    ring = ring_of(plan_of(window=1, window_max=3, window_auto=True, micro_batch_width=1))
    for event in arrivals(range(8)):
        tell(ring, event)
    assert len(ring.open) == 1
    assert len(launches(tell(ring, measured([1, 1], [0, 0])))) == 1
    assert ring.statistics().window == 2
    assert len(launches(tell(ring, measured([1, 1], [30, 30])))) == 1
    assert ring.statistics().window == 3


def test_auto_shrinks_and_the_surplus_returns_first() -> None:
    ring = ring_of(plan_of(window=3, window_auto=True, micro_batch_width=1), *arrivals(range(8)))
    assert not tell(ring, measured([4, 0], [0, 0]))
    assert ring.statistics().window == 1
    assert len(ring.open) == 3
    assert not launches(tell(ring, lap(0)))
    assert not launches(tell(ring, lap(1)))
    assert len(launches(tell(ring, lap(2)))) == 1


@pytest.mark.parametrize("packer", ["cohort", "drained"])
def test_a_fixed_window_and_the_drained_ring_ignore_measurements(packer: str) -> None:
    ring = ring_of(plan_of(packer, window=2, window_max=9, window_auto=packer == "drained"))
    before = ring.statistics().window
    tell(ring, measured([1, 1], [30, 30]))
    assert ring.statistics().window == before == (1 if packer == "drained" else 2)


@pytest.mark.parametrize(
    "event",
    [
        measured([1, 1, 1], [0, 0]),
        measured([1, 1], [0]),
        measured([1, 1], [0, 0, 0]),
        measured([1, -1], [0, 0]),
        measured([1, 1], [-1, 0]),
        measured([1, 1], [0, 0], turnaround=-1),
        measured([1, 1], [0, 0], jitter=-1),
    ],
)
def test_measurements_of_another_ring_or_below_zero_are_illegal(event: StageTimesMeasured) -> None:
    ring = Ring(plan_of(window_auto=True, window_max=4))
    with pytest.raises(IllegalEvent):
        ring.handle(event, Nanos(1))
    assert ring.statistics().window == 1


@given(computed=st.integers(0, 10**9), parked=st.integers(0, 10**9), overlap=st.integers(1, 64))
def test_a_stage_that_holds_several_lets_one_go_as_often_as_it_can(
    computed: int, parked: int, overlap: int
) -> None:
    hold, on_the_way = overlapped(computed, parked, overlap)
    assert hold + on_the_way == computed + parked
    assert hold >= computed
    assert hold * overlap + overlap > computed + parked  # No more than `overlap` in its hands...
    assert hold == computed or hold * overlap <= computed + parked  # ...and no fewer.
