"""Layer 1 as stories: engagement, standing, the map, and law D2-D6."""

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core.errors import IllegalEvent
from kvasir_core.events import StageReady, TimePassed
from kvasir_core.swarm import Coordinator, Refused, SwarmPolicy
from kvasir_core.swarm.decisions import Disengage, Dispatch, Engage, PollSlots, Quarantine, Report
from kvasir_core.swarm.events import (
    AnswerArrived,
    AnswerChecked,
    AnswerFailed,
    ExpertsRouted,
    MapFetched,
    MapRow,
    SlotsPolled,
    SlotsPollFailed,
    StageMeasured,
    WorkerAttached,
    WorkerDetached,
)
from kvasir_core.swarm.words import (
    CallId,
    Failure,
    PollId,
    Reading,
    Session,
    Slice,
    Standing,
    WorkerId,
)
from kvasir_core.units import Nanos
from tests.core.swarm.worlds import SECOND, FakeWorker, World, seconds

PAIRS = [(0, 2), (1, 2), (3, 1)]
P = WorkerId("P")
W = WorkerId("W")


def steady(world: World, until_s: float, period_s: float = 0.5) -> None:
    """Requests for layer 0, again and again."""
    world.every(period_s, lambda: world.route(PAIRS), until_s)


def engaged_world(**workers: FakeWorker) -> World:
    """Saturated and engaged, with proven workers that hold layer 0, experts 0-3."""
    world = World(busy=3)
    for name, worker in workers.items():
        world.workers[name] = FakeWorker()
        world.prove(name, (0, 0, 4))
        world.workers[name] = worker
    world.run_until(7 * SECOND)
    assert world.coordinator.statistics().is_engaged
    return world


# Case E3.


def clients(world: World, count: int, until_s: float) -> None:
    """Closed-loop clients: each routes again 50 ms after its call ended."""

    def submit() -> None:
        if world.now >= seconds(until_s):
            return
        world.route(PAIRS)
        number = world._call

        def wait() -> None:
            if world.sums[number].ended_at is None:
                world.after(0.01, wait)
            else:
                world.after(0.05, submit)

        wait()

    for _ in range(count):
        world.after(0, submit)


def test_case_e3_a_worker_that_accepts_and_never_answers_gets_its_trial_and_nothing_more() -> None:
    world = World(busy=4)
    world.workers["W"] = FakeWorker(latency_s=None)
    world.prove("P", (0, 0, 4))
    world.attach("W", (0, 0, 4))
    started = world.now
    clients(world, 4, 60)
    world.run_until(seconds(63))
    tries = world.dispatches_to("W")
    assert len(tries) == 1
    assert isinstance(tries[0][1], Dispatch)
    assert tries[0][1].is_trial
    assert tries[0][0] <= started + world.policy.grace_ns
    assert tries[0][1].deadline - tries[0][0] == world.policy.call_deadline_ns
    assert world.slice_of("W").last_serve_ms == 0
    assert world.slice_of("W").standing is Standing.SUSPECT
    late = world.dispatches_to("P", since=started + world.policy.idle_timeout_ns + 10 * SECOND)
    assert len(late) > 100  # P is kept past the idle timeout while load lasts.
    assert late[-1][0] > seconds(59)
    world.check_sums()
    slowest = max((s.ended_at or 0) - s.opened_at for s in world.sums.values())
    assert slowest <= world.policy.call_deadline_ns


def test_case_e3_without_a_proven_worker_everything_is_local_and_nothing_waits() -> None:
    world = World(busy=4)
    world.workers["W"] = FakeWorker(latency_s=None)
    world.attach("W", (0, 0, 4))
    clients(world, 4, 60)
    world.run_until(seconds(61))
    assert len(world.dispatches_to("W", trials=False)) == 0
    assert len(world.dispatches_to("W")) == 1
    assert all(s.remote_pairs == 0 and s.ended_at == s.opened_at for s in world.sums.values())
    world.check_sums()


