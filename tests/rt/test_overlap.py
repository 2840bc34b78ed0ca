"""A stage that holds several micro-batches: who is begun, who leaves, and where the time goes."""

import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvasir_core.units import Epoch, MicroBatchId, RequestId
from kvasir_core.window import window_for
from kvasir_rt import wire
from kvasir_rt.frames import SPENT, STAMPS
from kvasir_rt.handover import Free, Handover, Outgoing, Quit, QuitCause, Reset, Work
from kvasir_rt.laps import REPORT_LAPS, Flight
from kvasir_rt.overlap import OverlapDesk
from kvasir_rt.overlap_laps import OverlapLapMeter, Stretch, stretches_of
from tests.rt.batches import micro_batch
from tests.rt.rings import plan_of
from tests.rt.swarm.swarms import wait_for

EPOCH = Epoch(0)


class Experts:
    """A call that ends when the test says so."""

    def __init__(self) -> None:
        self.is_done = False
        self.has_work = False
        self.computed = 0
        self._wake: Callable[[], None] = lambda: None

    @property
    def is_due(self) -> bool:
        return self.is_done or self.has_work

    def compute_waiting(self) -> None:
        self.computed += self.has_work
        self.has_work = False

    def on_news(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def end(self) -> None:
        self.is_done = True
        self._wake()

    def give_work(self) -> None:
        self.has_work = True
        self._wake()


class ScriptedRun:
    def __init__(self, calls: list[Experts], delay_s: float) -> None:
        self._calls = list(calls)
        self._delay_s = delay_s

    def advance(self) -> Experts | None:
        time.sleep(self._delay_s)
        return self._calls.pop(0) if self._calls else None

    def finish(self) -> bytes:
        return b"body"


class Stage:
    """A desk in a thread, its handover, and what it did."""

    def __init__(self, overlap: int) -> None:
        self.overlap = overlap
        self.handover = Handover(lambda: None)
        self.calls: dict[int, list[Experts]] = {}
        self.begun: list[int] = []
        self.released: list[int] = []
        self.sent: list[str | int] = []  # Micro-batches and releases.
        self.stretches: list[Stretch] = []
        self.ends: list[int] = []  # When each left.
        self.blocked_ns = 0
        self.delay_s = 0.0  # Of computing.
        self.item: Reset | Quit | None = None
        self._desk = OverlapDesk(self.handover, self, is_tail=False)
        self.thread = threading.Thread(target=self._run, daemon=True)

    def begin(self, lap: wire.Lap, body: memoryview | None) -> ScriptedRun:
        del body
        self.begun.append(lap.micro_batch.id)
        return ScriptedRun(self.calls.get(lap.micro_batch.id, []), self.delay_s)

    def release(self, requests: Iterable[RequestId]) -> None:
        self.released += requests

    def note_blocked(self, blocked_ns: int) -> None:
        self.blocked_ns += blocked_ns

    def _run(self) -> None:
        item = self._desk.next_item()
        assert not isinstance(item, wire.Lap)
        self.item = item  # type: ignore[assignment]

    # What the test does.

    def work(self, id_: int, requests: Iterable[int], *, calls: int = 0) -> list[Experts]:
        """Put a micro-batch with one decode of each request into the input."""
        self.calls[id_] = [Experts() for _ in range(calls)]
        batch = micro_batch([(request, 5) for request in requests])._replace(id=MicroBatchId(id_))
        lap = wire.Lap(batch, b"", False, (), (), 0, composed=id_ + 1)
        self.handover.put(Work(lap, None, 0))  # type: ignore[arg-type]
        return self.calls[id_]

    def free(self, *requests: int) -> None:
        self.handover.put(Free(wire.Release(EPOCH, tuple(map(RequestId, requests)))))

    def take_sent(self) -> list[str | int]:
        """All that was sent so far."""
        for outgoing in self.handover.drain()[0]:
            self._note(outgoing)
        return self.sent

    def _note(self, outgoing: Outgoing) -> None:
        message = wire.decode_edge(outgoing.header)
        if isinstance(message, wire.Lap):
            self.sent.append(message.micro_batch.id)
            self.stretches.append(Stretch(*message.spent[-SPENT:]))
            self.ends.append(message.stamps[-1])
        else:
            assert isinstance(message, wire.Release)
            self.sent.append(f"release {message.requests[0]}")

    def wait_sent(self, *expected: str | int) -> None:
        wait_for(f"{expected} are sent", lambda: self.take_sent() == list(expected), 10)

    def wait_begun(self, *expected: int) -> None:
        wait_for(f"{expected} are begun", lambda: self.begun == list(expected), 10)


@contextmanager
def stage(overlap: int, credit: int | None = None) -> Iterator[Stage]:
    made = Stage(overlap)
    made.handover.begin_epoch(EPOCH)
    assert isinstance(made.handover.take(), Reset)
    made.handover.add_credits(credit)
    made.thread.start()
    try:
        yield made
    finally:
        made.handover.quit(QuitCause.STOPPED, "")
        made.thread.join(10)
        assert not made.thread.is_alive()


def test_another_is_computed_while_one_waits_and_may_overtake_it() -> None:
    with stage(2) as it:
        first = it.work(0, [1], calls=1)[0]
        second = it.work(1, [2], calls=1)[0]
        it.wait_begun(0, 1)
        second.end()
        it.wait_sent(1)
        first.end()
        it.wait_sent(1, 0)


def test_one_that_holds_one_blocks() -> None:
    with stage(1) as it:
        experts = it.work(0, [1], calls=1)[0]
        it.work(1, [2])
        it.wait_begun(0)
        experts.end()
        it.wait_sent(0, 1)


def test_no_more_are_held_than_the_overlap() -> None:
    with stage(2) as it:
        calls = [it.work(id_, [id_], calls=1)[0] for id_ in range(4)]
        it.wait_begun(0, 1)
        calls[1].end()
        it.wait_begun(0, 1, 2)
        calls[0].end()
        it.wait_begun(0, 1, 2, 3)
        calls[3].end()
        calls[2].end()
        wait_for("all are sent", lambda: len(it.take_sent()) == 4, 10)
        assert it.sent[:2] == [1, 0]


def test_a_request_in_hand_holds_up_its_next_rows_and_all_behind_them() -> None:
    with stage(4) as it:
        first = it.work(0, [1, 2], calls=1)[0]
        it.work(1, [2, 3])
        it.work(2, [9])
        it.work(3, [8])
        it.wait_begun(0)
        assert it.take_sent() == []
        first.end()
        it.wait_sent(0, 1, 2, 3)
        assert it.begun == [0, 1, 2, 3]


def test_the_one_that_was_taken_first_goes_on_first() -> None:
    with stage(3, credit=0) as it:
        calls = [it.work(id_, [id_], calls=1)[0] for id_ in range(3)]
        it.wait_begun(0, 1, 2)
        for experts in reversed(calls):
            experts.is_done = True
        it.handover.nudge()
        it.handover.add_credits(3)
        it.wait_sent(0, 1, 2)


def test_a_release_waits_for_what_holds_its_requests_and_for_nothing_else() -> None:
    with stage(2) as it:
        experts = it.work(0, [1], calls=1)[0]
        it.free(1)
        it.free(7)
        it.work(1, [2])
        it.wait_sent("release 7", 1)
        assert it.released == [7]
        experts.end()
        it.wait_sent("release 7", 1, 0, "release 1")
        assert it.released == [7, 1]


def test_while_a_finished_one_waits_for_a_credit_nothing_more_is_begun() -> None:
    with stage(3, credit=0) as it:
        experts = it.work(0, [1], calls=1)[0]
        it.work(1, [2])
        it.wait_begun(0, 1)
        it.work(2, [3])
        it.handover.add_credits(1)
        it.wait_sent(1)
        it.wait_begun(0, 1, 2)
        experts.end()
        it.handover.add_credits(2)
        wait_for("all are sent", lambda: len(it.take_sent()) == 3, 10)


def test_what_falls_to_the_stage_is_computed_before_the_rest_is_there() -> None:
    with stage(2) as it:
        experts = it.work(0, [1], calls=1)[0]
        it.wait_begun(0)
        experts.give_work()
        wait_for("it is computed", lambda: experts.computed == 1, 10)
        assert it.take_sent() == []
        experts.end()
        it.wait_sent(0)


def test_a_slowed_stage_holds_what_it_computes_longer() -> None:
    with stage(1) as it:
        it.handover.slowdown = 3.0
        it.delay_s = 0.02
        it.work(0, [1])
        it.wait_sent(0)
        assert it.stretches[0].computed_ns >= 3 * 0.02 * 1e9


def test_a_new_epoch_drops_what_is_in_hand() -> None:
    with stage(2) as it:
        experts = it.work(0, [1], calls=1)[0]
        it.free(1)
        it.wait_begun(0)
        it.handover.begin_epoch(Epoch(1))
        wait_for("it is told", lambda: it.item, 10)
        assert isinstance(it.item, Reset)
        experts.end()
        assert it.take_sent() == []
        assert it.released == []


def _are_sent(it: Stage, count: int) -> bool:
    return len(it.take_sent()) == count


def test_every_nanosecond_between_two_departures_is_told_once() -> None:
    chance = random.Random(3)
    with stage(3, credit=0) as it:
        for round_ in range(20):
            ids = [3 * round_ + k for k in range(3)]
            calls = [it.work(id_, [id_], calls=2) for id_ in ids]
            it.wait_begun(*range(3 * round_ + 3))
            order = [call for each in calls for call in each]
            chance.shuffle(order)
            for experts in order:
                experts.end()
            it.handover.add_credits(3)
            wait_for("sent", partial(_are_sent, it, 3 * round_ + 3), 10)
    assert [stretch.number for stretch in it.stretches] == list(range(60))
    free = 0
    for stretch, sent in zip(it.stretches, it.ends, strict=True):
        assert free <= stretch.held_from <= sent
        assert 0 <= stretch.busy_ns + stretch.experts_ns <= sent - stretch.held_from
        assert stretch.computed_ns > 0
        free = sent
    assert it.blocked_ns == sum(stretch.experts_ns for stretch in it.stretches) > 0


# ---------------------------------------------------------------------------- the bridge's side


def lap_returned(
    meter: OverlapLapMeter, id_: int, sent: list[int], stretches: list[Stretch], submitted: int = 0
) -> list[tuple[int, str, int, int, int]]:
    batch = micro_batch([(id_, 5)])._replace(id=MicroBatchId(id_))
    stamps = [0] * STAMPS * len(sent)
    for index, at in enumerate(sent):
        stamps[STAMPS * index : STAMPS * (index + 1)] = [at, at, at, at]
    return meter.take(Flight(batch, 0, submitted), max(sent), stamps, stretches)


def test_laps_that_return_out_of_order_are_accounted_in_the_order_of_departure() -> None:
    meter = OverlapLapMeter(plan_of(2), 16)
    one = [Stretch(0, 10, 0, 4, 3, 4, 3), Stretch(1, 60, 0, 5, 0, 5, 0)]
    two = [Stretch(1, 20, 0, 5, 5, 5, 9), Stretch(0, 40, 0, 9, 1, 9, 1)]
    told = lap_returned(meter, 0, [20, 70], one)
    assert {interval[0] for interval in told} == {0}  # Stage 1's earlier departure is not known.
    told = lap_returned(meter, 1, [35, 55], two)
    assert [interval[:4] for interval in told] == [
        (0, "busy", 20, 25), (0, "experts", 25, 30), (0, "credit", 30, 35),
        (1, "busy", 40, 49), (1, "experts", 49, 50), (1, "credit", 50, 55),
        (1, "busy", 60, 65), (1, "experts", 65, 65), (1, "credit", 65, 70),
    ]  # fmt: skip
    stage_0, stage_1 = meter.meters
    assert (stage_0.busy_ns, stage_0.blocked_by_experts_ns, stage_0.elapsed_ns) == (9, 8, 35)
    assert (stage_1.busy_ns, stage_1.blocked_by_experts_ns, stage_1.elapsed_ns) == (14, 1, 70)
    assert stage_0.starved_ns == 10
    assert stage_1.starved_ns == 45


def test_a_lost_departure_leaves_a_gap_and_no_contradiction() -> None:
    meter = OverlapLapMeter(plan_of(2), 16)
    stretches = [Stretch(1, 20, 0, 5, 5, 5, 9), Stretch(0, 40, 0, 9, 1, 9, 1)]
    lap_returned(meter, 1, [35, 55], stretches)
    told = meter.begin_epoch()
    assert next(interval[:4] for interval in told) == (0, "busy", 20, 25)
    lap_returned(meter, 2, [90, 95], [Stretch(0, 80, 0, 10, 0, 10, 0)] * 2)
    assert [each.accounted_until for each in meter.meters] == [90, 95]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_the_order_of_return_the_three_times_are_the_elapsed_time(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 12))
    small = st.integers(0, 9)
    meter = OverlapLapMeter(plan_of(2), 16)
    chains: list[list[tuple[Stretch, int]]] = []
    for _ in range(2):
        at, chain = 0, []
        for number in range(count):
            held_from = at + data.draw(small)
            busy, experts, credit = (data.draw(small) for _ in range(3))
            at = held_from + busy + experts + credit
            chain.append((Stretch(number, held_from, 0, busy, experts, busy, experts), at))
        chains.append(chain)
    orders = [data.draw(st.permutations(range(count))) for _ in range(2)]
    told = []
    for lap in range(count):
        departures = [chains[k][orders[k][lap]] for k in range(2)]
        told += lap_returned(meter, lap, [d[1] for d in departures], [d[0] for d in departures])
    for index, chain in enumerate(chains):
        found = meter.meters[index]
        assert found.busy_ns == sum(stretch.busy_ns for stretch, _ in chain)
        assert found.blocked_by_experts_ns == sum(stretch.experts_ns for stretch, _ in chain)
        assert found.busy_ns + found.blocked_ns + found.starved_ns == chain[-1][1]
        mine = [interval for interval in told if interval[0] == index]
        assert mine == sorted(mine, key=lambda interval: interval[2:4])
        assert (
            sum(stop - start for _, _, start, stop, _ in mine) == found.busy_ns + found.blocked_ns
        )


