"""Laws M1-M4 and M6 on the market, and its agreement with the naive one."""

from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvasir_core.events import TimePassed
from kvasir_core.swarm import SwarmPolicy
from kvasir_core.swarm.coverage import Run, runs_outside
from kvasir_core.swarm.decisions import Assign, Decline, SetTarget
from kvasir_core.swarm.events import CoordinatorAttached, ModelRegistered
from kvasir_core.swarm.market import clip, scarcity
from kvasir_core.swarm.words import CoordinatorId, ModelName, Slice, Standing
from tests.core.swarm.hubs import SECOND, HubWorld, Range, patient
from tests.core.swarm.naive_market import NaiveMarket


@given(st.integers(0, 50), st.integers(0, 20))
def test_law_m1_scarcity_is_a_share_and_zero_exactly_where_enough_is_there(
    supply: int, target: int
) -> None:
    found = scarcity(supply, target)
    assert 0 <= found <= 1
    assert (found == 0) == (supply >= target)
    if target:
        assert found == float(Fraction(max(0, target - supply), target))


@given(st.integers(0, 200), st.integers(1, 300), st.integers(1, 64), st.sampled_from([1, 4, 8]))
def test_a_cut_is_within_run_and_budget_and_ends_on_the_grain_where_it_can(
    begin: int, length: int, budget: int, grain: int
) -> None:
    end = begin + length
    low, high = clip(begin, end, budget, grain)
    assert low == begin < high <= end
    assert high - low <= budget
    assert high == end or high - low > budget // 2 or high % grain == 0
    if high != end and budget >= 2 * grain:
        assert high % grain == 0


def test_the_first_volunteers_of_different_budgets_meet_at_the_same_boundaries() -> None:
    cuts = set()
    for budget in (24, 32, 40, 64):
        begin = 0
        while begin < 256:
            begin = clip(begin, 256, budget, 8)[1]
            cuts.add(begin)
    assert all(cut % 8 == 0 for cut in cuts)


ranges = st.tuples(st.integers(0, 30), st.integers(1, 8)).map(lambda t: (t[0], t[0] + t[1]))


@given(st.lists(ranges), st.lists(st.integers(1, 9), min_size=1))
def test_what_is_left_of_runs_outside_ranges(
    some: list[tuple[int, int]], lengths: list[int]
) -> None:
    outside: list[tuple[int, int]] = []
    for low, high in sorted(some):
        if not outside or low >= outside[-1][1]:
            outside.append((low, high))
    runs, begin = [], 0
    for number, length in enumerate(lengths):
        runs.append(Run(begin, begin + length, number, 0))
        begin += length
    left = runs_outside(runs, outside)
    expected = {
        (e, run.replicas) for run in runs for e in range(run.begin, run.end)
        if not any(low <= e < high for low, high in outside)
    }  # fmt: skip
    found = [(e, run.replicas) for run in left for e in range(run.begin, run.end)]
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_law_m6_demand_is_visible_from_zero_workers() -> None:
    world = HubWorld(layers=(1, 3), experts=8)
    assert [d.layer for d in world.hub.demand().models[0].layers] == [1, 3]
    assert world.segments(1) == [(0, 8, 0, 0, 1.0)]
    idle = HubWorld(SwarmPolicy(base=0), experts=8)
    assert idle.segments(0) == [(0, 8, 0, 0, 0.0)]
    assert isinstance(idle.volunteer("a"), Decline)
    idle.busy = 4
    idle.run(41)
    assert idle.segments(0) == [(0, 8, 0, 0, 1.0)]
    assert isinstance(idle.volunteer("a"), Assign)


def test_a_dense_model_is_never_offered() -> None:
    world = HubWorld(layers=(), experts=0)
    assert world.hub.demand().models[0].layers == ()
    answer = world.volunteer("a", model="m")
    assert isinstance(answer, Decline)
    assert answer.reason == "no demand"


def test_a_model_that_nobody_serves_has_no_demand() -> None:
    world = HubWorld(is_registered=False)
    world.send(ModelRegistered(ModelName("m"), (0,), 8, 256))
    assert world.model().reason == "no coordinator"
    assert world.segments() == [(0, 8, 0, 0, 0.0)]


@given(st.lists(st.integers(1, 70), min_size=1, max_size=60), st.integers(0, 3))
def test_law_m3_simultaneous_volunteers_get_disjoint_slices_until_the_target_is_met(
    budgets: list[int], base: int
) -> None:
    world = HubWorld(SwarmPolicy(base=base), experts=70)
    supply: dict[tuple[int, int], int] = {(x, e): 0 for x in (0, 1) for e in range(70)}
    for number, budget in enumerate(budgets):
        answer = world.volunteer(f"n{number}", budget)
        if isinstance(answer, Decline):
            assert min(supply.values()) >= base
            continue
        layer, begin, end = answer.slice
        least = min(supply.values())
        for expert in range(begin, end):
            assert supply[layer, expert] == least < base  # Disjoint until each is served so often.
            supply[layer, expert] += 1
    assert world.hub.statistics().recruits_above_target == 0