def test_case_e3_if_it_answers_later_it_becomes_proven_and_serves() -> None:
    world = World(busy=4)
    world.workers["W"] = FakeWorker(latency_s=None)
    world.attach("W", (0, 0, 4))
    clients(world, 4, 120)
    world.run_until(seconds(50))
    world.workers["W"] = FakeWorker()
    world.run_until(seconds(119))
    tries = [
        at
        for at, order in world.dispatches_to("W")
        if isinstance(order, Dispatch) and order.is_trial
    ]
    assert len(tries) == 2
    assert 60 * SECOND <= tries[1] - tries[0] - world.policy.call_deadline_ns <= 61 * SECOND
    assert world.slice_of("W").standing is Standing.PROVEN
    assert world.slice_of("W").last_serve_ms > 0
    assert world.dispatches_to("W", since=tries[1] + SECOND, trials=False)


def test_case_e3_a_doubted_slice_is_reported_to_the_hub_with_last_serve_ms_zero() -> None:
    world = World(busy=4)
    world.workers["W"] = FakeWorker(latency_s=None)
    world.attach("W", (0, 0, 4))
    world.route(PAIRS)
    world.run(8)
    rows = [r for _, _, ds in world.log for d in ds if isinstance(d, Report) for r in d.rows]
    assert rows[-1] == (W, 0, 0, 4, Standing.SUSPECT, 0, 0)


# Engagement (D4, D5, no gain).


def test_at_rest_a_proven_worker_gets_nothing_even_under_light_steady_traffic() -> None:
    world = World(busy=1)
    world.prove("P", (0, 0, 4))
    steady(world, 200)
    world.run_until(seconds(200))
    assert world.dispatches_to("P", trials=False) == []
    world.check_sums()


def test_law_d4_when_load_goes_all_returns_to_local_within_period_dwell_and_idle_timeout() -> None:
    world = engaged_world(P=FakeWorker())
    steady(world, 400)
    world.run_until(seconds(120))
    world.busy = 1
    world.run_until(seconds(400))
    policy = world.policy
    dwell = policy.down_readings * policy.decision_period_ns
    limit = seconds(120) + policy.decision_period_ns + dwell + policy.idle_timeout_ns
    last = world.dispatches_to("P")[-1][0]
    assert seconds(120) + dwell < last <= limit
    assert [d for _, _, ds in world.log for d in ds if isinstance(d, Disengage)] == [
        Disengage("drained")
    ]


def test_serving_in_the_idle_timeout_does_not_refresh_its_own_reason() -> None:
    world = engaged_world(P=FakeWorker())
    steady(world, 300, 0.2)
    world.busy = 0
    world.run_until(seconds(300))
    disengaged = next(
        at for _, at, ds in world.log for d in ds if isinstance(d, Disengage)
    )  # fmt: skip
    last = world.dispatches_to("P")[-1][0]
    assert disengaged + 19 * SECOND <= last <= disengaged + world.policy.idle_timeout_ns


def test_law_d5_a_hung_poll_delays_nothing_and_changes_nothing_for_thirty_seconds() -> None:
    world = engaged_world(P=FakeWorker())
    steady(world, 60)
    world.busy = None
    hung_at = world.now
    world.run_until(seconds(60))
    polls = [at for _, at, ds in world.log for d in ds if isinstance(d, PollSlots)]
    assert {b - a for a, b in pairwise(polls)} == {3 * SECOND}
    blind = [
        (at, d.why) for _, at, ds in world.log for d in ds if isinstance(d, Disengage)
    ]  # fmt: skip
    assert len(blind) == 1
    assert blind[0][1] == "blind"
    last_good = max(at for e, at, _ in world.log if isinstance(e, SlotsPolled))
    assert blind[0][0] == last_good + 30 * SECOND
    assert max(at for at, _ in world.dispatches_to("P")) < blind[0][0]  # Then local, at once.
    assert max(at for at, _ in world.dispatches_to("P")) > hung_at + 25 * SECOND
    world.check_sums()
    assert world.coordinator.statistics().polls_missed >= 17