def test_what_travelled_comes_out_on_the_engines_clock() -> None:
    spent = (0, 1100, 2100, 5, 6, 7, 8, 1, 1300, 2300, 50, 60, 70, 80)
    assert stretches_of(spent, [100, 300], 2000) == [
        Stretch(0, 1000, 100, 5, 6, 7, 8),
        Stretch(1, 1000, 300, 50, 60, 70, 80),
    ]


@pytest.mark.parametrize(
    ("overlap", "parked", "window"),
    [
        (1, 0, 2),  # A plain ring of two stages.
        (1, 400, 2),  # Blocking: each holds its one micro-batch for 500.
        (2, 400, 4),  # Two in each stage's hands,
        (4, 400, 8),
        (16, 400, 10),  # and no more than hide the wait: a lap of 1,000 over a hold of 100.
    ],
)
def test_a_window_grows_with_the_parked_time_as_far_as_the_overlap_uses_it(
    overlap: int, parked: int, window: int
) -> None:
    meter = OverlapLapMeter(plan_of(2), overlap)
    for lap in range(REPORT_LAPS):
        at = 1000 * lap
        stretches = [Stretch(lap, at + 100 * k, 0, 100, 0, 100, parked) for k in range(2)]
        lap_returned(meter, lap, [at, at], stretches, submitted=at)
    measured = meter.measured()
    assert measured is not None
    assert window_for(measured, fillable=100) == window


@pytest.mark.parametrize("length", [1, SPENT - 1, SPENT + 1])
def test_times_of_a_wrong_number_are_refused(length: int) -> None:
    from kvasir_rt import frames
    from kvasir_rt.ring_errors import WireError

    plan = plan_of(2)
    batch = micro_batch([(1, 5)])
    body = plan.hidden * plan.element_bytes
    lap = wire.Lap(batch, b"", False, (), (1, 2, 3, 4), body, spent=(0,) * length)
    with pytest.raises(WireError, match=f"{length} times at stage 1"):
        frames.check_lap(lap, plan, 1)
