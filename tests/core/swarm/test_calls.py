"""The life of a call: hedged, accepted or local, every pair exactly once, liars found."""

import random
from itertools import count, pairwise
from math import nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core.swarm import SwarmPolicy
from kvasir_core.swarm.decisions import (
    Accept,
    ComputeLocally,
    Conclude,
    Dispatch,
    Hedge,
    Quarantine,
    Verify,
)
from kvasir_core.swarm.events import AnswerArrived, AnswerChecked
from kvasir_core.swarm.words import CallId, Failure, Session, Share, Standing, WorkerId
from kvasir_core.units import Nanos
from tests.core.swarm.test_coordinator import PAIRS, engaged_world, steady
from tests.core.swarm.worlds import SECOND, FakeWorker, World, seconds

UNCHECKED = SwarmPolicy(answers_checked_first=1, check_share=1e-12)


def two_workers(policy: SwarmPolicy | None = None, **workers: FakeWorker) -> World:
    """Engaged; P and Q are proven for layer 0, experts 0-3."""
    world = World(policy, busy=3)
    for name in ("P", "Q"):
        world.prove(name, (0, 0, 4))
    world.run_until(7 * SECOND)
    world.workers.update(workers)
    return world


def kinds(world: World) -> list[str]:
    return [type(d).__name__ for _, _, ds in world.log for d in ds]


def test_without_workers_everything_is_local_at_once() -> None:
    world = World(busy=4)
    world.run(10)
    assert world.route([(3, 2), (9, 4)]) == [
        ComputeLocally(CallId(1), 0, (Share(3, 0, 2), Share(9, 0, 4))),
        Conclude(CallId(1)),
    ]


def test_idle_equals_take_turns() -> None:
    world = two_workers()
    for _ in range(10):
        world.route([(0, 1)])
        world.run(0.1)
    orders = [o.worker for _, o in world.dispatched[-10:]]
    assert orders[0] != orders[1]
    assert orders == orders[:2] * 5


def test_under_load_pairs_go_out_and_what_nobody_holds_stays() -> None:
    world = engaged_world(P=FakeWorker())
    order, local = world.route([(0, 2), (3, 1), (9, 4)])
    assert isinstance(order, Dispatch)
    assert order.shares == (Share(0, 0, 2), Share(3, 0, 1))
    assert (order.layer, order.is_trial) == (0, False)
    assert order.deadline == world.now + world.policy.call_deadline_ns
    assert local == ComputeLocally(order.call, 0, (Share(9, 0, 4),))
    world.run(1)
    world.check_sums()


def test_an_unchecked_answer_is_accepted_and_a_checked_one_is_computed_locally() -> None:
    world = engaged_world(P=FakeWorker())
    call = world.route(PAIRS)[0].call  # type: ignore[union-attr]
    world.run(0.1)
    answer = next(ds for e, _, ds in world.log if isinstance(e, AnswerArrived) and e.call == call)
    shares = (Share(0, 0, 2), Share(1, 0, 2), Share(3, 0, 1))
    assert answer == [
        Verify(call, 1, WorkerId("P"), Session(1)), ComputeLocally(call, 1, shares), Conclude(call),
    ]  # fmt: skip
    world = engaged_world(P=FakeWorker())
    steady(world, 40, 0.1)
    world.run_until(seconds(41))
    calls = world.coordinator.statistics().calls
    assert calls.pairs_verified >= 20 * 5
    assert calls.pairs_accepted > 10 * calls.pairs_verified / 5
    assert calls.pairs_fallback == 0
    world.check_sums()


