"""Coordinator and hub together, over a network that loses, doubles, delays and reorders, with
clocks that jump, polls that hang, and workers that lie, stall, crash and reconnect.

A message is a thunk; delivering it may post more. The shells keep just enough to say what must
never happen, as invariants.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import isfinite, nan
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvasir_core.events import TimePassed
from kvasir_core.swarm import Coordinator, Hub, SwarmPolicy
from kvasir_core.swarm.decisions import (
    Accept,
    Acknowledge,
    AdmitRelay,
    Assign,
    ComputeLocally,
    Conclude,
    Decline,
    Disengage,
    Dispatch,
    Engage,
    FetchMap,
    Hedge,
    PollCoordinator,
    PollSlots,
    Quarantine,
    RefuseRelay,
    Report,
    Verify,
)
from kvasir_core.swarm.events import (
    AnswerArrived,
    AnswerChecked,
    AnswerFailed,
    CoordinatorAttached,
    CoverageReported,
    ExpertsRouted,
    Held,
    MapFetched,
    MapFetchFailed,
    ModelRegistered,
    RelayClosed,
    RelayOpened,
    ServingReported,
    SlotsPolled,
    SlotsPollFailed,
    StageMeasured,
    VolunteerAsked,
    WorkerDetached,
)
from kvasir_core.swarm.words import (
    CallId,
    ClaimId,
    CoordinatorId,
    Failure,
    ModelName,
    Session,
    Share,
    Slice,
    WorkerId,
)
from kvasir_core.units import Nanos

SECOND = 1_000_000_000
M = ModelName("m")
C = CoordinatorId("c")
NAMES = ("a", "b", "c", "d")
LAYERS = (0, 1)
EXPERTS = 8
POLICY = SwarmPolicy(
    base=1, slice_experts_max=4, slice_grain=2, answers_checked_first=3,
    tick_ns=Nanos(10 * SECOND), silence_max_ns=Nanos(20 * SECOND),
)  # fmt: skip
REPLIES = (Assign, Decline, Acknowledge, AdmitRelay, RefuseRelay)


class Node:
    """A worker's shell."""

    def __init__(self, name: str) -> None:
        self.name = WorkerId(name)
        self.serves: tuple[Slice, ...] = ()
        self.disk: tuple[Slice, ...] = ()
        self.claim: ClaimId | None = None
        self.dialled: Session | None = None
        self.connection: Session | None = None
        self.is_draining = False
        self.behaviour = "honest"


