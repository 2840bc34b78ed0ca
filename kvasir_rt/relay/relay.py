"""Carries calls from coordinators to workers and the answers back. It reads headers, no payloads.

A request number belongs to the connection that it crosses: the relay gives its own towards workers,
so a worker can answer only what was asked of it, once. Whatever cannot go on is answered at once
with a `Fault`: `busy` if a queue is full, `closed` if the worker is not there.

Who breaks a rule loses the connection, and nobody else notices.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from kvasir_core.swarm.words import Session, WorkerId
from kvasir_rt.logs import log_event
from kvasir_rt.relay.channel import (
    CLOSE_GOING_AWAY,
    CLOSE_POLICY,
    CLOSE_SUPERSEDED,
    Channel,
    Socket,
    Watch,
)
from kvasir_rt.relay.limits import RelayLimits
from kvasir_rt.relay.port import OneRelay, Origin, RelayPort
from kvasir_rt.swarm.frames import (
    Attached,
    Buffer,
    Call,
    Detached,
    Drop,
    Fault,
    Frame,
    FrameError,
    Hello,
    Reply,
)
from kvasir_rt.swarm.protocol import PROTOCOL

logger = logging.getLogger("kvasir.relay")

HERE = ""
REQUESTS = 1 << 62


@dataclass(slots=True)
class Due:
    """A call that a worker has not answered."""

    origin: Origin
    queued: int  # Its number in the outbox, while it may still be there.
    expires_at: float


@dataclass(slots=True)
class OpenCall:
    """A coordinator's call that is not answered."""

    end: "CoordinatorEnd"
    request: int
    worker: WorkerId
    session: Session
    expires_at: float


@dataclass(slots=True, eq=False)
class WorkerEnd:
    """A worker's connection."""

    channel: Channel
    worker: WorkerId
    session: Session
    due: dict[int, Due] = field(default_factory=dict)
    requests: int = 0
    strays: int = 0  # Replies to nothing, since the last good one.


@dataclass(slots=True, eq=False)
class CoordinatorEnd:
    """A coordinator's connection."""

    channel: Channel
    name: str
    calls: dict[int, int] = field(default_factory=dict)  # Its request -> our number.


@dataclass(slots=True)
class Counts:
    """Since the start."""

    calls: int = 0
    replies: int = 0
    busy: int = 0
    closed: int = 0
    strays: int = 0
    expired: int = 0
    cut_off: int = 0  # Connections ended because the peer broke a rule or was gone.