def test_a_poll_that_is_answered_late_or_fails_is_no_reading() -> None:
    world = World(busy=4)
    world.poll_delay_s = 1.001
    world.run(20)
    assert world.coordinator.statistics().reading is Reading.FAILED
    world.poll_delay_s = 1.0
    world.run(7)
    assert world.coordinator.statistics().reading is Reading.OK
    assert world.coordinator.statistics().is_engaged
    world.poll_fails = True
    world.run(29)
    assert world.coordinator.statistics().is_engaged
    world.run(4)
    assert not world.coordinator.statistics().is_engaged
    assert world.coordinator.statistics().reading is Reading.STALE


def test_an_answer_to_an_older_poll_is_dropped_and_one_never_asked_is_illegal() -> None:
    world = World(busy=None)
    world.run(4)
    world.send(SlotsPolled(PollId(0), 4, 4))
    assert world.coordinator.statistics().reading is Reading.FAILED
    for poll in (PollId(2), PollId(-1)):
        with pytest.raises(IllegalEvent, match="never asked"):
            world.send(SlotsPollFailed(poll))


def measure(world: World, blocked_s: float) -> None:
    world.send(StageMeasured(100, Nanos(100_000_000), Nanos(seconds(blocked_s))))


def test_remote_help_that_is_no_gain_for_sixty_seconds_is_given_up_for_a_while() -> None:
    world = engaged_world(P=FakeWorker())
    steady(world, 500)
    world.every(1, lambda: measure(world, 0.9), 500)
    world.run_until(seconds(500))
    seen = [
        (at, d) for _, at, ds in world.log for d in ds if isinstance(d, Engage | Disengage)
    ]  # fmt: skip
    assert [type(d) for _, d in seen] == [Engage, Disengage, Engage, Disengage]
    assert seen[1][1] == Disengage("no_gain")
    assert 60 <= (seen[1][0] - seconds(7)) / SECOND <= 63
    assert seen[2][0] - seen[1][0] == 300 * SECOND


def test_remote_help_that_saves_more_than_it_blocks_goes_on() -> None:
    world = engaged_world(P=FakeWorker())
    steady(world, 300, 0.1)
    world.every(1, lambda: measure(world, 0.001), 300)
    world.every(40, lambda: measure(world, 0.9), 300)  # A bad second now and then.
    world.run_until(seconds(300))
    assert not [d for _, _, ds in world.log for d in ds if isinstance(d, Disengage)]


def test_without_work_sent_out_or_a_local_cost_nothing_is_said_about_gain() -> None:
    world = engaged_world(P=FakeWorker())
    world.every(1, lambda: measure(world, 0), 200)
    world.run_until(seconds(200))
    assert world.coordinator.statistics().is_engaged
    world = engaged_world(P=FakeWorker())
    world.every(1, lambda: world.send(StageMeasured(0, Nanos(0), Nanos(SECOND))), 200)
    world.run_until(seconds(200))
    assert world.coordinator.statistics().is_engaged


# Standing (D2, D3).


def test_the_grace_window_starts_at_the_first_routable_request() -> None:
    world = World()
    world.attach("W", (0, 0, 4))
    world.run(600)
    assert world.slice_of("W").standing is Standing.NEW
    world.route([(7, 3)])  # Not its slice.
    assert world.slice_of("W").standing is Standing.NEW
    world.route(PAIRS)
    assert world.slice_of("W").standing is Standing.TRIAL
    world.run(1)
    assert world.slice_of("W").standing is Standing.PROVEN
    assert world.slice_of("W").last_serve_ms == 10


def test_a_trial_is_a_copy_that_no_request_waits_for() -> None:
    world = World()
    world.workers["W"] = FakeWorker(latency_s=1.5)
    world.attach("W", (0, 0, 4))
    decisions = world.route(PAIRS)
    assert [type(d).__name__ for d in decisions] == ["Dispatch", "ComputeLocally", "Conclude"]
    world.check_sums()


def test_a_trial_carries_few_pairs_however_long_the_prompt() -> None:
    world = World()
    world.attach("W", (0, 0, 4))
    world.route([(0, 50), (1, 50), (2, 50), (5, 50)])
    assert sum(s.pairs for s in world.dispatched[0][1].shares) == world.policy.trial_pairs_max