def test_an_overdue_part_is_hedged_to_another_replica_and_the_first_answer_counts() -> None:
    world = two_workers(UNCHECKED)
    steady(world, 12, 0.05)
    world.run_until(seconds(12.5))
    world.workers["P"].latency_s = world.workers["Q"].latency_s = 0.5
    (order,) = world.route([(0, 1)])
    assert isinstance(order, Dispatch)
    other = "Q" if order.worker == "P" else "P"
    world.workers[other].latency_s = 0.01
    world.run(0.3)
    hedges = [d for _, _, ds in world.log for d in ds if isinstance(d, Hedge)]
    assert [h.worker for h in hedges] == [other]
    assert hedges[0].deadline == order.deadline
    accepted = [d for _, _, ds in world.log for d in ds if isinstance(d, Accept)]
    assert accepted[-1] == Accept(order.call, order.part, WorkerId(other))
    while_overdue = world.route([(0, 1)])
    assert isinstance(while_overdue[0], Dispatch)
    assert while_overdue[0].worker == other  # Nothing more to who is overdue.
    world.run(1)
    assert world.coordinator.statistics().calls.dropped == 1  # The loser's answer.
    assert all(s.standing is Standing.PROVEN for s in world.coordinator.statistics().slices)
    world.check_sums()


def test_without_another_replica_the_hedge_is_the_local_path() -> None:
    world = engaged_world(P=FakeWorker(latency_s=None))
    opened = world.now
    world.route(PAIRS)
    world.run(5)
    calls = world.coordinator.statistics().calls
    assert (calls.hedges, calls.pairs_fallback, calls.late) == (0, 5, 1)
    entry = world.sums[world._call]
    assert entry.ended_at is not None
    assert entry.ended_at - opened < world.policy.call_deadline_ns // 2
    world.check_sums()


def test_if_both_replicas_are_silent_the_deadline_makes_it_local() -> None:
    world = two_workers(P=FakeWorker(latency_s=None), Q=FakeWorker(latency_s=None))
    opened = world.now
    world.route([(0, 1)])
    world.run(3)
    entry = world.sums[world._call]
    assert entry.ended_at == opened + world.policy.call_deadline_ns
    assert world.coordinator.statistics().calls.hedges == 1
    assert world.coordinator.statistics().calls.late == 2
    world.check_sums()


def test_a_refused_part_goes_to_the_other_replica_at_once_and_never_back() -> None:
    world = two_workers(P=FakeWorker(failure=Failure.BUSY), Q=FakeWorker(failure=Failure.BUSY))
    world.route([(0, 1)])
    world.run(0.1)
    sent = [o for _, o in world.dispatched if o.call == world._call]
    assert [type(o) for o in sent] == [Dispatch, Hedge]
    assert {o.worker for o in sent} == {"P", "Q"}
    world.check_sums()
    for _ in range(20):
        world.route([(0, 1)])
        world.run(0.1)
    assert all(s.standing is Standing.PROVEN for s in world.coordinator.statistics().slices)
    world.check_sums()


def test_an_answer_at_the_deadline_is_in_time_and_one_after_it_is_late() -> None:
    policy = SwarmPolicy()
    deadline_s = policy.call_deadline_ns / SECOND
    for latency_s, late in ((deadline_s, 0), (deadline_s + 1e-9, 1)):
        world = World(policy)
        world.workers["W"] = FakeWorker(latency_s=latency_s)
        world.attach("W", (0, 0, 4))
        world.route(PAIRS)
        world.run(3)
        assert world.coordinator.statistics().calls.late == late
        assert (world.slice_of("W").last_serve_ms > 0) == (not late)


def test_doubled_answers_count_once() -> None:
    world = engaged_world(P=FakeWorker(copies=3))
    world.route(PAIRS)
    world.run(1)
    assert world.coordinator.statistics().calls.dropped == 2
    world.check_sums()


def test_a_worker_holds_at_most_so_many_calls() -> None:
    world = engaged_world(P=FakeWorker(latency_s=1.9))
    for _ in range(40):
        world.route(PAIRS)
    assert world.slice_of("P").in_flight == world.policy.in_flight_max
    world.run(5)
    world.check_sums()


def test_a_slow_worker_gets_no_more_than_it_computes_in_a_quarter_of_the_deadline() -> None:
    world = engaged_world(P=FakeWorker(latency_s=0.0, per_pair_s=0.01))
    world.every(0.5, lambda: world.route([(0, 400)]), 60)
    world.run_until(seconds(61))
    sizes = [sum(s.pairs for s in o.shares) for _, o in world.dispatches_to("P", since=30 * SECOND)]
    assert 40 <= max(sizes) <= 55  # 100 pairs a second for half a second.
    world.check_sums()


