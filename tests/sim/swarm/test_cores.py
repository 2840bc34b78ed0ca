"""Cores that stages and workers share: fair, never idle while there is work, and no more of them."""

from fractions import Fraction
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_scenario.swarm_report import BoundPart
from kvasir_sim.pipeline import Clock, Flight
from kvasir_sim.swarm.calls import Carrier
from kvasir_sim.swarm.cores import Cores
from kvasir_sim.swarm.network import after
from kvasir_sim.swarm.overlap import OverlapPipeline
from tests.sim.swarm.swarms import LAN, Run, scenario_of
from tests.sim.swarm.test_overlap import FREE, Scripted, batch, plan_of


def ends_of(count: int, pieces: list[tuple[int, int]]) -> list[int]:
    """When each piece (begin, length) ends on so many cores."""
    env = Clock()
    cores = Cores(env, count)
    ends = [-1] * len(pieces)

    def end(place: int) -> None:
        ends[place] = env.now

    def begin(place: int) -> None:
        cores.compute(pieces[place][1], partial(end, place))

    for place, (at, _) in enumerate(pieces):
        after(env, at, partial(begin, place))
    env.run()
    return ends


def fluid_ends(count: int, pieces: list[tuple[int, int]]) -> list[Fraction]:
    """The same in exact fractions, event by event."""
    left = {place: Fraction(length) for place, (_, length) in enumerate(pieces)}
    ends = [Fraction(0)] * len(pieces)
    now = Fraction(0)
    while left:
        active = [place for place in left if pieces[place][0] <= now]
        coming = [Fraction(pieces[place][0]) for place in left if pieces[place][0] > now]
        if not active:
            now = min(coming)
            continue
        rate = min(Fraction(1), Fraction(count, len(active)))
        until = min([now + left[place] / rate for place in active] + coming)
        for place in active:
            left[place] -= (until - now) * rate
            if left[place] <= 0:
                ends[place] = until
        left = {place: rest for place, rest in left.items() if rest > 0 or pieces[place][0] > until}
        now = until
    return ends


PIECES = st.lists(st.tuples(st.integers(0, 10**6), st.integers(1, 10**6)), min_size=1, max_size=12)


@given(count=st.integers(1, 4), pieces=PIECES)
def test_pieces_end_as_fair_shares_of_the_cores_have_it(
    count: int, pieces: list[tuple[int, int]]
) -> None:
    found, exact = ends_of(count, pieces), fluid_ends(count, pieces)
    # A nanosecond may be lost at each begin and end of another.
    assert all(
        -1 <= end - true <= 4 * len(pieces) * (len(pieces) / count + 1)
        for end, true in zip(found, exact, strict=True)
    ), (found, [float(true) for true in exact])


@given(count=st.integers(1, 4), pieces=PIECES)
def test_as_many_pieces_as_cores_take_as_long_as_alone(
    count: int, pieces: list[tuple[int, int]]
) -> None:
    few = pieces[:count]
    assert ends_of(count, few) == [at + length for at, length in few]


def throughput(cores: int | None, **other: Any) -> float:
    scenario = scenario_of(
        section={"cores": cores, "overlap": 4}, run={"horizon_s": 120, "warmup_s": 40}, window=8,
        workload={"kind": "closed", "users": 16, "prompt_tokens": 16, "output_tokens": 8,
                  "duration_s": 120},
        **other,
    )  # fmt: skip
    rate = Run(scenario).report.throughput.output_tokens_per_s
    assert rate is not None
    return rate


def test_two_stages_on_one_core_are_half_as_fast() -> None:
    own, two, one = (throughput(cores, workers=[]) for cores in (None, 2, 1))
    assert two == own
    assert one == pytest.approx(two / 2, rel=0.05)


def test_a_core_for_everybody_is_as_no_sharing() -> None:
    workers = {"has_hub": False, "workers": [LAN | {"experts_max": 64}]}
    assert throughput(10, **workers) == pytest.approx(throughput(None, **workers), rel=0.02)


def test_workers_take_their_share_of_the_cores() -> None:
    heavy = LAN | {"experts_max": 64, "per_expert_s": 0.003}  # As long as at the stage.
    workers = {"has_hub": False, "workers": [heavy]}
    roomy, crowded = throughput(None, **workers), throughput(2, **workers)
    assert crowded < 0.8 * roomy
    # What is computed is the same wherever it is: two cores do no better than all local on two.
    assert crowded == pytest.approx(throughput(2, workers=[]), rel=0.05)


