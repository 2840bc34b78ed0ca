"""The same stages, links and credits as `pipeline.py`, in closed form: one event a lap.

Without faults nothing that happens later changes a micro-batch's way through a FIFO ring, so all
its times follow when it is launched: it starts when it is there and the stage is free, it is sent
when the next stage has started the one `credits` before it, and bytes follow each other on a link.
A test holds both to the same stamps.
"""

from collections import deque
from itertools import pairwise

import simpy

from kvasir_core import Nanos, Plan
from kvasir_sim.links import LinkCost
from kvasir_sim.pipeline import Clock, Flight, OnReturn, Recurring


class Hop:
    """A stage and the link behind it."""

    __slots__ = (
        "busy_ns", "following", "free_at", "has_bytes", "is_return", "latency_ns", "link",
        "link_free_at", "occupies", "starts",
    )  # fmt: skip

    def __init__(self, link: LinkCost, credits_: int | None) -> None:
        self.link = link
        self.latency_ns = link.latency_ns
        self.has_bytes = link.bandwidth_bytes_per_s is not None
        self.occupies = link.occupies_sender
        self.is_return = False
        self.free_at = 0  # When the stage can take the next micro-batch.
        self.link_free_at = 0  # When the last byte of the last micro-batch is out.
        self.busy_ns = 0  # Time that bytes were on the link.
        # When this stage started the last `credits` micro-batches: the first of them had the slot
        # that the next one gets. None: any number may wait here.
        self.starts = None if credits_ is None else deque([0] * credits_, maxlen=credits_)
        self.following: deque[int] | None = None  # `starts` of the next stage.


class Conveyor:
    """A ring without faults. `submit` knows at once when the micro-batch will be back."""

    def __init__(
        self,
        env: Clock,
        plan: Plan,
        links: list[LinkCost],
        turnaround_ns: int,
        on_return: OnReturn,
    ) -> None:
        self._env = env
        self._on_return = on_return
        self._hops = hops = [Hop(link, plan.credits) for link in links]
        for hop, following in pairwise(hops):
            hop.following = following.starts
        hops[-1].is_return = True
        hops[-1].latency_ns += turnaround_ns
        is_plain = not any(hop.latency_ns or hop.has_bytes or hop.following for hop in hops)
        self._lap = self._plain_lap if is_plain else self._any_lap
        self._free_at = [0] * plan.stages  # As `Hop.free_at`, of a plain ring.
        self._flying: deque[Flight] = deque()  # In the order of their return.
        self._event = Recurring(env, self._returned)  # For the first of them.

    @property
    def slower(self) -> list[float]:
        """How many times as slow each stage is, by a fault; there are none here."""
        return [1.0] * len(self._hops)

    @property
    def latency_ns(self) -> int:
        """What a message without bytes needs for a lap."""
        return sum(hop.latency_ns for hop in self._hops)

    @property
    def link_busy_ns(self) -> list[int]:
        """Per hop, how long bytes were on it."""
        return [hop.busy_ns for hop in self._hops]

    def submit(self, flight: Flight) -> None:
        """Put a fresh micro-batch into the head's input; it was composed now."""
        now, flying = flight.composed, self._flying
        flight.due = due = Nanos(self._lap(flight, now))
        if not flying:
            self._event.again(due - now)
        flying.append(flight)

    def _returned(self, _: simpy.Event) -> None:
        flying = self._flying
        flight = flying.popleft()
        now = flight.due
        if flying:
            self._event.again(flying[0].due - now)
        self._on_return(flight, now)

    def _plain_lap(self, flight: Flight, here: int) -> int:
        """Free links and unbounded inputs: only the stages take time."""
        stamps, free_at = flight.stamps, self._free_at
        for stage, hold in enumerate(flight.holds):
            start = free_at[stage]
            if start < here:  # noqa: PLR1730 - a call of `max` costs three times as much.
                start = here
            free_at[stage] = end = start + hold
            stamps += (here, start, end, end)
            here = end
        return here

    def _any_lap(self, flight: Flight, here: int) -> int:
        stamps, batch = flight.stamps, flight.batch
        for hop, hold in zip(self._hops, flight.holds, strict=True):
            start = max(here, hop.free_at)
            if hop.starts is not None:
                hop.starts.append(start)
            end = start + hold
            transfer = 0
            if hop.has_bytes:
                outputs = batch.decodes + len(batch.completing)
                transfer = hop.link.transfer_ns(outputs if hop.is_return else batch.row_count)
                if hop.occupies:
                    end += transfer
                    transfer = 0
            sent = end if hop.following is None else max(end, hop.following[0])
            hop.free_at = sent
            stamps += (here, start, end, sent)
            hop.busy_ns += transfer
            hop.link_free_at = out = max(sent, hop.link_free_at) + transfer
            here = out + hop.latency_ns
        return here