def test_two_equal_workers_share_and_one_of_half_the_rate_gets_half_of_the_other() -> None:
    world = two_workers(
        SwarmPolicy(in_flight_max=8),
        P=FakeWorker(latency_s=0.0, per_pair_s=0.0005),
        Q=FakeWorker(latency_s=0.0, per_pair_s=0.001),
    )
    world.every(0.5, lambda: world.route([(0, 300)]), 100)
    world.run_until(seconds(101))
    totals = {
        name: sum(
            s.pairs for _, o in world.dispatches_to(name, since=50 * SECOND) for s in o.shares
        )
        for name in ("P", "Q")
    }
    assert 1.8 < totals["P"] / totals["Q"] < 2.2
    world.check_sums()


# Wrong numbers.


@pytest.mark.parametrize(
    "lie",
    [
        FakeWorker(norm_ratio=nan), FakeWorker(norm_ratio=None), FakeWorker(is_shaped=False),
        FakeWorker(norm_ratio=1e9), FakeWorker(error=0.02), FakeWorker(error=nan),
        FakeWorker(error=1.0), FakeWorker(error=None),
    ],
)  # fmt: skip
def test_a_liar_is_quarantined_on_its_trial(lie: FakeWorker) -> None:
    world = World()
    world.workers["W"] = lie
    world.attach("W", (0, 0, 4))
    world.route(PAIRS)
    world.run(1)
    assert world.slice_of("W").standing is Standing.QUARANTINED
    assert world.slice_of("W").last_serve_ms == 0
    found = [d for _, _, ds in world.log for d in ds if isinstance(d, Quarantine)]
    assert found == [Quarantine(WorkerId("W"), world.policy.quarantine_ns)]
    steady(world, 590)
    world.run_until(seconds(590))
    assert len(world.dispatched) == 1
    world.check_sums()


def test_a_liar_is_tried_again_after_the_quarantine_which_doubles() -> None:
    world = World()
    world.workers["W"] = FakeWorker(error=0.5)
    world.attach("W", (0, 0, 4))
    steady(world, 4000, 1)
    world.run_until(seconds(4000))
    tries = [at / SECOND for at, _ in world.dispatched]
    assert [round(b - a, -1) for a, b in pairwise(tries)] == [600, 1200]
    world.workers["W"] = FakeWorker()
    world.run(1)
    world.every(10, lambda: world.route(PAIRS), 8000)
    world.run(2000)
    assert world.slice_of("W").standing is Standing.PROVEN


def test_a_worker_honest_until_proven_is_caught_and_all_it_holds_is_computed_elsewhere() -> None:
    world = two_workers()
    world.workers["P"] = FakeWorker(error=0.02)
    world.run_until(seconds(8))
    world.workers["Q"].latency_s = 0.3
    for _ in range(8):
        world.route([(0, 1), (1, 1), (2, 1), (3, 1)])
    world.run(2)
    standings = {s.worker: s.standing for s in world.coordinator.statistics().slices}
    assert standings[WorkerId("P")] is Standing.QUARANTINED
    assert standings[WorkerId("Q")] is not Standing.QUARANTINED
    assert world.coordinator.statistics().calls.mismatches == 1
    world.check_sums()


def test_a_worker_wrong_five_percent_of_the_time_is_caught_within_the_statistical_bound() -> None:
    answers_until_caught = []
    for seed in range(20):
        chance = random.Random(seed)
        world = World(seed=seed, busy=3)
        world.prove("P", (0, 0, 4))
        world.run_until(7 * SECOND)
        for sent in count(1):
            world.workers["P"].error = 0.5 if chance.random() < 0.05 else 1e-6
            world.route(PAIRS)
            world.run(0.05)
            if world.slice_of("P").standing is Standing.QUARANTINED:
                answers_until_caught.append(sent)
                break
        world.check_sums()
    # Checked answers needed are geometric with p = 0.05: 20 at once, then one in fifty.
    assert sorted(answers_until_caught)[10] < 800
    assert max(answers_until_caught) < 6000