def test_law_m3_a_lapsed_claim_returns_at_exactly_its_ttl() -> None:
    world = HubWorld(SwarmPolicy(base=1), layers=(0,), experts=8)
    assert isinstance(world.volunteer("a"), Assign)
    granted = world.now
    world.run_until(119.999_999_999)
    assert isinstance(world.volunteer("b"), Decline)
    assert world.segments() == [(0, 8, 0, 1, 0.0)]
    world.now = granted + world.policy.claim_ttl_ns
    assert isinstance(world.volunteer("b"), Assign)
    assert world.hub.statistics().claims_lapsed == 1


@given(st.lists(st.integers(1, 64), min_size=1, max_size=30), st.integers(1, 3), st.booleans())
def test_law_m4_greedy_volunteers_of_any_budget_reach_the_target_in_bounded_steps(
    budgets: list[int], base: int, saturated: bool
) -> None:
    world = HubWorld(patient(base=base), layers=(0, 4, 7), experts=32, busy=4 if saturated else 0)
    for _ in range(5):
        world.now += 10 * SECOND
        world.send(TimePassed())
        world.run(0)
    steps = 0
    deficit = 3 * 32 * world.model().effective_target
    while True:
        answer = world.volunteer(f"n{steps}", budgets[steps % len(budgets)])
        if isinstance(answer, Decline):
            break
        world.cover(f"n{steps}", answer.slice, claim=answer.claim)
        steps += 1
        assert steps <= deficit
    for layer in (0, 4, 7):
        assert all(s[2] == world.model().effective_target for s in world.segments(layer))


def test_a_slice_on_disk_comes_before_the_scarcest_and_is_clipped_to_what_is_scarce() -> None:
    world = HubWorld(SwarmPolicy(base=1), layers=(0, 1), experts=32)
    world.cover("x", (1, 0, 8))
    answer = world.volunteer("a", 64, (1, 4, 20))
    assert isinstance(answer, Assign)
    assert answer.slice == (1, 8, 20)
    assert (answer.scarcity, answer.replicas, answer.target) == (1.0, 0, 1)
    answer = world.volunteer("b", 4, (1, 22, 32))
    assert isinstance(answer, Assign)
    assert answer.slice == (1, 22, 24)
    cold = HubWorld(SwarmPolicy(base=1, prefers_held=False), layers=(0, 1), experts=32)
    answer = cold.volunteer("a", 64, (1, 4, 20))
    assert isinstance(answer, Assign)
    assert answer.slice == (0, 0, 32)


def test_a_slice_on_disk_that_nobody_needs_is_not_offered() -> None:
    world = HubWorld(SwarmPolicy(base=1), layers=(0, 1), experts=32)
    world.cover("x", (1, 0, 32))
    answer = world.volunteer("a", 64, (1, 4, 20))
    assert isinstance(answer, Assign)
    assert answer.slice == (0, 0, 32)


def test_a_worker_is_never_offered_what_it_serves() -> None:
    world = HubWorld(SwarmPolicy(base=2), layers=(0,), experts=32)
    world.cover("a", (0, 8, 16))
    answer = world.volunteer("a", 64, (0, 4, 20))
    assert isinstance(answer, Assign)
    assert answer.slice in ((0, 4, 8), (0, 16, 20))
    world.cover("a", (0, 0, 32))
    assert isinstance(world.volunteer("a", 64, (0, 4, 20)), Decline)


def test_the_scarcest_model_is_served_first_and_a_recruiting_one_in_a_tie() -> None:
    world = HubWorld(SwarmPolicy(base=1), layers=(0,), experts=8)
    world.send(ModelRegistered(ModelName("n"), (0,), 8, 256))
    world.send(CoordinatorAttached(CoordinatorId("d"), ModelName("n")))
    first = world.volunteer("a", 4)
    assert isinstance(first, Assign)
    assert first.model == "m"
    only = world.volunteer("b", 8, model="n")
    assert isinstance(only, Assign)
    assert only.model == "n"
    world.cover("b", only.slice, model="n")
    world.cover("c", (0, 0, 8))
    world.busy = 4
    world.run(60)  # Both recruit: target 2, replicas 1 and 1.
    bound = world.volunteer("b")
    assert isinstance(bound, Decline)  # Serves n already; a node serves one model.
    held = world.volunteer("e", 8)
    assert isinstance(held, Assign)
    assert held.model == "m"


