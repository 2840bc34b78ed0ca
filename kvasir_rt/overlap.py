"""A stage that computes another micro-batch while one waits for its experts.

It holds at most `overlap` micro-batches; 1 blocks. One is computed at a time: the one that was
taken first of those whose experts are there. Where all that it holds are *parked* (their experts
outstanding) the next is taken from the input. Finished ones leave as soon as there is a credit and
may overtake each other. A micro-batch that shares a request with one in hand is not begun before
that has left, nor is anything behind it: so chunks of a prompt never overtake each other, and a
request's rows stay in order. A release waits for the micro-batches that hold its requests.

Time is told from departure to departure (`overlap_laps.Stretch`): *busy* while anything is done,
*experts* while everything in hand waits and something of it for experts, *credit* while all of it
is done and waits for the next stage, *starved* while there is nothing in hand.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from kvasir_core.units import Nanos, RequestId
from kvasir_rt import wire
from kvasir_rt.agent import monotonic
from kvasir_rt.handover import Free, Handover, Holding, Item, Load, Outgoing, Quit, Reset, Work
from kvasir_rt.overlap_laps import Stretch

LOOK_S = 0.25  # A call that nobody will ever conclude is found so late.


class Parked(Protocol):
    """Experts that are awaited."""

    @property
    def is_due(self) -> bool:
        """Something of it is to be computed here, or it is done."""

    @property
    def is_done(self) -> bool:
        """The micro-batch can go on without waiting."""

    def compute_waiting(self) -> None:
        """Compute what fell to this stage so far."""

    def on_news(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, on any thread, whenever `is_due` may have become true."""


class Run(Protocol):
    """A micro-batch under way."""

    def advance(self) -> Parked | None:
        """Compute until experts must be awaited, or to the end (None)."""

    def finish(self) -> wire.Buffer:
        """The boundary bytes, or at the tail the packed result rows; once `advance` gave None."""


class OverlapCompute(Protocol):
    """A stage whose micro-batches can wait."""

    @property
    def overlap(self) -> int:
        """Most micro-batches in hand."""

    def begin(self, lap: wire.Lap, body: memoryview | None) -> Run:
        """Take a micro-batch in hand; nothing is computed yet."""

    def release(self, requests: Iterable[RequestId]) -> None: ...

    def note_blocked(self, blocked_ns: int) -> None:
        """So long everything in hand waited for experts."""


@dataclass(slots=True, eq=False)
class Visit:
    """A micro-batch in hand."""

    work: Work
    run: Run
    requests: frozenset[RequestId]
    started: Nanos
    parked: Parked | None = None
    parked_from: Nanos = Nanos(0)
    body: wire.Buffer | None = None
    ended: Nanos = Nanos(0)
    computed_ns: int = 0
    parked_ns: int = 0


class Ledger:
    """The stage's time since its last departure."""

    def __init__(self) -> None:
        self._number = 0
        self._state = "busy"
        self._since = self._held_from = Nanos(0)
        self._composed = 0
        self._spent = {"busy": 0, "experts": 0, "credit": 0}

    def take(self, at: Nanos, composed: int) -> None:
        """A micro-batch came into empty hands."""
        self._state, self._since = "busy", at
        self._held_from, self._composed = at, composed

    def enter(self, state: str, at: Nanos) -> None:
        """What the stage does from now on: busy, experts or credit."""
        self._spent[self._state] += at - self._since
        self._state, self._since = state, at

    def depart(self, at: Nanos, visit: Visit) -> Stretch:
        """One leaves; the next stretch begins."""
        self.enter(self._state, at)
        spent, self._spent = self._spent, dict.fromkeys(self._spent, 0)
        assert sum(spent.values()) == at - self._held_from
        stretch = Stretch(
            number=self._number,
            held_from=self._held_from,
            composed=self._composed,
            busy_ns=spent["busy"],
            experts_ns=spent["experts"],
            computed_ns=visit.computed_ns,
            parked_ns=visit.parked_ns,
        )
        self._number += 1
        self._held_from = at
        return stretch


