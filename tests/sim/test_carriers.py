"""Two ways to carry a micro-batch round the ring: event by event, and in closed form.

`Pipeline` (needed for faults) and `Conveyor` (one event a lap) must give the same times to the
nanosecond; what those times are is written out by hand in the stories.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import BindingLimit, Epoch, MicroBatch, MicroBatchId, Plan, RequestId
from kvasir_core.plan import split_evenly
from kvasir_sim.conveyor import Conveyor
from kvasir_sim.links import LinkCost
from kvasir_sim.pipeline import Clock, Flight, Pipeline, Recurring

FREE = LinkCost(latency_ns=0, row_bytes=1, bandwidth_bytes_per_s=None, occupies_sender=False)
GIGABYTE_PER_S = 1e9  # A byte a nanosecond.

Carrier = type[Pipeline] | type[Conveyor]
both = pytest.mark.parametrize("carrier", [Pipeline, Conveyor])


def link(latency_ns: int = 0, *, byte_ns: int = 0, occupies: bool = False) -> LinkCost:
    """A hop whose rows of one byte take `byte_ns` each; 0: bytes are free."""
    return LinkCost(latency_ns, 1, GIGABYTE_PER_S / byte_ns if byte_ns else None, occupies)


@dataclass(frozen=True, slots=True)
class Load:
    """One micro-batch: rows in all, output rows among them, and its hold on each stage."""

    rows: int
    outputs: int
    holds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Course:
    """A ring and what is submitted to it: `loads[i]` becomes possible at `ready_ns[i]`."""

    links: tuple[LinkCost, ...]
    credits_: int | None
    window: int
    turnaround_ns: int
    loads: tuple[Load, ...]
    ready_ns: tuple[int, ...]


class Rig:
    """Keeps a carrier's window full with the loads that are ready; notes when each is back."""

    def __init__(self, carrier: Carrier, course: Course) -> None:
        self.env = Clock()
        self.flights: list[Flight] = []
        self.back: list[tuple[int, int]] = []  # (micro-batch, time), as they return.
        self._course = course
        self._ready = self._open = 0
        self.carrier = carrier(
            self.env, plan(course), list(course.links), course.turnaround_ns, self._returned
        )
        for time in course.ready_ns:
            Recurring(self.env, self._became_ready).again(time)

    def _became_ready(self, _: simpy.Event) -> None:
        self._ready += 1
        self._fill()

    def _returned(self, flight: Flight, now: int) -> None:
        assert now == self.env.now
        self.back.append((flight.batch.id, now))
        self._open -= 1
        self._fill()

    def _fill(self) -> None:
        while self._open < self._course.window and len(self.flights) < self._ready:
            load = self._course.loads[len(self.flights)]
            flight = Flight(batch(len(self.flights), load), self.env.now, load.holds)
            self.flights.append(flight)
            self._open += 1
            self.carrier.submit(flight)

    def stamps(self) -> list[list[int]]:
        """Of every flight, what had happened by now."""
        now = self.env.now
        return [[stamp for stamp in flight.stamps if stamp <= now] for flight in self.flights]


def plan(course: Course) -> Plan:
    stages = len(course.links)
    return Plan(
        layers=split_evenly(stages, stages), row_width=64, micro_batch_width=64,
        window=course.window, window_max=course.window, running_max=64, context=64,
        kv_tokens=(1024,) * stages, credits=course.credits_,
    )  # fmt: skip


def batch(number: int, load: Load) -> MicroBatch:
    """Decodes for the output rows, and one unfinished prompt chunk for the others."""
    chunk = load.rows - load.outputs
    rows = (1,) * load.outputs + ((chunk,) if chunk else ())
    return MicroBatch(
        id=MicroBatchId(number), epoch=Epoch(0),
        requests=tuple(RequestId(index) for index in range(len(rows))), starts=(0,) * len(rows),
        rows=rows, decodes=load.outputs, completing=(), row_count=load.rows,
        decode_context=load.outputs, binding=BindingLimit.NOTHING_WAITING,
    )  # fmt: skip