def test_what_a_liar_still_holds_is_hedged_to_another_replica_when_it_is_caught() -> None:
    world = two_workers(
        P=FakeWorker(latency_s=0.005, norm_ratio=nan), Q=FakeWorker(latency_s=0.009)
    )
    for expert in range(4):
        world.route([(expert, 1)])
    world.run(1)
    hedges = [d for _, _, ds in world.log for d in ds if isinstance(d, Hedge)]
    assert {h.worker for h in hedges} == {"Q"}
    assert len(hedges) == 2  # Both parts that P held, the lie and the one that it still owed.
    world.check_sums()


def test_a_mismatch_reported_after_the_worker_was_condemned_is_dropped() -> None:
    world = engaged_world(P=FakeWorker(error=0.5))
    world.route(PAIRS)
    world.route(PAIRS)
    world.run(1)
    calls = world.coordinator.statistics().calls
    assert (calls.checks, calls.mismatches) == (3, 1)
    assert calls.dropped == 1


def test_a_check_of_another_generation_is_dropped_and_one_never_reported_is_forgotten() -> None:
    world = World()
    world.workers["W"] = FakeWorker()
    world.attach("W", (0, 0, 4))
    order = world.route(PAIRS)[0]
    assert isinstance(order, Dispatch)
    head = order.call, order.part, order.worker
    world.coordinator.handle(AnswerArrived(*head, Session(1), True, 1.0), Nanos(world.now))
    world.send(AnswerChecked(*head, Session(2), 1e-9))
    assert world.slice_of("W").last_serve_ms == 0
    world.run(5)
    world.route(PAIRS)
    assert len(world.dispatched) == 1  # Still being checked.
    world.run(26)
    world.send(AnswerChecked(*head, Session(1), 1e-9))
    assert world.slice_of("W").last_serve_ms == 0
    assert world.coordinator.statistics().calls.dropped == 3  # With the fake's own answer.


@given(st.data())
def test_law_d7_whatever_subset_of_workers_fails_every_pair_enters_the_sum_exactly_once(
    data: st.DataObject,
) -> None:
    world = World(SwarmPolicy(answers_checked_first=2), busy=3, seed=data.draw(st.integers(0, 99)))
    names = ["A", "B", "C", "D"]
    for name in names:
        begin = data.draw(st.integers(0, 6))
        world.prove(name, (0, begin, data.draw(st.integers(begin + 1, 8))))
    world.run_until(9 * SECOND)
    behaviour = st.builds(
        FakeWorker,
        latency_s=st.sampled_from([None, 0.0, 0.01, 0.3, 1.9, 2.0, 2.5]),
        failure=st.sampled_from([None, None, None, *Failure]),
        error=st.sampled_from([1e-6, 1e-6, 0.02, nan]),
        norm_ratio=st.sampled_from([1.0, 1.0, 1.0, nan]),
        copies=st.integers(1, 2),
    )
    sessions = dict.fromkeys(names, 1)
    for _ in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(names))
        what = data.draw(st.sampled_from(["behave", "crash", "route", "route"]))
        if what == "behave":
            world.workers[name] = data.draw(behaviour)
        elif what == "crash":
            known = [s for s in world.coordinator.statistics().slices if s.worker == name]
            world.detach(name, sessions[name])
            sessions[name] += 1
            returns = data.draw(st.booleans())
            if known and returns:
                world.attach(name, (0, *known[0].experts), session=sessions[name])
        else:
            experts = sorted(data.draw(st.lists(st.integers(0, 9), min_size=1, unique=True)))
            world.route([(e, data.draw(st.integers(1, 40))) for e in experts])
        world.run(data.draw(st.sampled_from([0.0, 0.005, 0.2, 1.0])))
    world.run(3)
    world.check_sums()
    slowest = max((s.ended_at or 0) - s.opened_at for s in world.sums.values())
    assert slowest <= world.policy.call_deadline_ns
