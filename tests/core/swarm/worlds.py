"""A scripted shell for a coordinator: virtual time, workers that behave as told, and a sum that
fails the test when any pair enters it twice or never."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvasir_core.events import TimePassed
from kvasir_core.swarm import Coordinator, SwarmPolicy
from kvasir_core.swarm.decisions import (
    Accept,
    ComputeLocally,
    Conclude,
    CoordinatorDecision,
    Dispatch,
    FetchMap,
    Hedge,
    PollSlots,
    Verify,
)
from kvasir_core.swarm.events import (
    AnswerArrived,
    AnswerChecked,
    AnswerFailed,
    CoordinatorEvent,
    ExpertsRouted,
    MapFetched,
    MapFetchFailed,
    MapRow,
    SlotsPolled,
    SlotsPollFailed,
    WorkerAttached,
    WorkerDetached,
)
from kvasir_core.swarm.statistics import SliceStatistics
from kvasir_core.swarm.words import CallId, Failure, Session, Share, Slice, WorkerId
from kvasir_core.units import Nanos

SECOND = 1_000_000_000
MS = 1_000_000


def seconds(value: float) -> int:
    return round(value * SECOND)


@dataclass
class FakeWorker:
    """What it does with a dispatch, read at the time of the dispatch."""

    latency_s: float | None = 0.01  # None = it never answers.
    per_pair_s: float = 0.0
    is_shaped: bool = True
    norm_ratio: float | None = 1.0
    error: float | None = 1e-6  # What recomputing its answers finds.
    failure: Failure | None = None
    copies: int = 1


@dataclass
class Sum:
    """One call's pairs, and what entered."""

    wanted: dict[int, int]
    opened_at: int
    counted: set[tuple[int, int]] = field(default_factory=set)
    local_pairs: int = 0
    remote_pairs: int = 0
    ended_at: int | None = None

    def add(self, shares: Iterable[Share], *, is_local: bool) -> None:
        for expert, first, pairs in shares:
            for index in range(first, first + pairs):
                assert index < self.wanted[expert]
                assert (expert, index) not in self.counted, "a pair entered the sum twice"
                self.counted.add((expert, index))
            if is_local:
                self.local_pairs += pairs
            else:
                self.remote_pairs += pairs