class Relay:
    """The exchange. One per process; runs on one event loop.

    Args:
        limits: Bounds.
        port: The way to other relays.
        clock: Seconds, never going back.
    """

    def __init__(
        self,
        limits: RelayLimits | None = None,
        port: RelayPort | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits or RelayLimits()
        self.port = port or OneRelay()
        self.epoch = int(time.time()) & 0x7FFFFFFF  # For people; it rises with every start.
        self.workers: dict[WorkerId, WorkerEnd] = {}
        self.coordinators: dict[str, CoordinatorEnd] = {}
        self.counts = Counts()
        self._clock = clock
        self._watch = Watch()
        self._calls: dict[int, OpenCall] = {}
        self._placed: dict[Origin, tuple[WorkerEnd, int]] = {}  # Where a call waits.
        self._numbers = 0
        self._names = 0
        self._partial: dict[Channel, int] = {}
        self._partial_bytes = 0
        self._swept_at = clock()

    async def open(self) -> None:
        await self.port.open(self)

    async def close(self) -> None:
        """End every connection with a close frame."""
        for channel in self._channels():
            channel.end("the relay stops", CLOSE_GOING_AWAY)
        await self.port.close()
        await self._watch.close()

    async def serve_worker(self, socket: Socket, worker: WorkerId, session: Session) -> str:
        """Until the connection is over; returns why. The hub has admitted this generation."""
        before = self.workers.get(worker)
        if before is not None:
            before.channel.end("a newer generation dialled", CLOSE_SUPERSEDED)
            self._forget_worker(before)
        end = WorkerEnd(self._channel(socket), worker, session)
        self.workers[worker] = end
        end.channel.post_urgent(Hello(PROTOCOL, worker, self.epoch))
        self.port.attach(worker, session)
        self.deliver_attached(worker, session, is_here=True)
        try:
            return await self._run(end.channel, lambda h, p: self._from_worker(end, h, p), worker)
        finally:
            if self.workers.get(worker) is end:
                self._forget_worker(end)

    async def serve_coordinator(self, socket: Socket) -> str:
        """Until the connection is over; returns why."""
        self._names += 1
        end = CoordinatorEnd(self._channel(socket), f"coordinator-{self._names}")
        self.coordinators[end.name] = end
        end.channel.post_urgent(Hello(PROTOCOL, end.name, self.epoch))
        try:
            return await self._run(
                end.channel, lambda h, p: self._from_coordinator(end, h, p), end.name
            )
        finally:
            del self.coordinators[end.name]
            for number in end.calls.values():
                self._drop_call(number)

    def figures(self) -> Mapping[str, float]:
        """For `/metrics`."""
        return {
            "workers": len(self.workers),
            "coordinators": len(self.coordinators),
            "calls_open": len(self._calls),
            "queued_bytes": sum(channel.bytes_queued for channel in self._channels()),
            "partial_bytes": self._partial_bytes,
            **{f"{name}_total": getattr(self.counts, name) for name in Counts.__slots__},
            **self.port.figures(),
        }

    # ------------------------------------------------------------------ from coordinators

    def _from_coordinator(self, end: CoordinatorEnd, header: Frame, payload: memoryview) -> None:
        match header:
            case Call():
                self._take_call(end, header, payload)
            case Drop(request):
                number = end.calls.pop(request, None)
                if number is not None:
                    self._drop_call(number)
            case _:
                raise FrameError(f"a coordinator sends calls and drops, no {_kind(header)}")

    def _take_call(self, end: CoordinatorEnd, call: Call, payload: memoryview) -> None:
        self._sweep()
        if call.request in end.calls:
            raise FrameError(f"request {call.request} is open; a number is used once at a time")
        self.counts.calls += 1
        worker, session = WorkerId(call.worker), Session(call.session)
        if len(end.calls) >= self.limits.calls_max:
            self._refuse(end, call.request, "busy", "too many of your calls are open")
            return
        self._numbers += 1
        number = self._numbers
        expires_at = self._clock() + call.deadline_ms / 1000 + self.limits.late_s
        self._calls[number] = OpenCall(end, call.request, worker, session, expires_at)
        end.calls[call.request] = number
        fault: Fault | None
        here = self.workers.get(worker)
        if here is not None and here.session == session:
            fault = self._to_worker(here, Origin(HERE, number), call, payload)
        else:
            fault = self.port.call(number, call, payload)
        if fault is not None:
            self.deliver_answer(number, fault, b"")

    def _refuse(
        self, end: CoordinatorEnd, request: int, why: Literal["busy", "closed"], detail: str
    ) -> None:
        self._count_fault(why)
        end.channel.post_urgent(Fault(request, why, detail))

    def _count_fault(self, why: str) -> None:
        if why == "busy":
            self.counts.busy += 1
        elif why == "closed":
            self.counts.closed += 1

    # ------------------------------------------------------------------ to and from workers

    def _to_worker(
        self, end: WorkerEnd, origin: Origin, call: Call, payload: Buffer
    ) -> Fault | None:
        """Queue a call; a `Fault` if there is no room."""
        if len(end.due) >= self.limits.due_max:
            return Fault(call.request, "busy", "too many calls wait for that worker")
        end.requests = (end.requests + 1) % REQUESTS
        request = end.requests
        queued = end.channel.post(msgspec.structs.replace(call, request=request), payload)
        if queued is None:
            return Fault(call.request, "busy", "the queue to that worker is full")
        expires_at = self._clock() + call.deadline_ms / 1000 + self.limits.late_s
        end.due[request] = Due(origin, queued, expires_at)
        self._placed[origin] = end, request
        return None

    def _from_worker(self, end: WorkerEnd, header: Frame, payload: memoryview) -> None:
        match header:
            case Reply(request) | Fault(request):
                due = end.due.pop(request, None)
                if due is None:
                    self._count_stray(end)
                    return
                end.strays = 0
                del self._placed[due.origin]
                self._answer(due.origin, header, payload)
            case _:
                raise FrameError(f"a worker sends replies and faults, no {_kind(header)}")

    def _count_stray(self, end: WorkerEnd) -> None:
        self.counts.strays += 1
        end.strays += 1
        if end.strays > self.limits.strays_max:
            raise FrameError(f"{end.strays} replies in a row answer nothing that is open")

    def _answer(self, origin: Origin, header: Reply | Fault, payload: Buffer) -> None:
        if origin.relay == HERE:
            self.deliver_answer(origin.number, header, payload)
        else:
            self.port.answer(origin, header, payload)

    def _drop_call(self, number: int) -> None:
        """Its coordinator does not wait any more."""
        call = self._calls.pop(number, None)
        if call is None:
            return
        here = self.workers.get(call.worker)
        if here is not None and here.session == call.session:
            self.deliver_drop(Origin(HERE, number))
        else:
            self.port.drop(number, call.worker, call.session)

    def _forget_worker(self, end: WorkerEnd) -> None:
        """The connection is over: every call to it is answered, everybody is told."""
        del self.workers[end.worker]
        self.port.detach(end.worker, end.session)
        due = list(end.due.values())
        end.due.clear()
        for each in due:
            del self._placed[each.origin]
            fault = Fault(0, "closed", "the worker's connection is over")
            self._answer(each.origin, fault, b"")
        self.deliver_attached(end.worker, end.session, is_here=False)

    # ------------------------------------------------------------------ the port's sink

    def deliver_call(self, origin: Origin, call: Call, payload: Buffer) -> None:
        end = self.workers.get(WorkerId(call.worker))
        fault: Fault | None
        if end is None or end.session != call.session:
            fault = Fault(0, "closed", "that worker is not here under that session")
        elif origin in self._placed:
            return  # Doubled on the way.
        else:
            fault = self._to_worker(end, origin, call, payload)
        if fault is not None:
            self.port.answer(origin, fault, b"")

    def deliver_drop(self, origin: Origin) -> None:
        end, request = self._placed.pop(origin, (None, 0))
        if end is not None and not end.channel.withdraw(end.due.pop(request).queued):
            end.channel.post_urgent(Drop(request))

    def deliver_answer(self, number: int, header: Reply | Fault, payload: Buffer) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return
        end = call.end
        del end.calls[call.request]
        if isinstance(header, Fault):
            self._count_fault(header.why)
            end.channel.post_urgent(msgspec.structs.replace(header, request=call.request))
            return
        self.counts.replies += 1
        reply = msgspec.structs.replace(header, request=call.request)
        if end.channel.post(reply, payload) is None:
            self._refuse(end, call.request, "busy", "your queue is full; read faster")

    def deliver_attached(self, worker: WorkerId, session: Session, *, is_here: bool) -> None:
        kind = Attached if is_here else Detached
        for end in self.coordinators.values():
            end.channel.post_urgent(kind(worker, session))

    # ------------------------------------------------------------------ inside

    def _channels(self) -> list[Channel]:
        workers = [end.channel for end in self.workers.values()]
        return workers + [end.channel for end in self.coordinators.values()]

    def _channel(self, socket: Socket) -> Channel:
        return Channel(socket, self.limits, self._hold)

    async def _run(
        self, channel: Channel, take: Callable[[Frame, memoryview], None], name: str
    ) -> str:
        self._watch.add(channel)
        try:
            why = await channel.run(take)
        finally:
            self._watch.remove(channel)
        if channel.code != CLOSE_GOING_AWAY:
            self.counts.cut_off += channel.code == CLOSE_POLICY or channel.is_aborted
        log_event(logger, "connection over", peer=name, why=why)
        return why

    def _hold(self, channel: Channel, held: int) -> None:
        """Keep account of unfinished frames; beyond the limit the largest holder goes."""
        before = self._partial.pop(channel, 0)
        if held:
            self._partial[channel] = held
        self._partial_bytes += held - before
        if self._partial_bytes > self.limits.partial_bytes_max:
            largest = max(self._partial, key=self._partial.__getitem__)
            largest.end("too many frames are begun and not complete", CLOSE_POLICY)
            self._partial_bytes -= self._partial.pop(largest)

    def _sweep(self) -> None:
        """Forget, once a second, what nobody will answer any more."""
        now = self._clock()
        if now - self._swept_at < 1.0:
            return
        self._swept_at = now
        for number in [n for n, call in self._calls.items() if call.expires_at < now]:
            call = self._calls.pop(number)
            del call.end.calls[call.request]
            self.counts.expired += 1
        for end in self.workers.values():
            for request in [r for r, due in end.due.items() if due.expires_at < now]:
                del self._placed[end.due.pop(request).origin]


def _kind(header: Frame) -> str:
    return type(header).__name__.lower()