def test_a_slow_trial_blocks_other_trials_until_it_is_decided() -> None:
    world = World()
    world.workers["W"] = FakeWorker(latency_s=1.9)
    world.attach("W", (0, 0, 4), (1, 0, 4))
    world.route(PAIRS, 0)
    world.route(PAIRS, 1)
    world.run(1)
    world.route(PAIRS, 1)
    assert len(world.dispatched) == 1
    world.run(1)
    world.route(PAIRS, 1)
    assert len(world.dispatched) == 2


def test_two_slices_of_one_layer_are_tried_one_after_the_other() -> None:
    world = World()
    world.attach("W", (0, 0, 2), (0, 2, 4))
    world.route(PAIRS)
    assert len(world.dispatched) == 1
    world.run(1)
    world.route(PAIRS)
    assert len(world.dispatched) == 2


def test_a_window_that_ends_without_a_result_is_followed_by_the_wait_of_a_failed_trial() -> None:
    world = World()
    world.workers["W"] = FakeWorker(failure=Failure.BUSY)
    world.attach("W", (0, 0, 4))
    steady(world, 90, 0.1)
    world.run_until(seconds(90))
    tries = [at for at, _ in world.dispatches_to("W")]
    assert max(t for t in tries if t < 30 * SECOND) <= world.policy.grace_ns
    assert min(t for t in tries if t > 30 * SECOND) >= 75 * SECOND


def test_failed_trials_back_off_by_sixty_seconds_doubling() -> None:
    world = World()
    world.workers["W"] = FakeWorker(latency_s=None)
    world.attach("W", (0, 0, 4))
    steady(world, 1000)
    world.run_until(seconds(1000))
    tries = [at / SECOND for at, _ in world.dispatches_to("W")]
    gaps = [b - a - 2 for a, b in pairwise(tries)]  # 2 s: the deadline.
    assert len(gaps) == 4
    for gap, expected in zip(gaps, (60, 120, 240, 480), strict=True):
        assert expected <= gap <= expected + 1


def test_a_proven_worker_is_suspect_after_two_failures_and_returns_through_a_trial() -> None:
    world = engaged_world(P=FakeWorker(failure=Failure.ERROR))
    world.route(PAIRS)
    world.run(0.1)
    assert world.slice_of("P").standing is Standing.PROVEN
    world.route(PAIRS)
    world.run(0.1)
    assert world.slice_of("P").standing is Standing.SUSPECT
    assert world.slice_of("P").last_serve_ms > 0
    before = len(world.dispatched)
    steady(world, 50)
    world.run_until(seconds(50))
    later = world.dispatched[before:]
    assert all(isinstance(o, Dispatch) and o.is_trial for _, o in later)
    gaps = [(b[0] - a[0]) / SECOND for a, b in pairwise(later)]
    assert [round(gap) for gap in gaps] == [10, 20]  # After 5 s: 10 s, 20 s.
    world.workers["P"] = FakeWorker()
    world.run(300)
    steady(world, world.now / SECOND + 9)
    world.run(10)
    assert world.slice_of("P").standing is Standing.PROVEN
    world.check_sums()


def test_the_breaker_never_waits_longer_than_its_bound() -> None:
    world = engaged_world(P=FakeWorker(failure=Failure.ERROR))
    steady(world, 3000, 1)
    world.run_until(seconds(3000))
    tries = [at for at, o in world.dispatched if isinstance(o, Dispatch) and o.is_trial]
    assert max(b - a for a, b in pairwise(tries)) <= 302 * SECOND


@given(
    st.lists(
        st.tuples(st.sampled_from(["route", "reconnect", "wait", "rename"]), st.floats(0.1, 40)),
        min_size=1, max_size=60,
    )
)  # fmt: skip
def test_laws_d2_d3_a_worker_that_never_served_gets_one_trial_per_window_of_the_clock(
    steps: list[tuple[str, float]],
) -> None:
    world = World(
        SwarmPolicy(tick_ns=Nanos(60 * SECOND), silence_max_ns=Nanos(200 * SECOND)), busy=4
    )
    world.workers["W"] = FakeWorker(latency_s=None)
    session, end = 1, 4
    world.attach("W", (0, 0, end), session=session)
    for what, wait_s in steps:
        if what == "route":
            world.route(PAIRS)
        elif what != "wait":  # A new connection, or a new slice, buys no new try.
            session += 1
            end += what == "rename"
            world.detach("W", session - 1)
            world.attach("W", (0, 0, end), session=session)
        world.run(wait_s)
    world.run(2)
    tries = [at for at, _ in world.dispatches_to("W")]
    for k, (before, after) in enumerate(pairwise(tries)):
        assert after - before >= 60 * SECOND << k
    assert world.dispatches_to("W", trials=False) == []


