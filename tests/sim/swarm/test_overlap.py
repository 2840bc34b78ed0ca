"""A stage that holds several micro-batches: same as a plain stage when nothing parks, exact times
by hand when something does, and prompts that never overtake each other.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvasir_core import BindingLimit, Epoch, MicroBatch, MicroBatchId, Plan, RequestId
from kvasir_core.plan import split_evenly
from kvasir_core.window import window_for
from kvasir_sim.links import LinkCost
from kvasir_sim.pipeline import Clock, Flight, Pipeline
from kvasir_sim.swarm.network import after
from kvasir_sim.swarm.overlap import OverlapPipeline, Visit
from kvasir_sim.swarm.shell import OverlapSampler

FREE = LinkCost(latency_ns=0, row_bytes=1, bandwidth_bytes_per_s=None, occupies_sender=False)
Interval = tuple[int, str, int, int]


class Scripted:
    """Experts that are local, or away for a time that the micro-batch and stage decide."""

    def __init__(self, env: Clock, away: dict[tuple[int, int], int]) -> None:
        self._env = env
        self._away = away

    def begin(self, visit: Visit) -> tuple[int, bool]:
        stage = visit.stage.index
        is_local = not self._away.get((visit.flight.batch.id, stage), 0)
        return visit.flight.holds[stage], is_local

    def route(self, visit: Visit) -> None:
        away = self._away[visit.flight.batch.id, visit.stage.index]
        visit.is_concluded = True
        visit.ready_at = self._env.now + away


def batch(number: int, *, prompt: int | None = None) -> MicroBatch:
    """One decode, or one chunk of a request's prompt."""
    request = RequestId(number if prompt is None else prompt)
    decodes = 1 if prompt is None else 0
    return MicroBatch(
        MicroBatchId(number), Epoch(0), (request,), (number,), (1,), decodes, (), 1, 1,
        BindingLimit.NOTHING_WAITING,
    )  # fmt: skip


class World:
    """A ring of stages with an overlap; micro-batches are given at times."""

    def __init__(
        self, stages: int, overlap: int, away: dict[tuple[int, int], int] | None = None,
        credits_: int | None = 2, link: LinkCost = FREE,
    ) -> None:  # fmt: skip
        self.env = Clock()
        self.returned: list[tuple[int, int]] = []
        self.spent: list[Interval] = []
        self.flights: list[Flight] = []
        plan = plan_of(stages, credits_)
        self.pipeline = OverlapPipeline(
            self.env, plan, [link] * stages, 0, self._back,
            experts=Scripted(self.env, away or {}), overlap=overlap,
            on_spent=lambda stage, state, start, stop, _: self.spent.append(
                (stage, state, start, stop)
            ),
        )  # fmt: skip

    def _back(self, flight: Flight, now: int) -> None:
        self.returned.append((flight.batch.id, now))

    def give(self, at: int, one: MicroBatch, holds: Sequence[int]) -> None:
        flight = Flight(one, at, holds)
        self.flights.append(flight)
        after(self.env, at, lambda: self.pipeline.submit(flight))

    def run(self, until: int = 1_000_000) -> None:
        self.env.run(until=until)
        self.pipeline.close(self.env.now)

    def states(self, stage: int) -> list[tuple[str, int, int]]:
        return [(state, start, stop) for s, state, start, stop in self.spent if s == stage]


def plan_of(stages: int, credits_: int | None) -> Plan:
    return Plan(
        layers=split_evenly(stages, stages), row_width=64, micro_batch_width=64, window=64,
        window_max=64, running_max=64, context=4096, kv_tokens=(4096,) * stages, credits=credits_,
    )  # fmt: skip


def test_blocking_waits_with_the_micro_batch_in_hand() -> None:
    world = World(2, overlap=1, away={(0, 0): 30, (1, 0): 30})
    world.give(0, batch(0), [10, 5])
    world.give(0, batch(1), [10, 5])
    world.run()
    assert world.returned == [(0, 45), (1, 85)]
    assert world.states(0) == [
        ("busy", 0, 10), ("experts", 10, 40), ("busy", 40, 50), ("experts", 50, 80),
    ]  # fmt: skip


def test_while_one_is_parked_the_stage_computes_another() -> None:
    world = World(2, overlap=2, away={(0, 0): 30, (1, 0): 30})
    world.give(0, batch(0), [10, 5])
    world.give(0, batch(1), [10, 5])
    world.run()
    assert world.returned == [(0, 45), (1, 55)]
    assert world.states(0) == [("busy", 0, 20), ("experts", 20, 50)]
    assert [flight.parked[0] for flight in world.flights] == [30, 30]
    assert [flight.computed[0] for flight in world.flights] == [10, 10]


def test_results_that_come_while_another_computes_are_no_lost_time() -> None:
    world = World(2, overlap=2, away={(0, 0): 5})
    world.give(0, batch(0), [10, 1])
    world.give(0, batch(1), [40, 1])
    world.run()
    assert world.returned == [(0, 16), (1, 51)], "the first leaves in the middle of the second"
    assert world.states(0) == [("busy", 0, 50)]


def test_a_later_micro_batch_may_overtake_one_that_waits() -> None:
    world = World(2, overlap=2, away={(0, 0): 100})
    world.give(0, batch(0), [10, 1])
    world.give(0, batch(1), [10, 1])
    world.run()
    assert world.returned == [(1, 21), (0, 111)]


def test_chunks_of_one_prompt_never_overtake_each_other() -> None:
    world = World(2, overlap=3, away={(0, 0): 100})
    world.give(0, batch(0, prompt=9), [10, 1])
    world.give(0, batch(1, prompt=9), [10, 1])
    world.give(0, batch(2), [10, 1])
    world.run()
    assert world.returned == [(2, 31), (0, 111), (1, 112)]


