"""A stage that computes another micro-batch while one waits for its experts.

A stage holds at most `overlap` micro-batches (1 blocks). It computes one at a time. A held
micro-batch first computes all that is not routed experts; its experts then are local (more
computing), or remote: it is *parked* until their results are in. While all that it holds are
parked, the stage takes another in hand; where nothing is remote it is therefore a plain stage.
Finished ones leave as soon as the next stage has a free slot, and may overtake each other, except
that chunks of one prompt leave in the order in which they came (and so compute, since computing is
first come, first served).

A real stage alternates between layers: compute, wait, compute, wait. Here each kind is one piece
per micro-batch and stage: with the same totals the stage is busy for the same share of the time,
because a queue of one server and K customers depends on the sums (`docs/decisions/0005`).

The stage's time is split as it is spent and handed on as intervals: *busy* while it computes,
*experts* while every held micro-batch waits and one of them for experts, *credit* while all held
ones wait for the next stage (or behind one that does).
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

import simpy
from simpy.events import NORMAL

from kvasir_core import Nanos, Plan
from kvasir_sim.links import LinkCost
from kvasir_sim.pipeline import Clock, Flight, OnReturn, Pipeline, Stage
from kvasir_sim.swarm.cores import Cores
from kvasir_sim.swarm.network import after

Then = Callable[[], None]
OnSpent = Callable[[int, str, int, int, int], None]
"""(stage, busy | credit | experts, start, stop, when its micro-batch was composed)."""


class Visit:
    """A micro-batch in a stage's hands."""

    __slots__ = (
        "awaited", "behind", "flight", "has_left", "is_begun", "is_concluded", "is_done", "is_lost",
        "is_routed", "parked_from", "pieces", "ready_at", "stage", "wake_at",
    )  # fmt: skip

    def __init__(self, flight: Flight, stage: "OverlapStage", behind: "Visit | None") -> None:
        self.flight = flight
        self.stage = stage
        self.behind = behind  # Holds earlier rows of one of its prompts.
        self.pieces = 1  # Of computing, queued or under way.
        self.is_begun = False
        self.is_routed = False  # What is not routed experts is computed.
        self.is_concluded = False  # No remote part is outstanding.
        self.ready_at = 0  # When the last accepted remote result is in,
        self.awaited = 0  # and how many are accepted of which that is not known yet.
        self.wake_at: int | None = None
        self.parked_from: int | None = None
        self.is_done = False
        self.has_left = False
        self.is_lost = False  # Its epoch ended.

    @property
    def is_behind(self) -> bool:
        """It must not leave yet."""
        return self.behind is not None and not self.behind.has_left

    @property
    def is_waiting(self) -> bool:
        """For its experts, or done and behind one that waits."""
        return self.parked_from is not None or (self.is_done and self.is_behind)


class Experts(Protocol):
    """What a stage asks about the routed experts of its layers."""

    def begin(self, visit: Visit) -> tuple[int, bool]:
        """Time of a visit's first piece, and whether its routed experts are in it already."""

    def route(self, visit: Visit) -> None:
        """The first piece is computed: send parts away, order pieces of computing."""