def test_law_d3_reconnecting_does_not_renew_grace() -> None:
    world = World()
    world.workers["W"] = FakeWorker(failure=Failure.BUSY)
    world.attach("W", (0, 0, 4))
    world.route(PAIRS)
    for session in range(2, 40):
        world.run(1)
        world.detach("W", session - 1)
        world.attach("W", (0, 0, 4), session=session)
        world.route(PAIRS)
    assert max(at for at, _ in world.dispatched) <= world.policy.grace_ns


def test_a_crash_in_its_trial_is_a_failed_trial() -> None:
    world = World()
    world.workers["W"] = FakeWorker(latency_s=None)
    world.attach("W", (0, 0, 4))
    world.route(PAIRS)
    world.detach("W")
    world.attach("W", (0, 0, 4), session=2)
    assert world.slice_of("W").standing is Standing.SUSPECT
    world.run(30)
    world.route(PAIRS)
    assert len(world.dispatched) == 1


# Generations and the map (D6).


def row(worker: str, session: int = 1, layer: int = 0, begin: int = 0, end: int = 4) -> MapRow:
    return MapRow(WorkerId(worker), Session(session), layer, begin, end)


def test_workers_are_found_by_the_map_within_one_fetch() -> None:
    world = World()
    world.workers["W"] = FakeWorker()
    rows: list[MapRow] = []
    world.map = lambda: tuple(rows)
    world.run(6)
    rows.append(row("W"))
    world.run(5.1)
    assert world.slice_of("W").standing is Standing.NEW
    rows.clear()
    world.run(5.1)
    assert world.coordinator.statistics().workers_attached == 0
    rows.append(row("W"))  # The same generation is welcome again.
    world.run(5.1)
    assert world.coordinator.statistics().workers_attached == 1


def test_one_worker_leaves_the_map_and_the_others_stay() -> None:
    world = World()
    world.map = lambda: (row("A"), row("B"))
    world.run(6)
    world.map = lambda: (row("B"),)
    world.run(5)
    assert [s.worker for s in world.coordinator.statistics().slices] == ["B"]


def test_an_answer_to_an_older_fetch_of_the_map_is_dropped() -> None:
    world = World()
    world.map = lambda: (row("B"),)
    world.run(11)
    world.send(MapFetched(PollId(0), (row("A"),)))
    assert [s.worker for s in world.coordinator.statistics().slices] == ["B"]


def test_law_d6_a_hub_outage_keeps_the_last_map_until_its_own_time_to_live() -> None:
    world = World()
    world.workers["W"] = FakeWorker()
    rows: tuple[MapRow, ...] | None = (row("W"),)
    world.map = lambda: rows
    world.run(5.5)
    asked_at = 5 * SECOND
    rows = None
    world.run_until(asked_at + world.policy.map_ttl_ns)
    assert world.coordinator.statistics().workers_attached == 1
    world.run(1)
    assert world.coordinator.statistics().workers_attached == 0
    assert world.coordinator.statistics().map_age_ns is None
    rows = (row("W"),)
    world.run(6)
    assert world.coordinator.statistics().workers_attached == 1


def test_a_worker_that_left_the_map_may_still_answer_what_is_in_the_air() -> None:
    world = engaged_world(P=FakeWorker())
    world.map = lambda: (row("P", 2),)
    world.run(6)
    world.workers["P"] = FakeWorker(latency_s=0.05)
    world.run_until(seconds(24.99))
    world.map = lambda: ()
    world.route(PAIRS)
    world.run(0.02)
    assert world.coordinator.statistics().workers_attached == 0
    world.run(0.2)
    assert world.coordinator.statistics().calls.pairs_fallback == 0
    world.check_sums()


