"""Stages, links and credits in virtual time: micro-batches carried by SimPy callbacks.

One event a stage execution, reused from execution to execution, and one a link crossing that takes
time. A stage takes the first micro-batch of its input, computes it, and holds it until the next
stage has a free input slot and takes it over; links are latency (pipelined) and bytes (in order).
Nothing here decides what runs: `shell.py` asks the core.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import simpy
from simpy.events import NORMAL

from kvasir_core import MicroBatch, Nanos, Plan, RequestId
from kvasir_sim.links import LinkCost

Releases = tuple[tuple[RequestId, ...], ...]
NO_RELEASES: Releases = ()
Callback = Callable[[simpy.Event], None]
OnReturn = Callable[["Flight", Nanos], None]
"""Called with a micro-batch whose lap is over, and the time."""


class Clock(simpy.Environment):
    """SimPy's environment in integer nanoseconds."""

    _now: Nanos

    def __init__(self) -> None:
        super().__init__(initial_time=0)

    @property
    def now(self) -> Nanos:
        """Nanoseconds since the start."""
        return self._now


class Flight:
    """A micro-batch on its lap, with its stamps: received, start, end, sent per stage so far."""

    __slots__ = (
        "after", "batch", "before", "composed", "computed", "due", "holds", "parked", "stamps",
    )  # fmt: skip

    def __init__(
        self, batch: MicroBatch, composed: int, holds: Sequence[int], before: Releases = NO_RELEASES
    ) -> None:
        self.batch = batch
        self.composed = composed
        self.holds = holds
        self.stamps: list[int] = []
        self.before = before  # Releases that travel in front of it,
        self.after = NO_RELEASES  # and behind it.
        self.due: Nanos  # When it will be back, if that is known.
        self.computed: list[int]  # Per stage that overlaps: time computed,
        self.parked: list[int]  # and time that it only waited for experts.


class Recurring(simpy.Event):
    """An event that is scheduled again after it was processed: no allocation a hop."""

    def __init__(self, env: Clock, callback: Callback) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        self.mine: Any = [callback]  # SimPy takes the list away when it processes the event.

    def again(self, delay: int, priority: Any = NORMAL) -> None:
        """Fire once more, `delay` nanoseconds from now."""
        self.callbacks = self.mine
        self.env.schedule(self, priority, delay)


class Link:
    """A hop that takes time: bytes in order of sending, then latency that any number share."""

    __slots__ = (
        "_arrive",
        "_env",
        "_events",
        "_flying",
        "busy_ns",
        "cost",
        "delay_ns",
        "free_at",
        "slower",
    )

    def __init__(self, env: Clock, cost: LinkCost, arrive: Callable[[Flight], None]) -> None:
        self.cost = cost
        self.free_at = 0  # When the last byte of the last micro-batch is out.
        self.busy_ns = 0  # Time that bytes were on it.
        self.delay_ns = 0  # Extra latency, by a fault.
        self.slower = 1.0  # Times as slow, by a fault.
        self._env = env
        self._arrive = arrive
        self._flying: deque[tuple[int, Flight]] = deque()
        self._events: list[Recurring] = []

    @property
    def latency_ns(self) -> int:
        """From the last byte out to its arrival, now."""
        return round(self.cost.latency_ns * self.slower) + self.delay_ns

    def transfer_ns(self, rows: int) -> int:
        """Time that the bytes of so many rows occupy the link now."""
        return round(self.cost.transfer_ns(rows) * self.slower)

    def send(self, flight: Flight, rows: int) -> None:
        """Put a micro-batch on the link; it arrives in order."""
        now = self._env.now
        if self.cost.occupies_sender:  # Its bytes went out while the stage held it.
            out = max(now, self.free_at)
        else:
            transfer = self.transfer_ns(rows)
            out = max(now, self.free_at) + transfer
            self.busy_ns += transfer
        self.free_at = out
        due = out + self.latency_ns
        if self._flying:
            due = max(due, self._flying[-1][0])
        self._flying.append((due, flight))
        event = self._events.pop() if self._events else Recurring(self._env, self._arrived)
        event.again(due - now)

    def _arrived(self, event: simpy.Event) -> None:
        assert isinstance(event, Recurring)
        self._events.append(event)
        if self._flying:  # Else the ring was reborn meanwhile and what flew is lost.
            if self._flying[0][0] > self._env.now:
                return
            self._arrive(self._flying.popleft()[1])

    def clear(self) -> None:
        """Everything on the link is lost."""
        self._flying.clear()


