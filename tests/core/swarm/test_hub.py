"""Layer 2 as stories: heartbeats, generations, recruiting, release, restart, hostile input."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core.errors import IllegalEvent
from kvasir_core.events import StageReady, TimePassed
from kvasir_core.swarm import Hub, Refused, SwarmPolicy, decisions
from kvasir_core.swarm.decisions import (
    AdmitRelay,
    Assign,
    Decline,
    LapseClaim,
    LoseWorker,
    PollCoordinator,
    RefuseRelay,
    SetTarget,
)
from kvasir_core.swarm.events import (
    BanRow,
    ClaimRow,
    CoordinatorAttached,
    CoordinatorGone,
    CoverageReported,
    Held,
    ModelRegistered,
    ProvenRow,
    RelayClosed,
    RelayOpened,
    ServedRow,
    ServingReported,
    SlotsPolled,
    SlotsPollFailed,
    StateRestored,
    VolunteerAsked,
)
from kvasir_core.swarm.words import (
    ClaimId,
    CoordinatorId,
    ModelName,
    PollId,
    Session,
    Slice,
    Standing,
    WorkerId,
)
from kvasir_core.units import Nanos
from tests.core.swarm.hubs import SECOND, HubWorld, patient

A = WorkerId("a")
C = CoordinatorId("c")
M = ModelName("m")


def lost(world: HubWorld) -> list[tuple[float, str]]:
    return [
        (at / SECOND, d.worker) for _, at, ds in world.log for d in ds if isinstance(d, LoseWorker)
    ]


# Case E5, and laws M7 and M10.

E5 = SwarmPolicy(coverage_ttl_ns=Nanos(15 * SECOND), heartbeat_ns=Nanos(5 * SECOND))


def heartbeats(world: HubWorld, workers: str, seconds: int, *, silent_from: int = 10**9) -> None:
    """Every worker reports every 5 s; `z` for the last time at `silent_from`."""
    end = world.now + seconds * SECOND
    while world.now < end:
        for name in workers:
            if name != "z" or world.now <= silent_from * SECOND:
                world.cover(name, (0, 0, 8))
        world.run(5)
        assert all(node.age_s >= 0 for node in world.hub.statistics().nodes)


def test_case_e5_a_workers_clock_is_never_asked_for() -> None:
    fields = {
        name
        for kind in (CoverageReported, VolunteerAsked, RelayOpened, RelayClosed)
        for name in kind._fields
    }
    assert fields == {
        "worker", "node", "model", "segments", "claim", "is_draining", "experts_max", "holds", "session",
    }  # fmt: skip


def test_case_e5_a_silent_worker_is_lost_once_within_one_heartbeat_of_its_limit() -> None:
    world = HubWorld(E5, layers=(0,), experts=8)
    heartbeats(world, "abz", 120, silent_from=60)
    assert [who for _, who in lost(world)] == ["z"]
    assert 75 <= lost(world)[0][0] <= 80
    assert world.segments()[0][2] == 2


@pytest.mark.parametrize("jump", [3600, -7200])
def test_case_e5_a_clock_that_steps_meanwhile_gives_it_one_more_limit_and_loses_nobody_else(
    jump: int,
) -> None:
    world = HubWorld(E5, layers=(0,), experts=8)
    heartbeats(world, "abz", 70, silent_from=60)
    world.now += jump * SECOND
    heartbeats(world, "ab", 50)
    ((at, who),) = lost(world)
    assert who == "z"
    assert 70 <= at - jump <= 70 + 15 + 5


def test_case_e5_the_silent_one_is_lost_just_after_fifteen_seconds_of_silence() -> None:
    world = HubWorld(E5, layers=(0,), experts=8)
    world.cover("z", (0, 0, 8))
    world.run(15)
    assert lost(world) == []
    assert world.segments() == [(0, 8, 1, 0, 0.5)]
    world.run(1)
    assert lost(world) == [(15.000000001, "z")]
    assert world.segments() == [(0, 8, 0, 0, 1.0)]
    world.run(100)
    assert len(lost(world)) == 1


@pytest.mark.parametrize("jump", [40, 3600, -7200, 10**6])
def test_case_e5_a_stopped_hub_marks_nobody_lost_before_a_full_limit_after_the_pause(
    jump: int,
) -> None:
    world = HubWorld(E5, layers=(0,), experts=8)
    heartbeats(world, "ab", 50)
    world.run(4)
    world.now += jump * SECOND
    resumed = world.now
    world.send(TimePassed())
    world.run(15)
    assert lost(world) == []
    world.run(1)
    assert [round(at - resumed / SECOND) for at, _ in lost(world)] == [15, 15]


def test_law_m7_alive_at_the_ttl_and_gone_after() -> None:
    world = HubWorld(layers=(0,), experts=8)
    world.cover("a", (0, 0, 8))
    world.run_until(120)
    assert world.segments()[0][2] == 1
    world.run_until(120.000000001)
    assert world.segments()[0][2] == 0
    assert world.cover("a", (0, 0, 8)).session == 2  # As a new one.


def test_law_m10_jumps_lapse_no_claim_and_change_no_target() -> None:
    world = HubWorld(SwarmPolicy(base=1), layers=(0,), experts=8, busy=4)
    assert isinstance(world.volunteer("a"), Assign)
    world.run(60)
    assert world.model().recruiting
    for jump in (10**5, -(10**5), 40):
        world.now += jump * SECOND
        world.send(TimePassed())
    assert world.model().recruiting
    assert world.hub.statistics().claims_lapsed == 0
    assert world.hub.statistics().clock_jumps == 3
    age_s = world.model().age_s
    assert age_s is not None
    assert age_s >= 0


# Recruiting (M5).


def targets(world: HubWorld) -> list[tuple[float, int]]:
    return [
        (at / SECOND, d.target) for _, at, ds in world.log for d in ds if isinstance(d, SetTarget)
    ]


def test_law_m5_up_within_one_poll_and_the_dwell_and_back_after_its_own() -> None:
    world = HubWorld()
    world.run(95)
    world.busy = 4
    world.run_until(500)
    world.busy = 0
    world.run_until(1000)
    assert targets(world) == [(0, 2), (130, 3), (800, 2)]
    assert 130 <= 95 + 10 + 30
    assert world.hub.statistics().target_changes == 3


@given(st.lists(st.tuples(st.integers(1, 29), st.integers(11, 299)), max_size=20))
def test_law_m5_load_that_toggles_faster_than_the_dwell_moves_nothing(
    toggles: list[tuple[int, int]],
) -> None:
    world = HubWorld(SwarmPolicy(tick_ns=Nanos(20 * SECOND), silence_max_ns=Nanos(50 * SECOND)))
    for high, low in toggles:
        world.busy = 4
        world.run(high)
        world.busy = 0
        world.run(low)
    assert targets(world) == [(0, 2)]


def test_no_good_reading_freezes_the_state_and_falls_to_base_after_three_hundred_seconds() -> None:
    world = HubWorld(busy=4)
    world.run(100)
    assert (world.model().reason, world.model().saturated) == ("saturated", True)
    world.busy = -1
    world.run_until(144)
    assert world.model().reason == "saturated"
    world.run_until(145)
    assert world.model().reason == "frozen: no valid reading"
    assert (world.model().recruiting, world.model().saturated) == (True, False)
    assert (world.model().busy, world.model().age_s) == (0, 45.0)
    world.run_until(399)
    assert world.model().effective_target == 3
    world.run_until(401)
    assert world.model().effective_target == 2
    assert world.hub.statistics().polls_missed == 30


def test_law_d5_a_hung_coordinator_delays_no_other_and_a_late_answer_is_none() -> None:
    world = HubWorld(busy=None)
    world.send(ModelRegistered(ModelName("n"), (0,), 8, 256))
    world.send(CoordinatorAttached(CoordinatorId("d"), ModelName("n")))
    polls: dict[str, list[tuple[float, int]]] = {"c": [], "d": []}
    for _ in range(100):
        world.run(1)
        for _, at, ds in world.log:
            for order in [d for d in ds if isinstance(d, PollCoordinator)]:
                polls[order.coordinator].append((at / SECOND, order.poll))
                if order.coordinator == "d":
                    world.send(SlotsPolled(order.poll, 4, 4))
        world.log.clear()
    assert [at for at, _ in polls["c"]] == [10.0 * i for i in range(11)]
    recruiting = {m.model: m.recruiting for m in world.hub.recruitment().models}
    assert recruiting == {"m": False, "n": True}
    world.send(SlotsPolled(PollId(polls["c"][-1][1]), 4, 4))  # At once: in time.
    assert world.model().busy == 4
    world.send(SlotsPolled(PollId(polls["c"][-2][1]), 1, 4))  # An older one.
    assert world.model().busy == 4
    world.run(10)
    poll = next(d.poll for _, _, ds in world.log for d in ds if isinstance(d, PollCoordinator))
    world.run(4.000001)
    world.send(SlotsPolled(poll, 3, 4))
    assert world.model().busy == 4


def test_a_coordinator_that_leaves_takes_its_load_and_its_doubts_with_it() -> None:
    world = HubWorld(layers=(0,), experts=8, busy=4)
    world.send(CoordinatorAttached(CoordinatorId("d"), M))
    world.send(CoordinatorAttached(CoordinatorId("d"), M))
    world.cover("a", (0, 0, 8))
    world.run(60)
    assert (world.model().busy, world.model().slots, world.model().workers) == (8, 8, 1)
    world.serve("a", (0, 0, 8), Standing.SUSPECT, coordinator="d")
    assert world.segments()[0][2] == 0
    assert world.hub.statistics().nodes[0].doubted_by == ("d",)
    world.send(CoordinatorGone(CoordinatorId("d")))
    assert world.segments()[0][2] == 1
    world.busy = None
    world.run(11)
    world.send(CoordinatorGone(C))
    assert (world.model().effective_target, world.model().recruiting) == (0, False)
    with pytest.raises(Refused) as refused:
        world.send(CoordinatorGone(C))
    assert refused.value.code == "unknown"


# Volunteers and claims.


def test_a_herd_gets_disjoint_slices_and_then_a_jittered_retry_time() -> None:
    world = HubWorld(SwarmPolicy(base=1), layers=(0, 1), experts=64)
    answers = [world.volunteer(f"n{i}", 16) for i in range(20)]
    given_out = [a.slice for a in answers if isinstance(a, Assign)]
    assert len(given_out) == len(set(given_out)) == 8
    waits = [a.retry_after / SECOND for a in answers if isinstance(a, Decline)]
    assert len(set(waits)) == 12
    assert all(36 <= wait <= 54 for wait in waits)


def test_slices_on_disk_of_models_that_are_no_longer_served_are_no_reason_to_refuse() -> None:
    world = HubWorld()
    holds = (Held(ModelName("old"), 99, 0, 10**6), Held(M, 0, 8, 16))
    answer = world.send(VolunteerAsked(A, None, 64, holds))[-1]
    assert isinstance(answer, Assign)
    assert answer.slice == (0, 8, 16)


def test_asking_again_gives_the_same_claim_so_a_lost_answer_costs_nothing() -> None:
    world = HubWorld()
    first = world.volunteer("a", 16)
    world.run(20)
    again = world.volunteer("a", 16)
    assert isinstance(first, Assign)
    assert isinstance(again, Assign)
    assert again == first._replace(lease=Nanos(100 * SECOND))
    smaller = world.volunteer("a", 8)
    assert isinstance(smaller, Assign)
    assert smaller.claim != first.claim
    assert world.hub.statistics().claims_open == 1


def test_claims_are_confirmed_by_coverage_with_or_without_their_number() -> None:
    world = HubWorld()
    for node in "ab":
        answer = world.volunteer(node, 16)
        assert isinstance(answer, Assign)
        world.cover(node, answer.slice, claim=answer.claim if node == "a" else None)
        world.cover(node, answer.slice, claim=answer.claim)  # Doubled: a closed claim.
    assert world.hub.statistics().claims_confirmed == 2
    assert world.hub.statistics().claims_open == 0


def test_coverage_of_something_else_confirms_nothing() -> None:
    world = HubWorld()
    world.send(ModelRegistered(ModelName("n"), (0,), 64, 256))
    answer = world.volunteer("a", 16)
    assert isinstance(answer, Assign)
    world.cover("a", (1, 40, 50), claim=answer.claim)
    world.cover("a", (0, 0, 64), claim=answer.claim, model="n")
    assert world.hub.statistics().claims_open == 1


def test_a_node_whose_claims_lapse_waits_longer_each_time_until_it_serves() -> None:
    world = HubWorld(patient())
    waits = []
    for _ in range(12):
        assert isinstance(world.volunteer("a", 16), Assign)
        world.now += 120 * SECOND
        answer = world.volunteer("a", 16)
        assert isinstance(answer, Decline)
        assert answer.reason == "its claims lapsed"
        waits.append(round((answer.retry_after / SECOND - 45) / 120))
        world.now += answer.retry_after
    assert waits == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 512, 512]
    lapses = [d for _, _, ds in world.log for d in ds if isinstance(d, LapseClaim)]
    assert len(lapses) == 12
    world.recruit("a", 16)
    assert isinstance(world.volunteer("a", 16), Assign)


def test_bounds_on_what_is_remembered_of_strangers() -> None:
    world = HubWorld(SwarmPolicy(nodes_max=2), layers=(0,), experts=8)
    for name in "abcd":
        world.volunteer(name, 1)
    world.run(121)
    assert isinstance(world.volunteer("a", 1), Assign)  # Forgotten: the oldest of the lapsed.
    assert isinstance(world.volunteer("d", 1), Decline)
    for name in "xyz":
        world.serve(name, (0, 0, 1), Standing.QUARANTINED)
    assert isinstance(world.volunteer("x", 1), Assign)
    assert isinstance(world.volunteer("z", 1), Decline)
    world.cover("p", (0, 0, 1))
    world.cover("q", (0, 0, 1))
    with pytest.raises(Refused) as refused:
        world.cover("r", (0, 0, 1))
    assert refused.value.code == "full"
    for name in "pq":
        world.serve(name, (0, 0, 1))
        world.cover(name)
    world.cover("r", (0, 0, 1))
    world.serve("r", (0, 0, 1))
    world.cover("r")
    assert {row.worker for row in world.hub.snapshot().proven} == {"q", "r"}


# Doubt, drain, release.


def test_case_e3_a_worker_that_never_served_leaves_its_slice_uncovered_in_the_demand() -> None:
    world = HubWorld(SwarmPolicy(base=1), layers=(0,), experts=8)
    world.recruit("w")
    assert world.segments() == [(0, 8, 1, 0, 0.0)]
    world.serve("w", (0, 0, 8), Standing.SUSPECT, pairs=0, last_serve_ms=0)
    assert world.segments() == [(0, 8, 0, 0, 1.0)]
    assert world.hub.statistics().nodes[0].last_serve_ms == 0
    assert isinstance(world.volunteer("p"), Assign)
    world.serve("w", (0, 0, 8), Standing.GONE, pairs=0, last_serve_ms=0)  # Says nothing.
    assert world.segments()[0][2] == 0
    world.serve("w", (0, 0, 8), Standing.PROVEN)
    assert world.segments()[0][2] == 1
    assert world.hub.statistics().nodes[0].last_serve_ms == 5


def test_a_liar_is_uncovered_and_offered_nothing_for_a_while() -> None:
    world = HubWorld(SwarmPolicy(base=2), layers=(0,), experts=8)
    world.recruit("w")
    world.serve("w", (0, 0, 8), Standing.QUARANTINED)
    assert world.segments()[0][2] == 0
    answer = world.volunteer("w")
    assert isinstance(answer, Decline)
    assert answer.reason == "quarantined"
    assert answer.retry_after > 600 * SECOND
    world.run(601)
    assert isinstance(world.volunteer("w"), Assign)


def test_reports_about_what_is_over_are_dropped() -> None:
    world = HubWorld(layers=(0,), experts=8)
    world.send(ModelRegistered(ModelName("n"), (0,), 8, 256))
    world.cover("a", (0, 0, 8))
    world.cover("b", (0, 0, 8), model="n")
    before = world.hub.statistics()
    world.serve("gone", (0, 0, 8), Standing.SUSPECT)
    world.serve("a", (0, 0, 4), Standing.SUSPECT)
    world.serve("b", (0, 0, 8), Standing.SUSPECT)  # Another model's worker.
    assert world.hub.statistics() == before


def test_a_draining_worker_leaves_the_offer_first() -> None:
    world = HubWorld(layers=(0,), experts=8)
    session = world.cover("a", (0, 0, 8)).session
    world.dial("a", session)
    assert len(world.hub.dispatch_map(M)) == 1
    world.cover("a", (0, 0, 8), draining=True)
    assert world.hub.dispatch_map(M) == ()
    assert world.segments()[0][2] == 0
    answer = world.volunteer("a")
    assert isinstance(answer, Decline)
    assert answer.reason == "draining"
    assert world.cover("a").session == 0  # Its goodbye.
    assert world.hub.statistics().nodes == ()


def surplus(workers: int) -> HubWorld:
    """So many workers serve all of a small model whose base is 1, and are then not used."""
    world = HubWorld(SwarmPolicy(base=1), layers=(0,), experts=8)
    for number in range(workers):
        world.cover(f"w{number}", (0, 0, 8))
    return world


def beat(world: HubWorld, workers: int, seconds: int) -> list[tuple[float, str]]:
    """Heartbeats every 15 s, obeying releases; returns who was released when."""
    released = []
    for _ in range(seconds // 15):
        world.run(15)
        for number in range(workers):
            name = f"w{number}"
            if any(node.worker == name for node in world.hub.statistics().nodes):
                answer = world.cover(name, (0, 0, 8))
                if answer.release:
                    released.append((world.now / SECOND, name))
                    assert world.cover(name, (0, 0, 8)).release == answer.release  # Told again.
                    world.cover(name)
    return released


def test_idle_surplus_leaves_a_quarter_at_a_time_and_never_the_last_holder() -> None:
    world = surplus(9)
    released = beat(world, 9, 900)
    assert released[0][0] == 600
    by_time: dict[float, int] = {}
    for at, _ in released:
        by_time[at] = by_time.get(at, 0) + 1
    assert list(by_time.values()) == [2, 1, 1, 1, 1, 1, 1]  # Of 8, 6, 5, 4, 3, 2, 1.
    times = list(by_time)
    assert all(b - a >= 30 for a, b in pairwise(times))
    assert world.segments()[0][2] == 1
    assert world.hub.statistics().releases == 8


def test_a_worker_that_serves_stays_and_so_does_one_that_recruiting_needs() -> None:
    world = surplus(2)
    for _ in range(100):
        world.serve("w1", (0, 0, 8))
        assert {name for _, name in beat(world, 2, 15)} <= {"w0"}
    assert world.segments()[0][2] == 1
    world = surplus(2)
    world.busy = 4
    assert beat(world, 2, 900) == []  # The target is 2.


def test_a_doubted_idle_worker_is_released_too() -> None:
    world = surplus(1)
    world.serve("w0", (0, 0, 8), Standing.SUSPECT, pairs=0)
    assert [name for _, name in beat(world, 1, 700)] == ["w0"]


def test_a_released_slice_counts_no_longer_and_is_not_dispatched_to() -> None:
    world = surplus(2)
    for number in range(2):
        world.dial(f"w{number}", world.cover(f"w{number}", (0, 0, 8)).session)
    answers: list[object] = []
    for _ in range(41):
        world.run(15)
        answers = [world.cover(f"w{number}", (0, 0, 8)).release for number in range(2)]
    assert answers == [((0, 0, 8),), ()]
    assert [row.worker for row in world.hub.dispatch_map(M)] == ["w1"]
    assert world.segments()[0][2] == 1


# Generations.


def test_a_worker_dials_with_the_generation_of_its_heartbeat_once() -> None:
    world = HubWorld()
    session = world.cover("a", (0, 0, 8)).session
    assert isinstance(world.dial("a", session + 1), RefuseRelay)
    assert isinstance(world.dial("b", session), RefuseRelay)
    assert world.dial("a", session) == AdmitRelay(A, session)
    refused = world.dial("a", session)
    assert isinstance(refused, RefuseRelay)
    assert refused.why == "this generation is in use"
    assert world.cover("a", (0, 0, 8)).session == session
    row = world.hub.dispatch_map(M)[0]
    assert row == (A, session, 0, 0, 8)


def test_a_generation_that_was_closed_is_burned_and_the_heartbeat_gives_the_next() -> None:
    world = HubWorld()
    first = world.cover("a", (0, 0, 8)).session
    world.dial("a", first)
    world.hang_up("a", first)
    assert world.hub.dispatch_map(M) == ()
    assert isinstance(world.dial("a", first), RefuseRelay)
    second = world.cover("a", (0, 0, 8)).session
    assert second > first
    assert isinstance(world.dial("a", second), AdmitRelay)
    world.hang_up("a", first)  # The old connection's goodbye, late.
    world.hang_up("nobody", first)
    assert len(world.hub.dispatch_map(M)) == 1


# Restart.


def test_a_restarted_hub_takes_up_what_was_kept_and_is_quiet_for_a_claim_period() -> None:
    world = HubWorld(SwarmPolicy(base=1), layers=(0,), experts=64, busy=4)
    world.run(100)
    world.recruit("a", 16)
    world.serve("a", (0, 0, 16))
    claim = world.volunteer("b", 16)
    assert isinstance(claim, Assign)
    world.serve("liar", (0, 0, 8), Standing.QUARANTINED)
    kept = world.hub.snapshot()
    assert kept.recruiting == ("m",)

    after = HubWorld(world.policy, busy=None, is_registered=False)
    after.now = 10**14
    after.send(kept)
    after.send(CoordinatorAttached(C, M))
    assert after.model().effective_target == 2
    assert isinstance(after.volunteer("x"), Decline)
    assert after.volunteer("x").reason == "the hub has just restarted"  # type: ignore[union-attr]
    assert after.segments()[1][:4] == (16, 32, 0, 1)
    session = after.cover("a", (0, 0, 16)).session
    assert session >= kept.session_next
    assert after.hub.statistics().nodes[0].last_serve_ms == 5
    after.cover("b", claim.slice, claim=claim.claim)
    assert after.hub.statistics().claims_confirmed == 1
    after.run(119)
    assert isinstance(after.volunteer("x"), Decline)
    after.cover("a", (0, 0, 16))
    after.run(1.1)
    assert isinstance(after.volunteer("x"), Assign)
    assert isinstance(after.volunteer("liar"), Decline)
    restored_again = HubWorld(world.policy, busy=None, is_registered=False)
    restored_again.send(after.hub.snapshot())
    assert restored_again.hub.snapshot().proven == (ProvenRow(A, M, 0, 0, 16, 5),)


def test_what_a_worker_was_known_for_is_of_that_model_only() -> None:
    world = HubWorld(layers=(0,), experts=8)
    world.send(ModelRegistered(ModelName("n"), (0,), 8, 256))
    world.cover("a", (0, 0, 8))
    world.serve("a", (0, 0, 8))
    world.cover("a")
    world.cover("a", (0, 0, 8), model="n")
    assert world.hub.statistics().nodes[0].last_serve_ms == 0


# Hostile input (M8), and pull only (M9).

GOOD = StateRestored((ModelRegistered(M, (0,), 8, 1),), (), (), (), (), ClaimId(5), Session(5))
CLAIM = ClaimRow(ClaimId(1), A, M, 0, 0, 8, Nanos(0))


@pytest.mark.parametrize(
    "change",
    [
        {"models": (ModelRegistered(M, (1, 0), 8, 1),)},
        {"recruiting": (ModelName("n"),)},
        {"claims": (CLAIM, CLAIM._replace(claim=ClaimId(2)))},
        {"claims": (CLAIM, CLAIM._replace(node=WorkerId("b")))},
        {"claims": (CLAIM._replace(claim=ClaimId(5)),)},
        {"claims": (CLAIM._replace(remaining_ns=Nanos(10**12)),)},
        {"claims": (CLAIM._replace(end=9),)},
        {"claims": (CLAIM._replace(model=ModelName("n")),)},
        {"bans": (BanRow(A, Nanos(-1)),)},
        {"proven": (ProvenRow(A, M, 0, 0, 8, 0),)},
        {"proven": (ProvenRow(A, M, 1, 0, 8, 1),)},
        {"claim_next": 0},
        {"session_next": 0},
    ],
)
def test_a_damaged_store_is_refused(change: dict[str, object]) -> None:
    world = HubWorld(is_registered=False)
    with pytest.raises(IllegalEvent):
        world.send(GOOD._replace(**change))  # type: ignore[arg-type]
    world.send(GOOD._replace(claims=(CLAIM,)))
    assert world.hub.statistics().claims_open == 1
    with pytest.raises(IllegalEvent, match="first event"):
        world.send(GOOD)


NAN = float("nan")
HUGE = 10**30
HOSTILE = [
    (VolunteerAsked(WorkerId(""), None, 1), "malformed"),
    (VolunteerAsked(WorkerId("a\n"), None, 1), "malformed"),
    (VolunteerAsked(WorkerId("a" * 129), None, 1), "malformed"),
    (VolunteerAsked(7, None, 1), "malformed"),  # type: ignore[arg-type]
    (VolunteerAsked(A, ModelName("n"), 1), "unknown"),
    (VolunteerAsked(A, None, 0), "malformed"),
    (VolunteerAsked(A, None, -3), "malformed"),
    (VolunteerAsked(A, None, True), "malformed"),
    (VolunteerAsked(A, None, HUGE), "malformed"),
    (VolunteerAsked(A, None, 10**5000), "malformed"),
    (VolunteerAsked(A, None, NAN), "malformed"),  # type: ignore[arg-type]
    (VolunteerAsked(A, None, "8"), "malformed"),  # type: ignore[arg-type]
    (VolunteerAsked(A, None, 1, (Held(M, 0, 4, 4),)), "malformed"),
    (VolunteerAsked(A, None, 1, (Held(M, 0, 4, 2),)), "malformed"),
    (VolunteerAsked(A, None, 1, (Held(M, 0, 0, 4), Held(M, 0, 3, 5))), "malformed"),
    (VolunteerAsked(A, None, 1, (Held(M, 0, 0, 65),)), "malformed"),
    (VolunteerAsked(A, None, 1, (Held(M, 7, 0, 5),)), "malformed"),
    (VolunteerAsked(A, None, 1, ((M, 0, 0, 5),)), "malformed"),  # type: ignore[arg-type]
    (VolunteerAsked(A, None, 1, (Held(M, 0, 0, 5),) * 1025), "malformed"),
    (CoverageReported(A, M, (Slice(0, 0, 0),)), "malformed"),
    (CoverageReported(A, M, (Slice(0, 8, 4),)), "malformed"),
    (CoverageReported(A, M, (Slice(0, -1, 4),)), "malformed"),
    (CoverageReported(A, M, (Slice(0, 0, 4), Slice(0, 0, 4))), "malformed"),
    (CoverageReported(A, M, (Slice(0, 0, 4), Slice(0, 2, 6))), "malformed"),
    (CoverageReported(A, M, (Slice(0, 0, 65),)), "malformed"),
    (CoverageReported(A, M, (Slice(2, 0, 4),)), "malformed"),
    (CoverageReported(A, M, (Slice(0, NAN, 4),)), "malformed"),  # type: ignore[arg-type]
    (CoverageReported(A, M, (Slice(0, 0, HUGE),)), "malformed"),
    (CoverageReported(A, M, ((0, 1),)), "malformed"),  # type: ignore[arg-type]
    (CoverageReported(A, M, (5,)), "malformed"),  # type: ignore[arg-type]
    (CoverageReported(A, M, tuple(Slice(0, i, i + 1) for i in range(4097))), "malformed"),
    (CoverageReported(A, M, None), "malformed"),  # type: ignore[arg-type]
    (CoverageReported(A, ModelName("n"), ()), "unknown"),
    (CoverageReported(A, M, (), ClaimId(1)), "foreign"),
    (CoverageReported(A, M, (), ClaimId(77)), "foreign"),
    (CoverageReported(A, M, (), ClaimId(-1)), "malformed"),
    (CoverageReported(A, M, (), None, 1), "malformed"),  # type: ignore[arg-type]
    (RelayOpened(A, Session(-1)), "malformed"),
    (RelayClosed(WorkerId("\0"), Session(1)), "malformed"),
    (ServingReported(CoordinatorId("nobody"), ()), "unknown"),
    (ServingReported(C, None), "malformed"),  # type: ignore[arg-type]
    (ServingReported(C, ((A, 0, 0, 8, Standing.PROVEN, 1, 1),)), "malformed"),  # type: ignore[arg-type]
    (ServingReported(C, (ServedRow(A, 0, 0, 8, "proven", 1, 1),)), "malformed"),  # type: ignore[arg-type]
    (ServingReported(C, (ServedRow(A, 0, 0, 8, Standing.PROVEN, -1, 1),)), "malformed"),
    (ServingReported(C, (ServedRow(A, 0, 0, 8, Standing.PROVEN, 1, -1),)), "malformed"),
    (ServingReported(C, (ServedRow(A, 0, 8, 8, Standing.PROVEN, 1, 1),)), "malformed"),
    (ModelRegistered(M, (0,), 8, 256), "foreign"),
    (ModelRegistered(ModelName("n"), (1, 1), 8, 256), "malformed"),
    (ModelRegistered(ModelName("n"), (0,), 0, 256), "malformed"),
    (ModelRegistered(ModelName("n"), (), 8, 256), "malformed"),
    (ModelRegistered(ModelName("n"), tuple(range(4096)), 257, 256), "malformed"),
    (ModelRegistered(ModelName("n"), tuple(range(4097)), 8, 256), "malformed"),
    (ModelRegistered(ModelName("n"), (0,), 8, 0), "malformed"),
    (CoordinatorAttached(C, ModelName("n")), "unknown"),
    (CoordinatorAttached(C, ModelName("o")), "foreign"),
    (SlotsPolled(PollId(0), 5, 4), "malformed"),
    (SlotsPolled(PollId(0), -1, 4), "malformed"),
    (SlotsPolled(PollId(0), NAN, 4), "malformed"),  # type: ignore[arg-type]
    (SlotsPolled(PollId(0), 1, HUGE), "malformed"),
]


@pytest.mark.parametrize(("event", "code"), HOSTILE, ids=lambda v: type(v).__name__)
def test_law_m8_hostile_input_is_refused_and_changes_nothing(event: object, code: str) -> None:
    world = HubWorld(SwarmPolicy(base=1), busy=4)
    world.send(ModelRegistered(ModelName("o"), (), 0, 1))
    world.run(60)
    world.cover("w", (0, 0, 8))
    assert isinstance(world.volunteer("b", 4), Assign)
    hub = world.hub

    def everything() -> tuple[object, ...]:
        return (
            hub.snapshot(), hub.statistics(), hub.demand(), hub.recruitment(), hub.next_wakeup(),
            hub.dispatch_map(M),
        )  # fmt: skip

    before = everything()
    with pytest.raises(Refused) as refused:
        hub.handle(event, Nanos(world.now + SECOND))  # type: ignore[arg-type]
    assert refused.value.code == code
    assert len(str(refused.value)) < 400
    assert everything() == before
    assert isinstance(world.volunteer("c", 4), Assign)  # And the next one succeeds.


def test_a_poll_never_asked_and_a_foreign_event_are_the_shells_mistakes() -> None:
    world = HubWorld()
    for event in (SlotsPolled(PollId(9), 1, 4), SlotsPollFailed(PollId(-1)), StageReady(0)):
        with pytest.raises(IllegalEvent):
            world.hub.handle(event, Nanos(0))  # type: ignore[arg-type]


def test_law_m9_no_order_carries_an_address_and_none_opens_a_connection() -> None:
    orders = decisions.HubDecision.__args__ + decisions.CoordinatorDecision.__args__
    fields = {name for order in orders for name in order._fields}
    assert not {"address", "host", "port", "url", "ip"} & fields
    assert not [o for o in orders if o.__name__.startswith(("Connect", "Dial", "Open"))]


def test_registering_a_model_again_with_the_same_numbers_changes_nothing() -> None:
    world = HubWorld(SwarmPolicy(base=1), layers=(0,), experts=8)
    world.cover("a", (0, 0, 8))
    world.send(ModelRegistered(M, (0,), 8, 256))
    assert world.segments() == [(0, 8, 1, 0, 0.0)]


def test_demand_can_be_asked_for_one_model() -> None:
    world = HubWorld()
    world.send(ModelRegistered(ModelName("n"), (0,), 8, 256))
    assert [d.model for d in world.hub.demand(ModelName("n")).models] == ["n"]
    assert world.hub.demand(ModelName("gone")).models == ()
    assert not world.hub.demand().recruiting


def test_the_first_wakeup_is_at_once() -> None:
    hub = Hub(SwarmPolicy(), random.Random(1))
    assert hub.next_wakeup() <= SECOND
    hub.handle(TimePassed(), Nanos(5))
    assert hub.next_wakeup() == 5 + SECOND


def test_coordinators_that_read_one_bridges_slots_are_shown_as_one_load() -> None:
    world = HubWorld(layers=(0,), experts=8, busy=3, is_registered=False)
    world.send(ModelRegistered(M, (0,), 8, 256))
    for name, slots_of in (
        ("a/0", "http://a"),
        ("a/1", "http://a"),
        ("b/0", "http://b"),
        ("c", ""),
    ):
        world.send(CoordinatorAttached(CoordinatorId(name), M, slots_of))
    world.run(60)
    assert (world.model().busy, world.model().slots) == (9, 12)
    assert world.model().recruiting
    world.send(CoordinatorGone(CoordinatorId("a/0")))
    assert (world.model().busy, world.model().slots) == (9, 12)
    world.send(CoordinatorGone(CoordinatorId("a/1")))
    assert (world.model().busy, world.model().slots) == (6, 8)
    with pytest.raises(Refused):
        world.send(CoordinatorAttached(CoordinatorId("d"), M, "x\n"))


def test_a_node_waits_from_the_end_of_its_claim_whenever_that_is_noticed() -> None:
    world = HubWorld(patient(), layers=(0,), experts=8)
    assert isinstance(world.volunteer("a", 1), Assign)
    world.now = 181 * SECOND  # The claim ended at 120 s; nothing is offered until 240 s.
    world.send(TimePassed())
    world.now = 240 * SECOND
    assert isinstance(world.volunteer("a", 1), Assign)