def test_a_worker_that_hung_up_before_the_map_dropped_it_is_gone_once() -> None:
    world = World()
    world.workers["W"] = FakeWorker()
    world.map = lambda: (row("W"),)
    world.run(6)
    world.detach("W")
    world.map = lambda: ()
    world.run(6)
    assert world.coordinator.statistics().workers_attached == 0


def test_what_carries_an_older_generation_is_dropped() -> None:
    world = engaged_world(P=FakeWorker())
    world.attach("P", (0, 0, 4), session=5)
    world.attach("P", (0, 0, 8), session=4)  # A late message of the connection before.
    assert world.slice_of("P").experts == (0, 4)
    world.detach("P", session=4)
    assert world.coordinator.statistics().workers_attached == 1
    world.workers["P"].latency_s = None
    world.route(PAIRS)
    order = world.dispatched[-1][1]
    head = order.call, order.part, order.worker
    for session in (Session(4), Session(6)):
        assert world.send(AnswerArrived(*head, session, True, 1.0)) == []
        assert world.send(AnswerFailed(*head, session, Failure.ERROR)) == []
    assert world.coordinator.statistics().calls.dropped == 4
    world.detach("P", session=5)
    world.attach("P", (0, 0, 4), session=5)  # This generation is over.
    assert world.coordinator.statistics().workers_attached == 0
    world.check_sums()


def test_a_goodbye_that_overtakes_its_hello_ends_that_generation_too() -> None:
    world = World()
    world.detach("W", session=1)  # Nobody by that name: nothing.
    world.attach("W", (0, 0, 4), session=1)
    world.detach("W", session=3)
    world.attach("W", (0, 0, 4), session=2)
    world.attach("W", (0, 0, 4), session=3)
    assert world.coordinator.statistics().workers_attached == 0
    world.detach("W", session=3)
    world.attach("W", (0, 0, 4), session=4)
    world.attach("W", (0, 0, 4), session=4)
    assert world.coordinator.statistics().workers_attached == 1


def test_a_worker_that_left_is_shown_as_gone_with_what_it_had_proven() -> None:
    world = engaged_world(P=FakeWorker())
    world.detach("P")
    assert world.slice_of("P").standing is Standing.GONE
    assert world.slice_of("P").last_serve_ms > 0
    world.attach("P", (0, 0, 4), session=2)
    assert world.slice_of("P").standing is Standing.PROVEN  # It is what it has shown.


def test_a_new_generation_takes_the_calls_of_the_old_one_with_it() -> None:
    world = engaged_world(P=FakeWorker(latency_s=None))
    world.route(PAIRS)
    world.attach("P", (0, 0, 4), session=2)
    world.check_sums()


# Refusals.

BAD_EVENTS = [
    WorkerAttached(WorkerId(""), Session(1), ()),
    WorkerAttached(WorkerId("x" * 129), Session(1), ()),
    WorkerAttached(W, Session(-1), ()),
    WorkerAttached(W, Session(1), (Slice(0, 4, 4),)),
    WorkerAttached(W, Session(1), (Slice(0, 0, 4), Slice(0, 3, 5))),
    WorkerAttached(W, Session(1), (Slice(0, -1, 4),)),
    WorkerAttached(W, Session(1), ((0, 1),)),  # type: ignore[arg-type]
    WorkerAttached(W, Session(1), [Slice(0, 0, 1)]),  # type: ignore[arg-type]
    WorkerDetached(W, Session(1 << 40)),
    ExpertsRouted(CallId(10**6), 0, ()),
    ExpertsRouted(CallId(10**6), 0, ((1, 1), (1, 1))),
    ExpertsRouted(CallId(10**6), 0, ((1, 0),)),
    ExpertsRouted(CallId(10**6), 0, ((2, 1), (1, 1))),
    ExpertsRouted(CallId(-1), 0, ((1, 1),)),
    AnswerArrived(CallId(1), 1, W, Session(1), 1, 1.0),  # type: ignore[arg-type]
    AnswerArrived(CallId(1), 1, W, Session(1), True, "1.0"),  # type: ignore[arg-type]
    AnswerChecked(CallId(1), 1, W, Session(1), True),
    AnswerFailed(CallId(1), 1, W, Session(1), "late"),  # type: ignore[arg-type]
    StageMeasured(-1, Nanos(0), Nanos(0)),
    StageMeasured(1, Nanos(10**100000), Nanos(0)),
    SlotsPolled(PollId(0), 5, 4),
    SlotsPolled(PollId(0), float("nan"), 4),  # type: ignore[arg-type]
    MapFetched(PollId(0), (row("W"), row("W", 2, 1))),
    MapFetched(PollId(0), (row("W"), row("W", 1, 0, 3, 5))),
    MapFetched(PollId(0), (row("W"),) * ((1 << 18) + 1)),
    StageReady(0),
]