class Stage:
    """One stage: an input queue, and at most one micro-batch in hand."""

    __slots__ = (
        "_env", "_event", "_flight", "_pipeline", "_queue", "index", "is_blocked", "link", "next",
        "occupying", "previous", "slots", "slower",
    )  # fmt: skip

    def __init__(self, pipeline: "Pipeline", index: int, slots: int) -> None:
        self.index = index
        self.slots = slots  # Free places in the input; the head's queue is the ring's window.
        self.slower = 1.0
        self.is_blocked = False
        self.next: Stage | None = None
        self.previous: Stage | None = None
        self.link: Link | None = None
        self.occupying: Link | None = None  # The outgoing link, if sending occupies this stage.
        self._pipeline = pipeline
        self._env = pipeline.env
        self._queue: deque[Flight] = deque()
        self._flight: Flight | None = None
        self._event = Recurring(pipeline.env, self._ended)

    def receive(self, flight: Flight) -> None:
        """A micro-batch arrived in the input."""
        now = self._env.now
        flight.stamps.append(now)
        if self._flight is None:
            self._start(flight, now)
        else:
            self._queue.append(flight)

    def _start(self, flight: Flight, now: int) -> None:
        self._flight = flight
        flight.stamps.append(now)
        hold = flight.holds[self.index]
        if self.slower != 1.0:
            hold = round(hold * self.slower)
        if self.occupying is not None:
            hold += self.occupying.transfer_ns(self._pipeline.rows_on_hop(self.index, flight.batch))
        event = self._event
        event.callbacks = event.mine
        self._env.schedule(event, NORMAL, hold)
        previous = self.previous
        if previous is not None:
            self.slots += 1
            if previous.is_blocked:
                previous.unblock()

    def _ended(self, event: simpy.Event) -> None:
        """The computation is over: hand the micro-batch over, or hold it without a free slot."""
        if event is not self._event:
            return  # Of a computation that was lost with its epoch.
        flight, now, following = self._flight, self._env.now, self.next
        assert flight is not None
        flight.stamps.append(now)
        if following is not None:
            if following.slots <= 0:
                self.is_blocked = True
                return
            following.slots -= 1
        self._hand_over(flight, following, now)

    def unblock(self) -> None:
        """The next stage has a free input slot."""
        flight, following, now = self._flight, self.next, self._env.now
        assert flight is not None
        assert following is not None
        self.is_blocked = False
        following.slots -= 1
        self._hand_over(flight, following, now)

    def _hand_over(self, flight: Flight, following: "Stage | None", now: int) -> None:
        flight.stamps.append(now)
        if self._queue:
            self._start(self._queue.popleft(), now)
        else:
            self._flight = None
        if self.link is not None:
            self.link.send(flight, self._pipeline.rows_on_hop(self.index, flight.batch))
        elif following is None:
            self._pipeline.on_return(flight, Nanos(now))
        else:
            following.receive(flight)

    def clear(self, slots: int) -> None:
        """Drop everything; a computation under way is lost."""
        self._queue.clear()
        self._flight = None
        self.is_blocked = False
        self.slots = slots
        self._event = Recurring(self._pipeline.env, self._ended)


class Pipeline:
    """The stages in order and the links between them; the last link returns to the head."""

    def __init__(
        self,
        env: Clock,
        plan: Plan,
        links: list[LinkCost],
        turnaround_ns: int,
        on_return: OnReturn,
    ) -> None:
        self.env = env
        self.on_return = on_return
        self._slots = plan.credits if plan.credits is not None else 1 << 62
        self.stages = [self.new_stage(k, self._slots) for k in range(plan.stages)]
        self.links: list[Link] = []
        self.open: dict[int, Flight] = {}
        for index, stage in enumerate(self.stages):
            is_tail = index == plan.stages - 1
            arrive = self._returned if is_tail else self.stages[index + 1].receive
            cost = links[index]
            if is_tail and turnaround_ns:
                cost = LinkCost(
                    cost.latency_ns + turnaround_ns, cost.row_bytes, cost.bandwidth_bytes_per_s,
                    cost.occupies_sender,
                )  # fmt: skip
            link = Link(env, cost, arrive)
            self.links.append(link)
            stage.link = link if cost.latency_ns or cost.bandwidth_bytes_per_s is not None else None
            stage.occupying = link if cost.occupies_sender and stage.link is not None else None
            if not is_tail:
                stage.next = self.stages[index + 1]
                stage.next.previous = stage

    def new_stage(self, index: int, slots: int) -> Stage:
        """A stage with so many free places in its input."""
        return Stage(self, index, slots)

    def _returned(self, flight: Flight) -> None:
        self.on_return(flight, self.env.now)

    @property
    def slower(self) -> list[float]:
        """How many times as slow each stage is now, by a fault."""
        return [stage.slower for stage in self.stages]

    @property
    def latency_ns(self) -> int:
        """What a message without bytes needs for a lap now."""
        return sum(link.latency_ns for link in self.links)

    @property
    def link_busy_ns(self) -> list[int]:
        """Per hop, how long bytes were on it."""
        return [link.busy_ns for link in self.links]

    def rows_on_hop(self, index: int, batch: MicroBatch) -> int:
        """Rows that cross the hop behind stage `index`: all of them, or the tail's output rows."""
        if index == len(self.stages) - 1:
            return batch.decodes + len(batch.completing)
        return batch.row_count

    def submit(self, flight: Flight) -> None:
        """Put a fresh micro-batch into the head's input."""
        self.stages[0].receive(flight)

    def use_links(self) -> None:
        """Route through every link from now on, also through those that took no time."""
        for stage, link in zip(self.stages, self.links, strict=True):
            stage.link = link

    def clear(self) -> None:
        """Everything in the ring is lost."""
        for stage in self.stages:
            stage.clear(self._slots)
        for link in self.links:
            link.clear()