class OverlapStage(Stage):
    """Holds several micro-batches; see the module."""

    def __init__(self, pipeline: "OverlapPipeline", index: int, slots: int) -> None:
        super().__init__(pipeline, index, slots)
        self._experts = pipeline.experts
        self._overlap = pipeline.overlap
        self._cores = pipeline.cores
        self._piece = 0  # The last one given to shared cores.
        self._on_spent = pipeline.on_spent
        self._held: list[Visit] = []
        self._done: list[Visit] = []
        # Pieces to compute: whose, how long (None: the first piece, asked for when it starts),
        # and what to call afterwards.
        self._ready: deque[tuple[Visit | None, int | None, Then | None]] = deque()
        self._computing: tuple[Visit | None, Then | None, int] | None = None  # And since when.
        self._state: str | None = None
        self._since = 0
        self._composed = 0
        self.experts_ns = 0  # Blocked by experts so far.
        self.local_pairs = self.local_ns = 0  # Routed experts computed here so far.

    def receive(self, flight: Flight) -> None:
        """A micro-batch arrived in the input."""
        flight.stamps.append(self._env.now)
        self._queue.append(flight)
        self._go_on()

    def compute(
        self,
        visit: Visit | None,
        piece_ns: int,
        then: Then | None = None,
        *,
        is_first: bool = False,
    ) -> None:
        """Order a piece of computing, for a visit or (None) aside from any."""
        if visit is not None:
            if visit.is_lost:
                return
            self._unpark(visit)
            visit.pieces += 1
        piece = visit, piece_ns, then
        if is_first:
            self._ready.appendleft(piece)
        else:
            self._ready.append(piece)

    def settle(self, visit: Visit) -> None:
        """Something about the visit changed: done, parked, or still computing?"""
        if visit.is_lost or visit.is_done or visit.pieces or not visit.is_routed:
            return
        now = self._env.now
        is_known = visit.is_concluded and not visit.awaited
        if is_known and visit.ready_at <= now:
            self._unpark(visit)
            visit.is_done = True
            visit.flight.stamps.append(now)
            self._done.append(visit)
            return
        if visit.parked_from is None:
            visit.parked_from = now
        if is_known and visit.wake_at != visit.ready_at:
            visit.wake_at = visit.ready_at
            after(self._env, visit.ready_at - now, lambda: self.resume(visit))

    def resume(self, visit: Visit) -> None:
        """Results are in."""
        self.settle(visit)
        self._go_on()

    def unblock(self) -> None:
        """The next stage has a free input slot."""
        self.is_blocked = False
        self._go_on()

    def clear(self, slots: int) -> None:
        """Drop everything; a computation under way is lost."""
        self._note(None)
        for visit in self._held:
            visit.is_lost = True
        self._held.clear()
        self._done.clear()
        self._ready.clear()
        self._computing = None
        if self._cores is not None:
            self._cores.drop(self._piece)
        super().clear(slots)

    def close(self, end: int) -> None:
        """The run is over: account for the time up to its end."""
        self._note(None, end)

    def _unpark(self, visit: Visit) -> None:
        if visit.parked_from is not None:
            visit.flight.parked[self.index] += self._env.now - visit.parked_from
            visit.parked_from = None

    def _go_on(self) -> None:
        """Hand over, take in and compute whatever can be, then account for the time."""
        while True:
            if self._computing is None and self._ready:
                self._compute_next()
            if not (self._leave() or self._take()):
                break
        self._note(self._state_now())

    def _take(self) -> bool:
        """Take the first micro-batch of the input in hand, which frees its slot."""
        if not self._queue or len(self._held) >= self._overlap or self._computing or self._ready:
            return False
        if not all(visit.is_waiting for visit in self._held):
            return False
        flight = self._queue.popleft()
        behind = next((v for v in reversed(self._held) if _shares_prompt(v.flight, flight)), None)
        visit = Visit(flight, self, behind)
        self._held.append(visit)
        self._ready.append((visit, None, None))
        previous = self.previous
        if previous is not None:
            self.slots += 1
            if previous.is_blocked:
                previous.unblock()
        return True

    def _compute_next(self) -> None:
        visit, piece_ns, then = self._ready.popleft()
        if piece_ns is None:
            assert visit is not None
            visit.is_begun = True
            visit.flight.stamps.append(self._env.now)
            piece_ns, is_all = self._experts.begin(visit)
            if is_all:
                visit.is_routed = visit.is_concluded = True
            if self.occupying is not None:
                rows = self._pipeline.rows_on_hop(self.index, visit.flight.batch)
                piece_ns += self.occupying.transfer_ns(rows)
        if self.slower != 1.0:
            piece_ns = round(piece_ns * self.slower)
        self._computing = visit, then, self._env.now
        event = self._event
        if self._cores is not None:
            self._piece = self._cores.compute(piece_ns, partial(self._ended, event))
            return
        event.callbacks = event.mine
        self._env.schedule(event, NORMAL, piece_ns)

    def _ended(self, event: simpy.Event) -> None:
        if event is not self._event:
            return  # Of a computation that was lost with its epoch.
        assert self._computing is not None
        visit, then, since = self._computing
        self._computing = None
        if visit is not None:
            visit.flight.computed[self.index] += self._env.now - since
        if then is not None:
            then()
        if visit is not None:
            visit.pieces -= 1
            if not visit.is_routed:
                visit.is_routed = True
                self._experts.route(visit)
            self.settle(visit)
        self._go_on()

    def _leave(self) -> bool:
        """Hand the first finished micro-batch over that may go; False if none may."""
        following = self.next
        visit = next((visit for visit in self._done if not visit.is_behind), None)
        if visit is None:
            return False
        if following is not None:
            if following.slots <= 0:
                self.is_blocked = True
                return False
            following.slots -= 1
        self._done.remove(visit)
        self._held.remove(visit)
        visit.has_left = True
        visit.behind = None
        flight, now = visit.flight, self._env.now
        flight.stamps.append(now)
        if self.link is not None:
            self.link.send(flight, self._pipeline.rows_on_hop(self.index, flight.batch))
        elif following is None:
            self._note(self._state_now())  # The head may give us work before we are asked again.
            self._pipeline.on_return(flight, now)
        else:
            following.receive(flight)
        return True

    def _state_now(self) -> str | None:
        if self._computing is not None:
            return "busy"
        if not self._held:
            return None
        return "experts" if any(not visit.is_done for visit in self._held) else "credit"

    def _note(self, state: str | None, at: int | None = None) -> None:
        if state == self._state:
            return
        now = self._env.now if at is None else at
        if self._state is not None and now > self._since:
            self._on_spent(self.index, self._state, self._since, now, self._composed)
            if self._state == "experts":
                self.experts_ns += now - self._since
        if state is not None and self._state is None:
            self._composed = self._held[0].flight.composed if self._held else now
        self._state = state
        self._since = now