@pytest.mark.parametrize("event", BAD_EVENTS, ids=lambda e: type(e).__name__)
def test_an_event_that_cannot_be_is_refused_and_changes_nothing(event: object) -> None:
    world = World(busy=None)
    world.map = lambda: None
    world.run(4)
    world.attach("A", (0, 0, 4))
    before = world.coordinator.statistics(), world.coordinator.next_wakeup()
    with pytest.raises(IllegalEvent):
        world.coordinator.handle(event, Nanos(world.now + SECOND))  # type: ignore[arg-type]
    assert (world.coordinator.statistics(), world.coordinator.next_wakeup()) == before
    world.route(PAIRS)
    world.run(1)
    world.check_sums()


def test_a_full_roster_forgets_who_left_without_blame_and_refuses_otherwise() -> None:
    world = World(SwarmPolicy(workers_max=2))
    world.attach("A", (0, 0, 4))
    world.attach("B", (0, 0, 4))
    with pytest.raises(Refused, match="no room for 1 more"):
        world.attach("C", (0, 0, 4))
    world.detach("A")
    world.attach("C", (0, 0, 4))
    assert world.coordinator.statistics().workers_known == 2
    world.detach("C")
    rows = (row("B"), row("C", 2), row("D"))
    world.map = lambda: rows
    with pytest.raises(Refused, match="no room for 1 more"):
        world.run(10)
    world.map = lambda: (row("B"), row("D"))
    world.run(10)
    assert world.coordinator.statistics().workers_attached == 2


def test_the_shells_own_sleep_ages_nobody() -> None:
    world = World()
    world.map = lambda: (row("W"),)
    world.workers["W"] = FakeWorker(latency_s=None)
    world.run(6)
    world.route(PAIRS)
    world.map = lambda: None
    for jump in (3600, -7200, 40):
        world.now += jump * SECOND
        world.send(TimePassed())
    stats = world.coordinator.statistics()
    assert stats.clock_jumps == 3
    assert stats.workers_attached == 1
    assert stats.slices[0].standing is Standing.TRIAL
    assert stats.map_age_ns is not None
    assert 0 <= stats.map_age_ns < 2 * SECOND


def test_policies_that_contradict_themselves_are_refused_and_faster_ones_divide_time() -> None:
    for wrong in (
        {"threshold": 0}, {"base": -1}, {"check_share": 0.0}, {"tolerance": float("inf")},
        {"rule": "other"}, {"silence_max_ns": Nanos(SECOND)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must be"):
            SwarmPolicy(**wrong)
    fast = SwarmPolicy().faster(10)
    assert fast.hub_down_ns == 30 * SECOND
    assert fast.call_deadline_ns == SwarmPolicy().call_deadline_ns
    assert fast.base == 2


def test_the_first_wakeup_is_at_once_and_the_next_within_a_tick() -> None:
    import random

    coordinator = Coordinator(SwarmPolicy(), random.Random(1))
    assert coordinator.next_wakeup() == 0
    coordinator.handle(TimePassed(), Nanos(10**15))
    assert 10**15 < coordinator.next_wakeup() <= 10**15 + SECOND


def test_statistics_are_frozen_values() -> None:
    world = engaged_world(P=FakeWorker())
    stats = world.coordinator.statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        stats.busy = 1  # type: ignore[misc]
    assert (stats.busy, stats.slots, stats.threshold, stats.engagements) == (3, 4, 2, 1)
    assert not [d for _, _, ds in world.log for d in ds if isinstance(d, Quarantine)]
