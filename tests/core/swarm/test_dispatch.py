"""The truth table of layer 1, and the split of pairs."""

from itertools import product

from hypothesis import assume, given
from hypothesis import strategies as st

from kvasir_core.swarm import SwarmPolicy
from kvasir_core.swarm.dispatch import WHOLE_PAIRS_MAX, Replica, is_wanted, split_pairs
from kvasir_core.swarm.words import Share

POLICY = SwarmPolicy()
IDLE = POLICY.idle_timeout_ns
GRACE = POLICY.grace_ns
AMPLE = 1 << 40


def test_law_d1_the_truth_table_at_its_boundaries() -> None:
    flags = [False, True]
    ages = [None, 0, IDLE - 1, IDLE, IDLE + 1, 10 * IDLE]
    graces = [None, 0, GRACE - 1, GRACE, GRACE + 1, 10 * GRACE]
    rows = 0
    for alive, proven, engaged, trial in product(flags, repeat=4):
        for age, grace in product(ages, graces):
            under_load = proven and (engaged or age in (0, IDLE - 1, IDLE))
            on_trial = not proven and trial and grace in (0, GRACE - 1, GRACE)
            assert is_wanted(
                is_alive=alive, is_proven=proven, is_engaged=engaged,
                engaged_dispatch_age_ns=age, is_trial=trial, grace_age_ns=grace, policy=POLICY,
            ) == (alive and (under_load or on_trial))  # fmt: skip
            rows += 1
    assert rows == 576


counted = st.dictionaries(st.integers(0, 63), st.integers(1, 200), min_size=1).map(
    lambda entries: sorted(entries.items())
)
replica = st.builds(
    lambda begin, size, rate, room: Replica(begin, begin + size, rate, room),
    st.integers(0, 60), st.integers(1, 64), st.integers(1, 10**6),
    st.one_of(st.just(AMPLE), st.integers(1, 300)),
)  # fmt: skip


@given(counted, st.lists(replica, max_size=8))
def test_every_pair_goes_to_exactly_one_place(
    pairs: list[tuple[int, int]], replicas: list[Replica]
) -> None:
    places = split_pairs(pairs, replicas)
    assert len(places) == len(replicas) + 1
    given_out = [
        (expert, index)
        for place in places
        for expert, first, count in place
        for index in range(first, first + count)
    ]
    assert len(given_out) == len(set(given_out))
    assert set(given_out) == {(e, i) for e, count in pairs for i in range(count)}
    for who, place in zip(replicas, places, strict=False):
        assert all(who.begin <= share.expert < who.end and share.pairs > 0 for share in place)
        assert sum(share.pairs for share in place) <= who.pairs_max


@given(counted, st.lists(replica, max_size=8))
def test_a_pair_stays_local_only_where_no_replica_has_room(
    pairs: list[tuple[int, int]], replicas: list[Replica]
) -> None:
    *places, local = split_pairs(pairs, replicas)
    used = [sum(share.pairs for share in place) for place in places]
    for expert, _, _ in local:
        holders = [i for i, r in enumerate(replicas) if r.begin <= expert < r.end]
        assert all(used[i] == replicas[i].pairs_max for i in holders)


@given(counted, st.lists(st.integers(1, 1000), min_size=1, max_size=8))
def test_pairs_are_split_in_proportion_to_rate(
    pairs: list[tuple[int, int]], rates: list[int]
) -> None:
    places = split_pairs(pairs, [Replica(0, 64, rate, AMPLE) for rate in rates])
    total = sum(count for _, count in pairs)
    assert places[-1] == []
    for rate, place in zip(rates, places, strict=False):
        got = sum(share.pairs for share in place)
        assert abs(got - total * rate / sum(rates)) <= WHOLE_PAIRS_MAX + len(rates)


@given(st.integers(1, 8), st.integers(200, 5000), st.integers(1, 64))
def test_law_d8_r_equal_replicas_cut_the_step_to_about_one_in_r(
    replicas: int, total: int, experts: int
) -> None:
    assume(total >= experts)
    pairs = [
        (e, total // experts + (e < total % experts)) for e in range(experts)
    ]  # fmt: skip
    places = split_pairs(pairs, [Replica(0, 64, 1000, AMPLE)] * replicas)
    step = max(sum(share.pairs for share in place) for place in places)
    assert total / replicas <= step <= total / replicas + WHOLE_PAIRS_MAX + replicas


def test_an_expert_of_few_pairs_goes_whole_and_one_of_many_is_cut() -> None:
    both = [Replica(0, 8, 100, AMPLE), Replica(0, 8, 100, AMPLE)]
    assert split_pairs([(0, 3), (1, 3)], both) == [[Share(0, 0, 3)], [Share(1, 0, 3)], []]
    assert split_pairs([(2, 40)], both) == [[Share(2, 0, 20)], [Share(2, 20, 20)], []]


def test_what_exceeds_a_replicas_room_goes_to_the_next_and_then_stays_local() -> None:
    small = [Replica(0, 8, 100, 5), Replica(0, 8, 100, 2)]
    assert split_pairs([(0, 10)], small) == [
        [Share(0, 0, 5)], [Share(0, 5, 2)], [Share(0, 7, 3)],
    ]  # fmt: skip
    assert split_pairs([(9, 4)], small) == [[], [], [Share(9, 0, 4)]]
    uneven = [Replica(0, 8, 100, 25), Replica(0, 8, 100, AMPLE)]
    assert split_pairs([(0, 80)], uneven) == [[Share(0, 0, 25)], [Share(0, 25, 55)], []]
