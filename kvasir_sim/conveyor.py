"""The same stages, links and credits as `pipeline.py`, in closed form: one event a lap.

Without faults nothing that happens later changes a micro-batch's way through a FIFO ring, so all
its times follow when it is launched: it starts when it is there and the stage is free, it is sent
when the next stage has started the one `credits` before it, and bytes follow each other on a link.
A test holds both to the same stamps.
"""

from collections import deque
from collections.abc import Callable

import simpy

from kvasir_core import Plan
from kvasir_sim.links import LinkCost
from kvasir_sim.pipeline import Clock, Flight, Recurring


class Hop:
    """A stage and the link behind it."""

    __slots__ = ("bandwidth", "free_at", "latency", "link", "link_free_at", "occupies", "starts")

    def __init__(self, link: LinkCost, turnaround_ns: int, credits_: int | None) -> None:
        self.link = link
        self.latency = link.latency_ns + turnaround_ns
        self.bandwidth = link.bandwidth_bytes_per_s is not None
        self.occupies = link.occupies_sender
        self.free_at = 0  # When the stage can take the next micro-batch.
        self.link_free_at = 0  # When the last byte of the last micro-batch is out.
        self.starts: deque[int] | None = None if credits_ is None else deque(maxlen=credits_)


class Conveyor:
    """A ring without faults. `submit` knows at once when the micro-batch will be back."""

    def __init__(
        self,
        env: Clock,
        plan: Plan,
        links: list[LinkCost],
        turnaround_ns: int,
        on_return: Callable[[Flight], None],
    ) -> None:
        last = plan.stages - 1
        self._env = env
        self._on_return = on_return
        self._hops = [
            Hop(link, turnaround_ns if k == last else 0, plan.credits if k else None)
            for k, link in enumerate(links)
        ]
        self._is_plain = all(
            not (hop.latency or hop.bandwidth or hop.starts is not None) for hop in self._hops
        )
        self._flying: deque[tuple[int, Flight]] = deque()  # When it is back; in that order.
        self._event = Recurring(env, self._returned)  # For the first of them.
        self.link_busy_ns = [0] * plan.stages

    @property
    def latency_ns(self) -> int:
        """What a message without bytes needs for a lap."""
        return sum(hop.latency for hop in self._hops)

    def submit(self, flight: Flight) -> None:
        """Put a fresh micro-batch into the head's input."""
        now = self._env.now
        back = self._plain_lap(flight, now) if self._is_plain else self._lap(flight, now)
        self._flying.append((back, flight))
        if len(self._flying) == 1:
            self._event.again(back - now)

    def _returned(self, _: simpy.Event) -> None:
        flying = self._flying
        back, flight = flying.popleft()
        if flying:
            self._event.again(flying[0][0] - back)
        self._on_return(flight)

    def _plain_lap(self, flight: Flight, here: int) -> int:
        """Free links and unbounded inputs: only the stages take time."""
        stamps = flight.stamps
        for hop, hold in zip(self._hops, flight.holds, strict=True):
            start = hop.free_at
            if start < here:  # noqa: PLR1730 - a call of `max` costs three times as much.
                start = here
            hop.free_at = end = start + hold
            stamps += (here, start, end, end)
            here = end
        return here

    def _lap(self, flight: Flight, here: int) -> int:
        hops, stamps, batch = self._hops, flight.stamps, flight.batch
        last = len(hops) - 1
        rows = batch.row_count
        for index, hop in enumerate(hops):
            if index == last:
                rows = batch.decodes + len(batch.completing)
            transfer = hop.link.transfer_ns(rows) if hop.bandwidth else 0
            start = max(here, hop.free_at)
            if hop.starts is not None:
                hop.starts.append(start)
            end = start + flight.holds[index]
            if hop.occupies:
                end += transfer
                transfer = 0
            sent = end
            if index < last:
                starts = hops[index + 1].starts
                if starts is not None and len(starts) == starts.maxlen:
                    sent = max(sent, starts[0])  # The slot of the one `credits` before it.
            hop.free_at = sent
            stamps += (here, start, end, sent)
            hop.link_free_at = max(sent, hop.link_free_at) + transfer
            self.link_busy_ns[index] += transfer
            here = hop.link_free_at + hop.latency
        return here

    def partial_stamps(self, flight: Flight, now: int) -> list[int]:
        """Stamps of an unfinished lap; the recorder leaves out what lies after `now`."""
        del now
        return flight.stamps