def run(
    carrier: Carrier,
    links: Sequence[LinkCost],
    holds: Sequence[tuple[int, ...]],
    *,
    credits_: int | None = None,
    turnaround_ns: int = 0,
    rows: int = 1,
) -> tuple[list[list[int]], list[int]]:
    """Submit micro-batches with these holds at time 0; returns their stamps and return times."""
    loads = tuple(Load(rows, 1, hold) for hold in holds)
    course = Course(
        tuple(links), credits_, len(loads), turnaround_ns, loads, ready_ns=(0,) * len(loads)
    )
    rig = Rig(carrier, course)
    rig.env.run()
    return rig.stamps(), [time for _, time in rig.back]


# ---------------------------------------------------------------------- stories


@both
def test_stages_of_a_free_ring_work_at_the_same_time(carrier: Carrier) -> None:
    stamps, back = run(carrier, [FREE, FREE], [(3, 5), (3, 5)])
    assert stamps == [[0, 0, 3, 3, 3, 3, 8, 8], [0, 3, 6, 6, 6, 8, 13, 13]]
    assert back == [8, 13]


@both
def test_without_a_credit_downstream_a_stage_is_blocked_with_its_micro_batch(
    carrier: Carrier,
) -> None:
    stamps, back = run(carrier, [FREE, FREE], [(1, 10)] * 4, credits_=1)
    head = [stamp[:4] for stamp in stamps]
    assert head[0] == [0, 0, 1, 1]
    assert head[1] == [0, 1, 2, 2], "the first was started at 1: its slot is free"
    assert head[2] == [0, 2, 3, 11], "the slot is taken until the second is started at 11"
    assert head[3] == [0, 11, 12, 21], "blocked, the head could not even start it"
    assert back == [11, 21, 31, 41]


@both
def test_with_one_more_credit_the_stage_is_blocked_one_micro_batch_later(carrier: Carrier) -> None:
    stamps, _ = run(carrier, [FREE, FREE], [(1, 10)] * 4, credits_=2)
    assert [stamp[3] for stamp in stamps] == [1, 2, 3, 11]


@both
def test_an_unbounded_input_never_blocks(carrier: Carrier) -> None:
    stamps, _ = run(carrier, [FREE, FREE], [(1, 10)] * 4)
    assert [stamp[3] for stamp in stamps] == [1, 2, 3, 4]


@both
def test_a_credit_is_taken_when_sent_not_when_received(carrier: Carrier) -> None:
    stamps, _ = run(carrier, [link(100), FREE], [(1, 1)] * 2, credits_=1)
    assert [stamp[3] for stamp in stamps] == [1, 101], "on its way the first holds the slot"


@both
def test_latency_is_shared_by_any_number_of_messages(carrier: Carrier) -> None:
    stamps, _ = run(carrier, [link(100), FREE], [(1, 0)] * 3)
    assert [stamp[4] for stamp in stamps] == [101, 102, 103]


@both
def test_bytes_follow_each_other_on_a_link(carrier: Carrier) -> None:
    stamps, _ = run(carrier, [link(100, byte_ns=2), FREE], [(1, 0)] * 3, rows=5)
    assert [stamp[3] for stamp in stamps] == [1, 2, 3], "the stage need not wait for them"
    assert [stamp[4] for stamp in stamps] == [111, 121, 131]


@both
def test_a_link_that_occupies_its_sender_is_part_of_the_hold(carrier: Carrier) -> None:
    stamps, _ = run(carrier, [link(100, byte_ns=2, occupies=True), FREE], [(1, 0)] * 2, rows=5)
    assert [stamp[1:5] for stamp in stamps] == [[0, 11, 11, 111], [11, 22, 22, 122]]


@both
def test_the_return_link_carries_output_rows_only_and_the_turnaround_follows(
    carrier: Carrier,
) -> None:
    _, back = run(carrier, [FREE, link(7, byte_ns=10)], [(1, 1)], rows=5, turnaround_ns=1000)
    assert back == [2 + 1 * 10 + 7 + 1000]


