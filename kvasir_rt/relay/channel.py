"""One connection that carries frames both ways, and notices when the other end is gone.

Used alike by the relay, the worker and the coordinator. A peer is dead after `dead_s` without a
message, or when it does not take ours for `send_s_max`; then the connection is aborted, because a
close handshake with a frozen peer does not end. Both are judged by `Watch`, which knows when this
process itself slept: after that nobody is judged before another full limit (law M10).
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

from kvasir_core.errors import KvasirError
from kvasir_rt.relay.limits import RelayLimits
from kvasir_rt.relay.outbox import Outbox
from kvasir_rt.swarm.frames import (
    Beat,
    Buffer,
    Frame,
    FrameError,
    Joiner,
    pack,
    unpack,
)

CLOSE_NORMAL, CLOSE_GOING_AWAY, CLOSE_POLICY, CLOSE_SUPERSEDED = 1000, 1001, 1008, 4001

_BEAT = pack(Beat())

Take = Callable[[Frame, memoryview], None]


class ChannelClosed(KvasirError):
    """The connection is over; the message says why."""


class Socket(Protocol):
    """What a channel needs of a WebSocket. Each raises `ChannelClosed` when it is over."""

    async def send(self, message: bytes) -> None: ...

    async def receive(self) -> Buffer: ...

    async def close(self, code: int, reason: str) -> None: ...

    def abort(self) -> None: ...


class Channel:
    """Frames over a socket. Everything but `run` and `close` returns at once.

    Args:
        socket: Connected.
        limits: Of queues and times.
        held: Called with the bytes that this connection's unfinished frames hold, after a change.
    """

    def __init__(
        self,
        socket: Socket,
        limits: RelayLimits,
        held: Callable[["Channel", int], None] | None = None,
    ) -> None:
        self._socket = socket
        self._limits = limits
        self._held = held
        self._joiner = Joiner()
        self._outbox = Outbox(
            limits.queue_bytes_max, limits.queue_frames_max, limits.queue_urgent_max
        )
        self._wake = asyncio.Event()
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.code = CLOSE_NORMAL
        self.is_aborted = False
        self._is_gone = False  # The peer, so that there is nobody to say goodbye to.
        self._tried_at: float | None = None  # A send is under way since.
        now = time.monotonic()
        self._heard_at = now
        self._beat_at = now

    @property
    def is_over(self) -> bool:
        return self._over.done()

    @property
    def why(self) -> str:
        """Why it is over; empty while it is not."""
        return self._over.result() if self._over.done() else ""

    @property
    def bytes_queued(self) -> int:
        return self._outbox.bytes_held

    def post(self, header: Frame, payload: Buffer = b"") -> int | None:
        """Queue a frame that may be large: a number for `withdraw`, or None if there is no room."""
        number = self._outbox.post(pack(header, payload))
        self._wake.set()
        return number

    def post_urgent(self, header: Frame) -> None:
        """Queue a small frame; a peer that lets thousands of them wait is cut off."""
        if self.is_over:
            return
        if not self._outbox.post_urgent(pack(header)):
            self.abort("it reads nothing")
        self._wake.set()

    def withdraw(self, number: int) -> bool:
        return self._outbox.withdraw(number)

    def end(self, why: str, code: int = CLOSE_NORMAL) -> None:
        """Say goodbye and end."""
        if not self._over.done():
            self.code = code
            self._over.set_result(why)

    def abort(self, why: str) -> None:
        """End without a word."""
        self._is_gone = self.is_aborted = True
        self.end(why)
        self._socket.abort()

    async def run(self, take: Take) -> str:
        """Carry frames until it is over; returns why. `take` gets every frame but beats."""
        tasks = [
            asyncio.create_task(self._guard(self._read(take))),
            asyncio.create_task(self._guard(self._write())),
        ]
        try:
            await asyncio.shield(self._over)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not self._over.done():
                self.end("this end was stopped", CLOSE_GOING_AWAY)
            if self._held is not None:
                self._held(self, 0)
            await self._say_goodbye()
        return self.why

    def check(self, now: float, *, slept: bool) -> None:
        """Judge the peer; `Watch` calls it. `slept`: this process did, until now."""
        if slept:
            self._heard_at = now
            self._tried_at = None if self._tried_at is None else now
        if self._tried_at is not None and now - self._tried_at > self._limits.send_s_max:
            self.abort(f"it did not take a message within {self._limits.send_s_max:g} s")
        elif now - self._heard_at > self._limits.dead_s:
            self.abort(f"nothing was heard of it for {self._limits.dead_s:g} s")
        elif now - self._beat_at >= self._limits.beat_s and not self.is_over:
            self._beat_at = now
            if len(self._outbox) == 0:  # What waits says as much.
                self._outbox.post_urgent(_BEAT)
                self._wake.set()

    async def _guard(self, work: Awaitable[None]) -> None:
        """Whatever ends one direction ends both."""
        try:
            await work
        except ChannelClosed as closed:
            self._is_gone = True
            self.end(str(closed))
        except FrameError as error:
            self.end(str(error), CLOSE_POLICY)

    async def _read(self, take: Take) -> None:
        while not self.is_over:
            message = await self._socket.receive()
            self._heard_at = time.monotonic()
            frame = self._joiner.take(message)
            if self._held is not None:
                self._held(self, self._joiner.bytes_held)
            if frame is None:
                continue
            header, payload = unpack(frame)
            if not isinstance(header, Beat):
                take(header, payload)

    async def _write(self) -> None:
        while True:
            message = self._outbox.take()
            if message is None:
                self._wake.clear()
                await self._wake.wait()
                continue
            self._tried_at = time.monotonic()
            await self._socket.send(message)
            self._tried_at = None
            self._beat_at = time.monotonic()

    async def _say_goodbye(self) -> None:
        if self._is_gone:
            self._socket.abort()
            return
        with contextlib.suppress(ChannelClosed, TimeoutError):
            async with asyncio.timeout(self._limits.close_s):
                await self._socket.close(self.code, self.why[:100])
                return
        self._socket.abort()


class Watch:
    """Judges all channels of a process, at `tick_s`; one timer however many there are."""

    def __init__(self, tick_s: float = 0.25, sleep_s: float = 2.0) -> None:
        self._tick_s = tick_s
        self._sleep_s = sleep_s  # A tick so late: the process slept.
        self._channels: dict[Channel, None] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, channel: Channel) -> None:
        self._channels[channel] = None
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run())

    def remove(self, channel: Channel) -> None:
        self._channels.pop(channel, None)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def _run(self) -> None:
        before = time.monotonic()
        while True:
            await asyncio.sleep(self._tick_s)
            now = time.monotonic()
            slept = now - before > self._sleep_s
            before = now
            for channel in list(self._channels):
                channel.check(now, slept=slept)