def test_all_held_ones_waiting_for_the_next_stage_is_blocked_by_credit() -> None:
    world = World(2, overlap=2, credits_=1, away={(1, 0): 20, (2, 0): 20})
    for number in range(4):
        world.give(0, batch(number), [10, 100])
    world.run()
    # 1 is back at 40 and takes the free slot; 2 is back at 50, when 3 is computed: both wait.
    assert world.states(0) == [
        ("busy", 0, 30), ("experts", 30, 40), ("busy", 40, 50), ("credit", 50, 210),
    ]  # fmt: skip
    assert [at for _, at in world.returned] == [110, 210, 310, 410]


def test_a_lost_epoch_leaves_nothing_in_hand() -> None:
    world = World(2, overlap=2, away={(0, 0): 30, (1, 0): 30})
    world.give(0, batch(0), [10, 5])
    world.give(0, batch(1), [10, 5])
    after(world.env, 15, world.pipeline.clear)
    world.give(60, batch(2), [10, 5])
    world.run()
    assert world.returned == [(2, 75)]
    assert world.states(0) == [("busy", 0, 15), ("busy", 60, 70)]


@pytest.mark.parametrize("overlap", [1, 2, 4, 8])
def test_throughput_is_that_of_one_server_and_so_many_customers(overlap: int) -> None:
    """min(1 / compute, overlap / (compute + away)) a stage."""
    compute, away, count = 10, 50, 400
    world = World(2, overlap, {(number, 0): away for number in range(count)}, credits_=None)
    for number in range(count):
        world.give(0, batch(number), [compute, 1])
    world.run()
    span = world.returned[-1][1]
    expected = count * max(compute, (compute + away) / overlap)
    assert span == pytest.approx(expected, rel=0.02)


holds = st.lists(st.integers(0, 30), min_size=3, max_size=3)
moments = st.lists(st.tuples(st.integers(0, 40), holds), min_size=1, max_size=12)


@given(moments, st.sampled_from([1, 2, None]), st.integers(0, 5), st.integers(1, 4))
def test_without_remote_experts_a_stage_is_a_plain_one_whatever_its_overlap(
    given_: list[tuple[int, list[int]]], credits_: int | None, latency: int, overlap: int
) -> None:
    link = LinkCost(latency, 1, None, occupies_sender=False)
    world = World(3, overlap, credits_=credits_, link=link)
    plain_env = Clock()
    plain = Pipeline(plain_env, plan_of(3, credits_), [link] * 3, 0, lambda _flight, _now: None)
    flights = []
    at = 0
    for number, (gap, times) in enumerate(given_):
        at += gap
        world.give(at, batch(number), times)
        flight = Flight(batch(number), at, times)
        flights.append(flight)
        after(plain_env, at, partial(plain.submit, flight))
    world.run()
    plain_env.run()
    assert [flight.stamps for flight in world.flights] == [flight.stamps for flight in flights]


@given(
    moments,
    st.integers(1, 4),
    st.dictionaries(st.tuples(st.integers(0, 11), st.integers(0, 2)), st.integers(1, 60)),
    st.sets(st.integers(0, 11)),
)
def test_whatever_happens_all_return_and_the_time_is_split_exactly(
    given_: list[tuple[int, list[int]]], overlap: int, away: dict[tuple[int, int], int],
    prompts: set[int],
) -> None:  # fmt: skip
    world = World(3, overlap, away)
    at = 0
    for number, (gap, times) in enumerate(given_):
        at += gap
        world.give(at, batch(number, prompt=99 if number in prompts else None), times)
    world.run()
    order = [number for number, _ in world.returned]
    assert sorted(order) == list(range(len(given_)))
    chunks = [number for number in order if number in prompts]
    assert chunks == sorted(chunks)
    for stage in range(3):
        times_spent = world.states(stage)
        assert all(a[2] <= b[1] for a, b in pairwise(times_spent))
        busy = sum(stop - start for state, start, stop in times_spent if state == "busy")
        assert busy == sum(times[stage] for _, times in given_)
        for flight in world.flights:
            assert flight.parked[stage] >= away.get((flight.batch.id, stage), 0)


def window_of(overlap: int, away: int) -> int:
    """The automatic window after laps of two stages that compute for 10 and wait for `away`."""
    plan = plan_of(2, 2)
    world = World(2, overlap, away={(n, k): away for n in range(40) for k in range(2)})
    sampler = OverlapSampler(plan, 0, overlap)
    windows = []
    for number in range(40):
        world.give(1000 * number, batch(number), [10, 10])
    world.run()
    for flight, (_, at) in zip(world.flights, world.returned, strict=True):
        times = sampler.sample(flight, at)
        if times is not None:
            windows.append(window_for(times, fillable=100))
    assert len(windows) == 2, "every lap counts: one report each 16"
    assert len(set(windows)) == 1
    return windows[0]


@pytest.mark.parametrize(
    ("overlap", "away", "window"),
    [
        (1, 0, 2),  # A plain ring of two stages.
        (1, 90, 2),  # Blocking: each holds its one micro-batch for 100.
        (2, 90, 4),  # Two in each stage's hands,
        (4, 90, 8),
        (16, 90, 20),  # and no more than hide the wait: a lap of 200 over a hold of 10.
    ],
)
def test_the_window_grows_with_the_parked_time_as_far_as_the_overlap_uses_it(
    overlap: int, away: int, window: int
) -> None:
    assert window_of(overlap, away) == window