def test_what_was_in_the_ring_when_it_was_cleared_never_arrives() -> None:
    env = Clock()
    back: list[tuple[int, int]] = []
    load = Load(1, 1, (4, 4))
    course = Course((link(10), link(10)), 1, 2, 0, (load, load, load), (0, 0, 5))
    carrier = Pipeline(
        env, plan(course), list(course.links), 0,
        lambda flight, now: back.append((flight.batch.id, now)),
    )  # fmt: skip
    for number in (0, 1):
        carrier.submit(Flight(batch(number, load), 0, load.holds))
    env.run(until=5)  # One is on the link, one in the head's hands.
    carrier.clear()
    carrier.submit(Flight(batch(2, load), 5, load.holds))
    env.run()
    assert back == [(2, 5 + 4 + 10 + 4 + 10)]


def test_a_message_sent_after_a_delay_ended_does_not_overtake() -> None:
    loads = (Load(1, 1, (1, 0)),) * 2
    rig = Rig(Pipeline, Course((link(10), FREE), None, 2, 0, loads, (0, 0)))
    assert isinstance(rig.carrier, Pipeline)
    env, hop = rig.env, rig.carrier.links[0]
    hop.delay_ns = 100
    env.run(until=2)  # The first was sent at 1 and is due at 111.
    hop.delay_ns = 0
    env.run()
    assert [flight.stamps[3:5] for flight in rig.flights] == [[1, 111], [2, 111]]
    assert [id_ for id_, _ in rig.back] == [0, 1]


def test_a_slow_stage_and_a_slow_link_take_so_many_times_as_long() -> None:
    loads = (Load(4, 1, (10, 10)),)
    rig = Rig(Pipeline, Course((link(10, byte_ns=3), FREE), None, 1, 0, loads, (0,)))
    assert isinstance(rig.carrier, Pipeline)
    rig.carrier.stages[0].slower = 1.5
    rig.carrier.links[0].slower = 2.0
    rig.env.run()
    assert rig.flights[0].stamps == [0, 0, 15, 15, 15 + 2 * (12 + 10), 59, 69, 69]


# ---------------------------------------------------------------------- both are the same

few_ns = st.integers(0, 12)


@st.composite
def courses(draw: st.DrawFn) -> Course:
    """Rings with small numbers, so that things often happen at the same time."""
    stages = draw(st.integers(2, 5))
    hop = st.builds(link, few_ns, byte_ns=st.integers(0, 2), occupies=st.booleans())
    links = st.tuples(*[hop] * stages) | st.just((FREE,) * stages)
    load = st.integers(1, 6).flatmap(
        lambda rows: st.builds(
            Load, st.just(rows), st.integers(0, rows), st.tuples(*[few_ns] * stages)
        )
    )
    loads = draw(st.lists(load, min_size=1, max_size=14))
    ready = st.lists(st.integers(0, 60), min_size=len(loads), max_size=len(loads))
    return Course(
        links=draw(links),
        credits_=draw(st.none() | st.integers(1, 3)),
        window=draw(st.integers(1, 7)),
        turnaround_ns=draw(st.just(0) | few_ns),
        loads=tuple(loads),
        ready_ns=tuple(sorted(draw(ready))),
    )


@given(courses())
def test_the_closed_form_gives_the_times_of_the_events(course: Course) -> None:
    events, closed = Rig(Pipeline, course), Rig(Conveyor, course)
    for rig in (events, closed):
        rig.env.run()
        assert len(rig.back) == len(course.loads), "a micro-batch did not come back"
    assert closed.stamps() == events.stamps()
    assert closed.back == events.back
    assert [id_ for id_, _ in events.back] == list(range(len(course.loads)))
    assert closed.carrier.link_busy_ns == events.carrier.link_busy_ns
    assert closed.carrier.latency_ns == events.carrier.latency_ns


@given(courses(), st.integers(0, 120))
def test_at_any_moment_the_same_has_happened_in_both(course: Course, moment: int) -> None:
    events, closed = Rig(Pipeline, course), Rig(Conveyor, course)
    for rig in (events, closed):
        rig.env.run(until=moment + 1)
    by_then = [
        [[stamp for stamp in stamps if stamp <= moment] for stamps in rig.stamps()]
        for rig in (events, closed)
    ]
    assert by_then[0] == by_then[1]
    assert closed.back == events.back