class OverlapDesk:
    """Does the work of a stage between two changes of its life.

    Args:
        handover: Where work comes from and goes to.
        compute: Loaded.
        is_tail: It sends results.
        clock: Monotonic.
    """

    def __init__(
        self,
        handover: Handover,
        compute: OverlapCompute,
        *,
        is_tail: bool,
        clock: Callable[[], Nanos] = monotonic,
    ) -> None:
        self._handover = handover
        self._compute = compute
        self._is_tail = is_tail
        self._clock = clock
        self._held: list[Visit] = []  # As taken.
        self._frees: deque[Free] = deque()
        self._ledger = Ledger()

    def next_item(self) -> Load | Reset | Quit:
        """Work until something else is asked for; then nothing is in hand any more."""
        while True:
            item = self._handover.peek()
            if isinstance(item, Load | Reset | Quit):
                if self._handover.take_if(item):
                    self._held.clear()
                    self._frees.clear()
                    self._ledger = Ledger()
                    return item
            elif not (self._depart() or self._free() or self._resume() or self._take(item)):
                self._wait()

    def _depart(self) -> bool:
        """Send the first finished one on, if there is a credit."""
        visit = next((visit for visit in self._held if visit.body is not None), None)
        if visit is None or not self._handover.has_credit:
            return False
        assert visit.body is not None
        lap = visit.work.lap
        if self._handover.wait_credit(lap.micro_batch.epoch):
            sent = self._clock()
            stretch = self._ledger.depart(sent, visit)
            self._compute.note_blocked(stretch.experts_ns)
            stamps = (*lap.stamps, visit.work.received, visit.started, visit.ended, sent)
            outgoing = outgoing_of(
                lap, stamps, visit.body, is_tail=self._is_tail, spent=(*lap.spent, *stretch)
            )
            self._handover.send(lap.micro_batch.epoch, outgoing)
        self._held.remove(visit)
        self._hold(None)
        return True

    def _free(self) -> bool:
        """Release requests that nothing in hand has rows of."""
        for free in self._frees:
            if self._is_apart(free.release.requests):
                self._frees.remove(free)
                release = free.release
                self._compute.release(release.requests)
                self._handover.send(release.epoch, Outgoing("release", wire.encode(release), None))
                return True
        return False

    def _resume(self) -> bool:
        """Go on with the one that was taken first of those that can."""
        for visit in self._held:
            if visit.parked is not None and visit.parked.is_due:
                self._go_on(visit, visit.parked)
                return True
        return False

    def _take(self, item: Item | None) -> bool:
        """Take the next item in hand, if it may be."""
        if item is None or not self._may_take(item) or not self._handover.take_if(item):
            return False
        if isinstance(item, Work):
            self._begin(item)
        elif isinstance(item, Free):
            self._frees.append(item)
        return True

    def _begin(self, work: Work) -> None:
        started = self._clock()
        lap = work.lap
        if not self._held:
            self._ledger.take(started, lap.composed)
        run = self._compute.begin(lap, work.body)
        visit = Visit(work, run, frozenset(lap.micro_batch.requests), started)
        self._held.append(visit)
        self._go_on(visit, None)

    def _may_take(self, item: Item | None) -> bool:
        """While a finished one waits for the next stage, nothing more is begun."""
        if not isinstance(item, Work):
            return isinstance(item, Free)
        return (
            len(self._held) < self._compute.overlap
            and all(visit.body is None for visit in self._held)
            and self._is_apart(item.lap.micro_batch.requests)
        )

    def _is_apart(self, requests: Iterable[RequestId]) -> bool:
        return all(visit.requests.isdisjoint(requests) for visit in self._held)

    def _go_on(self, visit: Visit, parked: Parked | None) -> None:
        """Compute until it must wait, or is done."""
        since = self._clock()
        self._ledger.enter("busy", since)
        self._hold(visit, since)
        if parked is not None:
            visit.parked_ns += since - visit.parked_from
            parked.compute_waiting()
        if parked is None or parked.is_done:
            visit.parked = visit.run.advance()
            if visit.parked is None:
                visit.body = visit.run.finish()
            else:
                visit.parked.on_news(self._handover.nudge)
        if self._handover.slowdown > 1:
            time.sleep((self._handover.slowdown - 1) * (self._clock() - since) / 1e9)
        visit.ended = visit.parked_from = self._clock()
        visit.computed_ns += visit.ended - since
        self._hold(visit)

    def _hold(self, visit: Visit | None, since: Nanos | None = None) -> None:
        """What the bridge is told: something is in hand, and whether it is computed now."""
        visit = visit or next(iter(self._held), None)
        self._handover.holding = None
        if visit is not None:
            batch = visit.work.lap.micro_batch
            self._handover.holding = Holding(batch.id, batch.row_count, since)

    def _wait(self) -> None:
        if self._held:
            is_for_experts = any(visit.body is None for visit in self._held)
            self._ledger.enter("experts" if is_for_experts else "credit", self._clock())
        self._handover.wait(self._is_due, LOOK_S if self._held else None)

    def _is_due(self, item: Item | None) -> bool:
        if isinstance(item, Load | Reset | Quit) or self._may_take(item):
            return True
        if self._handover.has_credit and any(visit.body is not None for visit in self._held):
            return True
        return any(visit.parked is not None and visit.parked.is_due for visit in self._held)


def outgoing_of(
    lap: wire.Lap,
    stamps: tuple[int, ...],
    body: wire.Buffer,
    *,
    is_tail: bool,
    spent: tuple[int, ...] = (),
) -> Outgoing:
    """What a computed micro-batch is to the next stage, or the bridge."""
    batch = lap.micro_batch
    if is_tail:
        result = wire.Result(batch.id, batch.epoch, stamps, len(body), spent)
        return Outgoing("result", wire.encode(result), body)
    onward = wire.Lap(
        micro_batch=batch,
        ids=lap.ids if lap.keeps_ids else b"",
        keeps_ids=lap.keeps_ids,
        sampling=lap.sampling,
        stamps=stamps,
        body_bytes=len(body),
        composed=lap.composed,
        spent=spent,
    )
    return Outgoing("lap", wire.encode(onward), body)