def test_naive_markets_ignore_claims_and_recruit_above_the_target() -> None:
    world = HubWorld(SwarmPolicy(base=1, counts_claims=False), layers=(0,), experts=8)
    for number in range(25):
        assert isinstance(world.volunteer(f"n{number}"), Assign)
    assert world.hub.statistics().recruits_above_target == 24


NODES = ("a", "b", "c", "d", "e")
slices = st.tuples(st.sampled_from([0, 2, 5]), st.integers(0, 11), st.integers(1, 12)).map(
    lambda t: (t[0], t[1], min(12, t[1] + t[2]))
)


def disjoint(some: list[Range]) -> tuple[Range, ...]:
    kept: list[Range] = []
    for layer, begin, end in sorted(some):
        if not kept or kept[-1][0] != layer or kept[-1][2] <= begin:
            kept.append((layer, begin, end))
    return tuple(kept)


class MarketAgreement(RuleBasedStateMachine):
    """The hub and the naive market, given the same story, show and decide the same."""

    def __init__(self) -> None:
        super().__init__()
        policy = patient(slice_experts_max=5, slice_grain=4, idle_exit_ns=10**15)
        self.world = HubWorld(policy, layers=(0, 2, 5), experts=12)
        self.naive = NaiveMarket(
            (0, 2, 5), 12, 5, 4, policy.claim_ttl_ns, policy.coverage_ttl_ns
        )  # fmt: skip
        self.assigned: dict[str, Range] = {}

    def step(self) -> None:
        self.naive.pass_time(self.world.now)
        self.naive.target = self.world.model().effective_target

    @rule(node=st.sampled_from(NODES), budget=st.integers(1, 14), held=st.lists(slices, max_size=3))
    def volunteer(self, node: str, budget: int, held: list[Range]) -> None:
        self.step()
        holds = disjoint(held)
        expected = self.naive.volunteer(node, budget, holds, self.world.now)
        answer = self.world.volunteer(node, budget, *holds)
        if isinstance(answer, Assign):
            assert not isinstance(expected, str)
            granted = self.world.now + answer.lease - self.world.policy.claim_ttl_ns
            assert (answer.slice, granted) == expected
            self.assigned[node] = answer.slice
        else:
            assert answer.reason == expected

    @rule(node=st.sampled_from(NODES), extra=st.lists(slices, max_size=2), draining=st.booleans())
    def cover(self, node: str, extra: list[Range], draining: bool) -> None:
        self.step()
        segments = disjoint([*extra, *([self.assigned[node]] if node in self.assigned else [])])
        self.naive.report(node, segments, self.world.now, draining=draining)
        self.world.cover(node, *segments, draining=draining)

    @rule(node=st.sampled_from(NODES))
    def repeat(self, node: str) -> None:
        self.step()
        if node in self.naive.coverage:
            segments = self.naive.coverage[node][0]
            draining = node in self.naive.draining
            self.naive.report(node, segments, self.world.now, draining=draining)
            self.world.cover(node, *segments, draining=draining)

    @rule(node=st.sampled_from(NODES), bad=st.booleans(), pick=st.integers(0, 3))
    def judge(self, node: str, bad: bool, pick: int) -> None:
        self.step()
        segments = self.naive.coverage.get(node, ((), 0))[0]
        if segments:
            chosen = segments[pick % len(segments)]
            (self.naive.doubted.add if bad else self.naive.doubted.discard)((node, chosen))
            self.world.serve(node, chosen, Standing.SUSPECT if bad else Standing.PROVEN)

    @rule(seconds=st.sampled_from([0.5, 10, 59, 60, 120, 121]))
    def wait(self, seconds: float) -> None:
        self.world.now += round(seconds * SECOND)
        self.world.send(TimePassed())

    @rule(busy=st.sampled_from([0, 4]))
    def load(self, busy: int) -> None:
        self.world.busy = busy

    @invariant()
    def they_show_the_same(self) -> None:
        self.step()
        shown = {layer: list(self.world.segments(layer)) for layer in (0, 2, 5)}
        assert shown == self.naive.demand()
        claims = self.world.hub.snapshot().claims
        assert {(c.node, Slice(c.layer, c.begin, c.end)) for c in claims} == {
            (node, Slice(*found)) for node, (found, _) in self.naive.claims.items()
        }


TestMarketAgreement = MarketAgreement.TestCase
TestMarketAgreement.settings = settings(max_examples=max(20, settings().max_examples // 3))


def test_the_target_jumps_and_each_change_is_on_record() -> None:
    world = HubWorld(SwarmPolicy(base=2, boost=5))
    world.busy = 4
    world.run(100)
    world.busy = 0
    world.run(500)
    changes = [d.target for _, _, ds in world.log for d in ds if isinstance(d, SetTarget)]
    assert changes == [2, 7, 2]