class Swarm(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self.hub = Hub(POLICY, random.Random(1))
        self.coordinator = Coordinator(POLICY, random.Random(2))
        self.nodes = {name: Node(name) for name in NAMES}
        self.network: list[Callable[[], None]] = []
        self.is_hub_out = False
        self.busy: int | None = 0
        self.calls: dict[int, dict[int, int]] = {}
        self.opened: dict[int, int] = {}  # Ordinary time of calls not concluded.
        self.counted: dict[int, set[tuple[int, int]]] = {}
        self.parts: dict[tuple[int, int], tuple[Share, ...]] = {}
        self.sessions: dict[tuple[int, int, str], int] = {}
        self.shown: set[tuple[str, Slice]] = set()  # A right answer was checked.
        self.slices: dict[tuple[int, int, str], Slice] = {}
        self.engaged = False
        self.engaged_at: dict[str, int] = {}
        self.closed: set[tuple[str, int]] = set()  # Goodbyes that reached the hub.
        self.events = 0

    # Shells.

    def to_hub(self, event: Any) -> None:
        if self.is_hub_out:
            return
        if isinstance(event, RelayClosed):
            self.closed.add((event.worker, event.session))
        decisions = self.hub.handle(event, Nanos(self.now))
        self.check_some()
        if isinstance(event, TimePassed):
            assert not [d for d in decisions if isinstance(d, REPLIES)]  # M9: only who asked.
        for decision in decisions:
            if isinstance(decision, REPLIES):
                who = getattr(decision, "node", None) or decision.worker  # type: ignore[union-attr]
                assert who == getattr(event, "node", None) or getattr(event, "worker", None)
                self.post(lambda d=decision: self.to_node(d))  # type: ignore[misc]
            elif isinstance(decision, PollCoordinator) and self.busy is not None:
                answer = SlotsPolled(decision.poll, self.busy, 4)
                self.post(lambda e=answer: self.to_hub(e))  # type: ignore[misc]

    def check_some(self) -> None:
        """The full checks are O(n): every tenth event, and after every rule."""
        self.events += 1
        if self.events % 10 == 0:
            self.the_cores_are_consistent()

    def to_node(self, decision: Any) -> None:
        node = self.nodes[getattr(decision, "node", None) or decision.worker]
        match decision:
            case Assign():
                overlaps = any(
                    s.layer == decision.slice.layer
                    and s.begin < decision.slice.end
                    and decision.slice.begin < s.end
                    for s in node.serves
                )
                if not overlaps:
                    node.serves = (*node.serves, decision.slice)
                    node.disk = tuple(dict.fromkeys((*node.disk, decision.slice)))
                    node.claim = decision.claim
                    self.heartbeat(node.name)
            case Acknowledge():
                node.serves = tuple(s for s in node.serves if s not in decision.release)
                if decision.session and decision.session not in (node.dialled, node.connection):
                    node.dialled = decision.session
                    opened = RelayOpened(node.name, decision.session)
                    self.post(lambda: self.to_hub(opened))
            case AdmitRelay():
                if decision.session == node.dialled:
                    node.connection = decision.session
            case _:
                pass

    def to_coordinator(self, event: Any) -> None:
        decisions = self.coordinator.handle(event, Nanos(self.now))
        self.check_some()
        if isinstance(event, AnswerChecked) and event.error is not None:
            key = (event.call, event.part, event.worker)
            is_current = self.sessions.get(key) == event.session
            if is_current and isfinite(event.error) and event.error <= POLICY.tolerance:
                self.shown.add((event.worker, self.slices[key]))
        for decision in decisions:
            self.obey(decision, event)

    def obey(self, decision: Any, event: Any) -> None:
        match decision:
            case PollSlots():
                answer: Any = SlotsPollFailed(decision.poll)
                if self.busy is not None:
                    answer = SlotsPolled(decision.poll, self.busy, 4)
                self.post(lambda: self.to_coordinator(answer))
            case FetchMap():
                self.post(lambda: self.fetch_map(decision))
            case Engage():
                self.engaged = True
            case Disengage():
                self.engaged = False
                if decision.why == "blind":
                    self.engaged_at.clear()
            case Dispatch() | Hedge():
                self.dispatched(decision)
            case ComputeLocally():
                self.count(decision.call, decision.shares)
            case Accept():
                assert isinstance(event, AnswerArrived)  # Nothing else can be accepted.
                key = (event.call, event.part, event.worker)
                assert key == (decision.call, decision.part, decision.worker)
                assert event.is_shaped
                assert event.norm_ratio is not None
                assert isfinite(event.norm_ratio)
                assert self.sessions[key] == event.session
                self.count(decision.call, self.parts[decision.call, decision.part])
            case Verify():
                behaviour = self.nodes[decision.worker].behaviour
                error = {"wrong": 0.5, "slightly": 0.02, "nan_error": nan}.get(behaviour, 1e-6)
                checked = AnswerChecked(*decision, error)
                self.post(lambda: self.to_coordinator(checked))
            case Conclude():
                wanted = self.calls[decision.call]
                assert len(self.counted[decision.call]) == sum(wanted.values())
                del self.opened[decision.call]
            case Quarantine():
                self.shown = {entry for entry in self.shown if entry[0] != decision.worker}
            case Report():
                report = ServingReported(C, decision.rows)
                self.post(lambda: self.to_hub(report))
            case _:
                raise AssertionError(decision)

    def dispatched(self, order: Dispatch | Hedge) -> None:
        """A worker gets work: the rules of D1 and D2, from outside."""
        key = (order.call, order.part, order.worker)
        (slice_,) = [
            s for s in self.coordinator.statistics().slices
            if s.worker == order.worker and s.layer == order.layer
            and s.experts[0] <= order.shares[0].expert and order.shares[-1].expert < s.experts[1]
        ]  # fmt: skip
        assert order.session == slice_.session
        self.sessions[key] = order.session
        self.slices[key] = Slice(slice_.layer, *slice_.experts)
        is_trial = isinstance(order, Dispatch) and order.is_trial
        if not is_trial:
            assert (order.worker, self.slices[key]) in self.shown, "never proved itself"
            if self.engaged:
                self.engaged_at[order.worker] = self.now
            else:
                assert self.now - self.engaged_at[order.worker] <= POLICY.idle_timeout_ns
            self.parts[order.call, order.part] = order.shares
        node = self.nodes[order.worker]
        if node.behaviour == "stall" or node.connection != order.session:
            return
        head = (*key, order.session)
        answer: Any = AnswerArrived(*head, node.behaviour != "shape", 1.0)
        if node.behaviour == "nan":
            answer = AnswerArrived(*head, True, nan)
        elif node.behaviour == "error":
            answer = AnswerFailed(*head, Failure.ERROR)
        self.post(lambda: self.to_coordinator(answer))

    def count(self, call: int, shares: tuple[Share, ...]) -> None:
        for expert, first, pairs in shares:
            for index in range(first, first + pairs):
                assert (expert, index) not in self.counted[call], "entered the sum twice"
                assert index < self.calls[call][expert]
                self.counted[call].add((expert, index))

    def fetch_map(self, order: FetchMap) -> None:
        event: Any = MapFetchFailed(order.fetch)
        if not self.is_hub_out:
            event = MapFetched(order.fetch, self.hub.dispatch_map(M))
        self.post(lambda: self.to_coordinator(event))

    def post(self, message: Callable[[], None]) -> None:
        self.network.append(message)

    def sleep_until(self, end: int) -> None:
        """Both shells send TimePassed when they were asked to."""
        while True:
            cores = ((self.hub, self.to_hub), (self.coordinator, self.to_coordinator))
            due = min(max(self.now, core.next_wakeup()) for core, _ in cores)
            if due > end:
                break
            self.now = due
            for core, send in cores:
                if core.next_wakeup() <= due:
                    if core is self.hub and self.is_hub_out:
                        core.handle(TimePassed(), Nanos(self.now))  # Cut off, not stopped.
                    else:
                        send(TimePassed())
        self.now = end

    def deliver_all(self) -> None:
        for _ in range(10_000):
            if not self.network:
                return
            self.network.pop(0)()
        raise AssertionError("messages that never end")

    # Rules.

    @initialize(warm_s=st.sampled_from([0, 80, 80, 80]))
    def begin(self, warm_s: int) -> None:
        self.to_hub(ModelRegistered(M, LAYERS, EXPERTS, 64))
        self.to_hub(CoordinatorAttached(C, M))
        self.to_coordinator(TimePassed())
        self.an_ordinary_while(warm_s, 4)

    @rule(count=st.integers(1, 40))
    def deliver_in_order(self, count: int) -> None:
        for _ in range(min(count, len(self.network))):
            self.network.pop(0)()

    @rule(seconds=st.sampled_from([2, 8, 20, 70]), busy=st.sampled_from([0, 4, 4]))
    def an_ordinary_while(self, seconds: int, busy: int) -> None:
        """Everybody does what they should, and the network works."""
        self.busy = busy
        self.is_hub_out = False
        for second in range(seconds):
            for name in NAMES:
                if second % 15 == 0:
                    self.heartbeat(name)
                if second % 20 == 1:
                    self.volunteer(name, 4)
            self.deliver_all()
            self.route(second % 2, {0: 2, 3: 1, 5: 4})
            self.deliver_all()
            self.sleep_until(self.now + SECOND)
            self.deliver_all()

    @rule()
    def nobody_needs_anything_for_long(self) -> None:
        self.busy = 0
        self.is_hub_out = False
        for _ in range(45):
            for name in NAMES:
                self.heartbeat(name)
            self.deliver_all()
            self.sleep_until(self.now + 15 * SECOND)

    @rule(pick=st.integers(0, 10**6), fate=st.sampled_from(["deliver", "lose", "double"]))
    def deliver_out_of_order(self, pick: int, fate: str) -> None:
        if self.network:
            index = pick % len(self.network)
            message = self.network[index] if fate == "double" else self.network.pop(index)
            if fate != "lose":
                message()

    @rule(seconds=st.sampled_from([0.001, 0.02, 0.5, 2.0, 3.0, 10.0, 31.0, 121.0]))
    def pass_time(self, seconds: float) -> None:
        before = self.now
        self.sleep_until(self.now + round(seconds * SECOND))
        for call, opened in self.opened.items():
            limit = max(opened, before) + POLICY.call_deadline_ns
            assert self.now <= max(limit, before + POLICY.call_deadline_ns), f"call {call} hangs"

    @rule(seconds=st.sampled_from([40, 3600, -7200]))
    def jump(self, seconds: int) -> None:
        lost = self.hub.statistics().workers_lost
        attached = self.coordinator.statistics().workers_attached
        self.now += seconds * SECOND
        self.to_coordinator(TimePassed())
        self.hub.handle(TimePassed(), Nanos(self.now))
        assert self.hub.statistics().workers_lost == lost  # M10.
        assert self.coordinator.statistics().workers_attached == attached
        self.engaged_at = dict.fromkeys(self.engaged_at, self.now)

    @rule(busy=st.sampled_from([0, 1, 2, 4, 4, None]))
    def load(self, busy: int | None) -> None:
        self.busy = busy

    @rule(out=st.sampled_from([False, False, True]))
    def hub_goes_or_comes(self, out: bool) -> None:
        self.is_hub_out = out

    @rule(name=st.sampled_from(NAMES), room=st.integers(1, 9))
    def volunteer(self, name: str, room: int) -> None:
        node = self.nodes[name]
        held = tuple(Held(M, *s) for s in disjoint(node.disk))
        asked = VolunteerAsked(node.name, None, room, held)
        self.post(lambda: self.to_hub(asked))

    @rule(name=st.sampled_from(NAMES))
    def heartbeat(self, name: str) -> None:
        node = self.nodes[name]
        report = CoverageReported(node.name, M, node.serves, node.claim, node.is_draining)
        self.post(lambda: self.to_hub(report))

    @rule(name=st.sampled_from(NAMES), crashes=st.booleans())
    def hang_up(self, name: str, crashes: bool) -> None:
        node = self.nodes[name]
        if node.connection is not None:
            closed = RelayClosed(node.name, node.connection)
            detached = WorkerDetached(node.name, node.connection)
            self.post(lambda: self.to_hub(closed))
            self.post(lambda: self.to_coordinator(detached))
        node.connection = None
        if crashes:
            node.serves = ()
            node.claim = None
            node.is_draining = False

    @rule(name=st.sampled_from(NAMES), draining=st.sampled_from([False, False, True]))
    def drain(self, name: str, draining: bool) -> None:
        self.nodes[name].is_draining = draining

    @rule(
        name=st.sampled_from(NAMES),
        behaviour=st.sampled_from(
            ["honest", "honest", "honest", "stall", "error", "wrong", "slightly", "nan", "nan_error", "shape"]
        ),
    )  # fmt: skip
    def behave(self, name: str, behaviour: str) -> None:
        self.nodes[name].behaviour = behaviour

    @rule(
        layer=st.sampled_from(LAYERS),
        pairs=st.dictionaries(st.integers(0, EXPERTS - 1), st.integers(1, 20), min_size=1),
    )
    def route(self, layer: int, pairs: dict[int, int]) -> None:
        call = len(self.calls) + 1
        self.calls[call] = pairs
        self.counted[call] = set()
        self.opened[call] = self.now
        self.to_coordinator(ExpertsRouted(CallId(call), layer, tuple(sorted(pairs.items()))))

    @rule(name=st.sampled_from(NAMES), seconds=st.sampled_from([0.02, 0.5, 2.0]))
    def stall_in_the_middle(self, name: str, seconds: float) -> None:
        """It takes work and is silent for a while; the others answer."""
        before, self.nodes[name].behaviour = self.nodes[name].behaviour, "stall"
        self.route(0, dict.fromkeys(range(EXPERTS), 1))
        self.pass_time(seconds)
        self.deliver_all()
        self.nodes[name].behaviour = before

    @rule(blocked_s=st.sampled_from([0.0, 0.5]))
    def measure(self, blocked_s: float) -> None:
        blocked = Nanos(round(blocked_s * SECOND))
        self.to_coordinator(StageMeasured(10, Nanos(10_000_000), blocked))

    # What must always be.

    @invariant()
    def the_cores_are_consistent(self) -> None:
        self.hub.check_invariants()
        self.coordinator.check_invariants()

    @invariant()
    def nobody_is_recruited_above_the_target(self) -> None:
        assert self.hub.statistics().recruits_above_target == 0

    @invariant()
    def short_views_say_what_statistics_say(self) -> None:
        assert self.hub.claims_open == self.hub.statistics().claims_open
        shown = [(entry.worker, entry.standing) for entry in self.coordinator.statistics().slices]
        assert list(self.coordinator.standings()) == shown

    @invariant()
    def scarcity_is_a_share_and_zero_exactly_where_enough_is_there(self) -> None:
        for model in self.hub.demand().models:
            assert model.target == POLICY.base + model.recruiting * POLICY.boost
            for layer in model.layers:
                for s in layer.segments:
                    assert 0 <= s.scarcity <= 1
                    assert (s.scarcity == 0) == (s.replicas + s.claimed >= s.target)

    @invariant()
    def an_old_goodbye_cuts_no_new_connection(self) -> None:
        connected = {n.worker: n for n in self.hub.statistics().nodes}
        for node in self.nodes.values():
            known = connected.get(node.name)
            is_current = known is not None and known.session == node.connection
            if is_current and (node.name, node.connection) not in self.closed:
                assert known is not None
                assert known.is_connected

    @invariant()
    def engagement_is_what_was_ordered(self) -> None:
        assert self.engaged == self.coordinator.statistics().is_engaged

    def teardown(self) -> None:
        """Whatever happened: soon every call has ended, with every pair."""
        self.sleep_until(self.now + 3 * SECOND)
        assert not self.opened


def disjoint(slices: tuple[Slice, ...]) -> list[Slice]:
    kept: list[Slice] = []
    for slice_ in sorted(slices):
        if not kept or kept[-1].layer != slice_.layer or kept[-1].end <= slice_.begin:
            kept.append(slice_)
    return kept


TestSwarm = Swarm.TestCase
# A story is long (minutes of a busy swarm), so fewer of them than of small examples.
TestSwarm.settings = settings(
    max_examples=max(20, settings().max_examples // 8), stateful_step_count=25
)