def test_the_report_says_how_busy_the_shared_cores_were() -> None:
    report = Run(scenario_of(section={"cores": 1}, workers=[])).report
    (note,) = [note for note in report.notes if "core" in note]
    assert note.startswith("stages, workers and bridge share 1 core, busy for ")
    assert 90 <= int(note.partition("%")[0].split()[-1]) <= 100


def test_a_piece_that_is_lost_takes_no_share_any_more() -> None:
    env = Clock()
    cores = Cores(env, 1)
    ends: list[int] = []
    lost = cores.compute(100, lambda: ends.append(-1))
    cores.compute(100, lambda: ends.append(env.now))
    after(env, 50, partial(cores.drop, lost))
    env.run()
    assert ends == [125]  # 25 beside the other one, 75 alone.
    cores.drop(lost)


class OneCore:
    """A ring whose second stage takes no time, and whose bridge computes on the same core."""

    def __init__(self) -> None:
        self.env = Clock()
        self.returned: list[tuple[int, int]] = []
        self.pipeline = OverlapPipeline(
            self.env, plan_of(2, None), [FREE] * 2, 5, self._back, experts=Scripted(self.env, {}),
            overlap=1, cores=Cores(self.env, 1), on_spent=lambda *_: None,
        )  # fmt: skip

    def _back(self, flight: Flight, now: int) -> None:
        self.returned.append((flight.batch.id, now))

    def give(self, number: int) -> Flight:
        flight = Flight(batch(number), 0, [10, 0])
        self.pipeline.submit(flight)
        return flight


def test_the_bridge_takes_its_turn_on_the_same_core() -> None:
    ring = OneCore()
    flights = [ring.give(0), ring.give(1)]
    ring.env.run()
    # The second is computed from 10 on, beside the first one's turn (5): both at half speed.
    assert ring.returned == [(0, 20), (1, 30)]
    assert [flight.computed for flight in flights] == [[10, 0], [15, 0]]
    assert not ring.pipeline._turning, "nothing is kept"


def test_what_the_bridge_had_in_hand_is_lost_with_the_epoch() -> None:
    ring = OneCore()
    ring.give(0)
    after(ring.env, 12, ring.pipeline.clear)
    ring.env.run()
    assert ring.returned == []


def test_what_a_stage_computed_is_lost_with_the_epoch() -> None:
    ring = OneCore()
    ring.give(0)
    after(ring.env, 4, ring.pipeline.clear)

    def again() -> None:
        ring.give(1)

    after(ring.env, 4, again)
    ring.env.run()
    assert ring.returned == [(1, 19)]


def test_shared_cores_bound_what_can_be_had() -> None:
    def terms(cores: int, workers: list[dict[str, Any]]) -> dict[str, float]:
        bound = Run(scenario_of(section={"cores": cores}, workers=workers)).part.bound
        assert bound is not None
        return bound.terms

    one, two = terms(1, []), terms(2, [])
    assert two["cores"] == pytest.approx(two["stages"])  # Two equal stages, a core for each.
    assert two["cores"] == pytest.approx(2 * one["cores"])
    assert terms(2, [LAN])["cores"] < two["cores"]


def test_what_shared_cores_bound_is_never_less_than_the_stages_alone_compute_on_them() -> None:
    """Workers that are slower than the stages are no reason to expect less than without them."""
    slow = LAN | {"per_expert_s": 1.0}

    def bound(cores: int | None) -> BoundPart:
        found = Run(scenario_of(section={"cores": cores}, workers=[slow])).part.bound
        assert found is not None
        return found

    own, one = bound(None), bound(1)
    alone = one.alone_output_tokens_per_s
    assert alone == pytest.approx(own.alone_output_tokens_per_s / 2)  # Two equal stages, one core.
    assert one.terms["cores"] == pytest.approx(alone)


def test_a_worker_that_stalls_is_waited_for_on_shared_cores_too() -> None:
    """The rest of its layers come after the stall, not before."""
    visit = SimpleNamespace(awaited=0, ready_at=0, stage=SimpleNamespace(resume=lambda _: None))
    trip: Any = SimpleNamespace(
        end_at=None, stalled_ns=40, is_awaited=False, call=SimpleNamespace(visit=visit)
    )
    Carrier.accept(trip)
    assert (visit.awaited, trip.is_awaited) == (1, True)
    carrier = Carrier.__new__(Carrier)
    carrier._env = Clock()
    carrier._computed(trip, 100)
    assert (visit.awaited, visit.ready_at) == (0, 140)