def _shares_prompt(before: Flight, flight: Flight) -> bool:
    """Whether both hold chunks of one prompt."""
    one, other = before.batch, flight.batch
    if one.decodes == len(one.requests) or other.decodes == len(other.requests):
        return False
    return not set(one.requests[one.decodes :]).isdisjoint(other.requests[other.decodes :])


class OverlapPipeline(Pipeline):
    """Stages that overlap, and the links between them."""

    def __init__(
        self,
        env: Clock,
        plan: Plan,
        links: list[LinkCost],
        turnaround_ns: int,
        on_return: OnReturn,
        *,
        experts: Experts,
        overlap: int,
        on_spent: OnSpent,
        cores: Cores | None = None,
    ) -> None:
        """`cores`: that the stages share, with others too; None: each has its own."""
        self.experts = experts
        self.overlap = overlap
        self.cores = cores
        self.on_spent = on_spent
        self.overlapping: list[OverlapStage] = []
        self._turnaround_ns = turnaround_ns
        self._turned = on_return
        self._turning: list[Flight] = []  # The bridge computes, on shared cores.
        if cores is not None and turnaround_ns:
            turnaround_ns, on_return = 0, self._turn
        super().__init__(env, plan, links, turnaround_ns, on_return)

    def new_stage(self, index: int, slots: int) -> Stage:
        """A stage that holds several."""
        stage = OverlapStage(self, index, slots)
        self.overlapping.append(stage)
        return stage

    def submit(self, flight: Flight) -> None:
        """Put a fresh micro-batch into the head's input."""
        flight.parked = [0] * len(self.stages)
        flight.computed = [0] * len(self.stages)
        super().submit(flight)

    def _turn(self, flight: Flight, now: Nanos) -> None:
        del now
        assert self.cores is not None
        self._turning.append(flight)
        self.cores.compute(self._turnaround_ns, lambda: self._end_turn(flight))

    def _end_turn(self, flight: Flight) -> None:
        if flight in self._turning:
            self._turning.remove(flight)
            self._turned(flight, self.env.now)

    def clear(self) -> None:
        """Everything in the ring is lost, also what the bridge had in hand."""
        self._turning.clear()
        super().clear()

    def close(self, end: int) -> None:
        """The run is over."""
        for stage in self.overlapping:
            stage.close(end)