class World:
    """Drives one coordinator."""

    def __init__(
        self, policy: SwarmPolicy | None = None, *, seed: int = 1, busy: int | None = 0
    ) -> None:
        self.policy = policy or SwarmPolicy()
        self.coordinator = Coordinator(self.policy, random.Random(seed))
        self.now = 0
        self.busy = busy  # None = the poll hangs.
        self.poll_delay_s = 0.001
        self.poll_fails = False
        self.map: Callable[[], tuple[MapRow, ...] | None] = lambda: None  # None = hub is out.
        self.workers: dict[str, FakeWorker] = {}
        self.log: list[tuple[CoordinatorEvent, int, list[CoordinatorDecision]]] = []
        self.sums: dict[int, Sum] = {}
        self.parts: dict[tuple[int, int], tuple[Share, ...]] = {}
        self.dispatched: list[tuple[int, Dispatch | Hedge]] = []
        self._queue: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0
        self._call = 0

    # What a test does.

    def attach(self, worker: str, *slices: tuple[int, int, int], session: int = 1) -> None:
        self.workers.setdefault(worker, FakeWorker())
        wanted = tuple(Slice(*s) for s in slices)
        self.send(WorkerAttached(WorkerId(worker), Session(session), wanted))

    def detach(self, worker: str, session: int = 1) -> None:
        self.send(WorkerDetached(WorkerId(worker), Session(session)))

    def route(self, pairs: Sequence[tuple[int, int]], layer: int = 0) -> list[CoordinatorDecision]:
        self._call += 1
        self.sums[self._call] = Sum(dict(pairs), self.now)
        return self.send(ExpertsRouted(CallId(self._call), layer, tuple(pairs)))

    def run(self, duration_s: float) -> None:
        self.run_until(self.now + seconds(duration_s))

    def run_until(self, end: int) -> None:
        while True:
            due = max(self.now, self.coordinator.next_wakeup())
            if self._queue and self._queue[0][0] <= min(due, end):
                self.now, _, action = heapq.heappop(self._queue)
                action()
            elif due <= end:
                self.now = due
                self.send(TimePassed())
            else:
                self.now = end
                return

    def every(self, period_s: float, action: Callable[[], Any], until_s: float) -> None:
        """Do this again and again from now on, up to a time."""

        def again() -> None:
            action()
            if self.now + seconds(period_s) <= seconds(until_s):
                self.after(period_s, again)

        self.after(0, again)

    def after(self, delay_s: float, action: Callable[[], Any]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + seconds(delay_s), self._sequence, action))

    def send(self, event: CoordinatorEvent) -> list[CoordinatorDecision]:
        decisions = self.coordinator.handle(event, Nanos(self.now))
        self.coordinator.check_invariants()
        self.log.append((event, self.now, decisions))
        for decision in decisions:
            self._obey(decision)
        return decisions

    # What a test asks.

    def slice_of(self, worker: str) -> SliceStatistics:
        found = [s for s in self.coordinator.statistics().slices if s.worker == worker]
        assert len(found) == 1
        return found[0]

    def dispatches_to(
        self, worker: str, since: int = 0, *, trials: bool = True
    ) -> list[tuple[int, Dispatch | Hedge]]:
        return [
            (at, order)
            for at, order in self.dispatched
            if order.worker == worker
            and at >= since
            and (trials or not (isinstance(order, Dispatch) and order.is_trial))
        ]

    def prove(self, worker: str, slice_: tuple[int, int, int]) -> None:
        """Attach it and let it pass its trial."""
        self.attach(worker, slice_)
        self.route([(slice_[1], 1)], slice_[0])
        self.run(0.5)
        assert self.slice_of(worker).last_serve_ms > 0

    def check_sums(self) -> None:
        """Every call that was concluded has every pair exactly once; none is left open."""
        for number, entry in self.sums.items():
            assert entry.ended_at is not None, f"call {number} never ended"
            assert len(entry.counted) == sum(entry.wanted.values())

    # The shell's work.

    def _obey(self, decision: CoordinatorDecision) -> None:
        match decision:
            case PollSlots():
                self._answer_poll(decision)
            case FetchMap():
                rows = self.map()
                event = MapFetchFailed(decision.fetch) if rows is None else MapFetched(
                    decision.fetch, rows
                )  # fmt: skip
                self.after(0.001, lambda: self.send(event))
            case Dispatch() | Hedge():
                self.dispatched.append((self.now, decision))
                is_trial = isinstance(decision, Dispatch) and decision.is_trial
                if not is_trial:
                    before = self.parts.setdefault((decision.call, decision.part), decision.shares)
                    assert before == decision.shares
                self._serve(decision)
            case ComputeLocally():
                expected = self.parts.get((decision.call, decision.part), decision.shares)
                assert expected == decision.shares
                self.sums[decision.call].add(decision.shares, is_local=True)
            case Accept():
                shares = self.parts[decision.call, decision.part]
                self.sums[decision.call].add(shares, is_local=False)
            case Verify():
                error = self.workers[decision.worker].error
                checked = AnswerChecked(*decision, error)
                self.after(0.002, lambda: self.send(checked))
            case Conclude():
                entry = self.sums[decision.call]
                assert entry.ended_at is None
                entry.ended_at = self.now
                assert len(entry.counted) == sum(entry.wanted.values())
            case _:
                pass

    def _answer_poll(self, order: PollSlots) -> None:
        if self.busy is None:
            return
        event = (
            SlotsPollFailed(order.poll) if self.poll_fails
            else SlotsPolled(order.poll, self.busy, max(4, self.busy))
        )  # fmt: skip
        self.after(self.poll_delay_s, lambda: self.send(event))

    def _serve(self, order: Dispatch | Hedge) -> None:
        worker = self.workers[order.worker]
        if worker.latency_s is None:
            return
        head = order.call, order.part, order.worker, order.session
        event: CoordinatorEvent = (
            AnswerArrived(*head, worker.is_shaped, worker.norm_ratio)
            if worker.failure is None
            else AnswerFailed(*head, worker.failure)
        )
        pairs = sum(share.pairs for share in order.shares)
        for _ in range(worker.copies):
            self.after(worker.latency_s + pairs * worker.per_pair_s, lambda: self.send(event))
