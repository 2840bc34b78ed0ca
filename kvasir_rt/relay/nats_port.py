"""Joins relays through a NATS server: beyond one relay, an existing engine.

Workers and coordinators dial any relay and never see NATS; its credentials belong to the relays,
who trust each other. Subjects, below a prefix:

    PREFIX.w.WORKER.SESSION    calls and drops, taken by the relay that holds the worker
    PREFIX.r.RELAY.NUMBER      answers; RELAY is the coordinator's relay, NUMBER its call
    PREFIX.e                   who came and went
    PREFIX.s.RELAY             nobody listens: as the "reply" of an answer it names the sender

A message is one chunk of a frame, as on a WebSocket, below NATS's limit of 1 MiB. A call carries
its answer's subject, so a call to nobody is answered by the NATS server at once ("no responders").
Publishing never waits: what finds no room is answered `busy`.
"""

import asyncio
import contextlib
import itertools
import logging
import re
import secrets
from collections import OrderedDict
from typing import Any, Final

import msgspec
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

from kvasir_core.errors import KvasirError
from kvasir_core.swarm.words import Session, WorkerId
from kvasir_rt.logs import log_event
from kvasir_rt.relay.port import Origin, Sink
from kvasir_rt.swarm.frames import (
    CHUNK_BYTES_MAX,
    Attached,
    Buffer,
    Call,
    Detached,
    Drop,
    Fault,
    Frame,
    FrameError,
    Joiner,
    Reply,
    chunks,
    pack,
    unpack,
)

logger = logging.getLogger("kvasir.relay")

PREFIX: Final = "kvasir.relay.v1"
NAME = re.compile(r"[0-9a-f]{32}")
SOURCES_MAX = 4096  # Unfinished frames kept, by who sends on what; the oldest is forgotten.
OUT_BYTES_MAX = 64 << 20  # Waiting for the NATS server.
CONNECT_S_MAX = 5
NO_RESPONDERS = "503"


class PortError(KvasirError):
    """The NATS server cannot be used; the message names it and why."""

    exit_status = 1


class NatsPort:
    """A relay's place among others.

    Args:
        url: `nats://HOST:PORT` or `tls://`; user and password or a token may be in it.
        credentials: A NATS credentials file instead.
    """

    def __init__(self, url: str, credentials: str | None = None) -> None:
        self._url = url
        self._shown = re.sub(r"//[^@/]*@", "//...@", url)
        self._credentials = credentials
        self.name = secrets.token_hex(16)
        self._client = Client()
        self._sink: Sink | None = None
        self._subscriptions: dict[tuple[WorkerId, Session], Any] = {}
        self._joiners: OrderedDict[tuple[str, str], Joiner] = OrderedDict()
        self._out: asyncio.Queue[tuple[str, str, bytes]] = asyncio.Queue()
        self._out_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._numbers = itertools.count(1)
        self._problem = ""
        self._sender = f"{PREFIX}.s.{self.name}"
        self._sent = self._taken = self._malformed = self._lost = 0

    async def open(self, sink: Sink) -> None:
        self._sink = sink
        try:
            async with asyncio.timeout(2 * CONNECT_S_MAX):
                await self._client.connect(
                    self._url,
                    name=f"kvasir-relay-{self.name[:8]}",
                    user_credentials=self._credentials,
                    allow_reconnect=False,  # The first time: a wrong address is told at once.
                    max_reconnect_attempts=1,
                    reconnect_time_wait=1,
                    connect_timeout=CONNECT_S_MAX,
                    error_cb=self._on_error,
                )
            self._client.options.update(allow_reconnect=True, max_reconnect_attempts=-1)
            await self._client.subscribe(f"{PREFIX}.r.{self.name}.*", cb=self._take_answer)
            await self._client.subscribe(f"{PREFIX}.e", cb=self._take_event)
            await self._client.flush(timeout=CONNECT_S_MAX)
        except (NatsError, OSError, TimeoutError, ValueError) as error:
            await self._close_client()
            why = self._problem or str(error) or type(error).__name__
            raise PortError(f"NATS at {self._shown}: {why}") from None
        limit = self._client.max_payload
        if limit < CHUNK_BYTES_MAX + 1024:
            await self._close_client()
            raise PortError(
                f"NATS at {self._shown} takes messages of {limit} bytes; chunks of "
                f"{CHUNK_BYTES_MAX} are sent: raise its max_payload"
            )
        self._tasks = [asyncio.create_task(self._publish_all())]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._close_client()

    def attach(self, worker: WorkerId, session: Session) -> None:
        self._spawn(self._subscribe(worker, session))

    def detach(self, worker: WorkerId, session: Session) -> None:
        subscription = self._subscriptions.pop((worker, session), None)
        if subscription is not None:
            self._spawn(_unsubscribe(subscription))
        self._post(f"{PREFIX}.e", Detached(worker, session), b"", self._sender)

    def call(self, number: int, call: Call, payload: Buffer) -> Fault | None:
        if NAME.fullmatch(call.worker) is None:
            return Fault(call.request, "closed", "there is no worker of that name")
        header = msgspec.structs.replace(call, request=number)
        if not self._post(
            _subject(call.worker, call.session), header, payload, self._inbox(number)
        ):
            return Fault(call.request, "busy", "the queue to other relays is full")
        return None

    def drop(self, number: int, worker: WorkerId, session: Session) -> None:
        if NAME.fullmatch(worker) is not None:
            self._post(_subject(worker, session), Drop(number), b"", self._inbox(number))

    def answer(self, origin: Origin, header: Reply | Fault, payload: Buffer) -> None:
        numbered = msgspec.structs.replace(header, request=origin.number)
        subject = f"{PREFIX}.r.{origin.relay}.{origin.number}"
        if not self._post(subject, numbered, payload, self._sender):
            self._lost += 1  # The caller's deadline covers it.

    def figures(self) -> dict[str, float]:
        return {
            "nats_connected": float(self._client.is_connected),
            "nats_sent_total": self._sent,
            "nats_taken_total": self._taken,
            "nats_lost_total": self._lost,
            "nats_malformed_total": self._malformed,
            "nats_queued_bytes": self._out_bytes,
        }

    # ------------------------------------------------------------------ out

    def _inbox(self, number: int) -> str:
        return f"{PREFIX}.r.{self.name}.{number}"

    def _post(self, subject: str, header: Frame, payload: Buffer, reply: str = "") -> bool:
        """Queue a frame; False if there is no room or no connection."""
        frame = pack(header, payload)
        if self._out_bytes + len(frame) > OUT_BYTES_MAX or not self._client.is_connected:
            return False
        for message in chunks(frame, next(self._numbers)):
            self._out_bytes += len(message)
            self._out.put_nowait((subject, reply, message))
        return True

    async def _publish_all(self) -> None:
        while True:
            subject, reply, message = await self._out.get()
            self._out_bytes -= len(message)
            try:
                await self._client.publish(subject, message, reply)
                if self._client.pending_data_size > CHUNK_BYTES_MAX:
                    await self._client.flush(timeout=CONNECT_S_MAX)
                self._sent += 1
            except (NatsError, OSError, TimeoutError):
                self._lost += 1  # The call's deadline covers it.

    # ------------------------------------------------------------------ in

    async def _subscribe(self, worker: WorkerId, session: Session) -> None:
        try:
            subscription = await self._client.subscribe(
                _subject(worker, session), cb=self._take_call
            )
            self._subscriptions[worker, session] = subscription
            await self._client.flush(timeout=CONNECT_S_MAX)
        except (NatsError, OSError, TimeoutError) as error:
            log_event(logger, "a worker cannot be reached from other relays",
                      level=logging.WARNING, worker=worker, why=str(error))  # fmt: skip
            return
        self._post(f"{PREFIX}.e", Attached(worker, session), b"", self._sender)

    async def _take_call(self, message: Msg) -> None:
        """Calls and drops for a worker of ours."""
        origin = _origin(message.reply)
        if origin is None or origin.relay == self.name:
            self._malformed += 1
            return
        found = self._join(message)
        if found is None or self._sink is None:
            return
        header, payload = found
        if isinstance(header, Call) and header.request == origin.number:
            self._sink.deliver_call(origin, header, payload)
        elif isinstance(header, Drop) and header.request == origin.number:
            self._sink.deliver_drop(origin)
        else:
            self._malformed += 1

    async def _take_answer(self, message: Msg) -> None:
        number = int(message.subject.rpartition(".")[2])
        assert self._sink is not None
        if message.headers and message.headers.get("Status") == NO_RESPONDERS:
            self._sink.deliver_answer(number, Fault(number, "closed", "no relay has it"), b"")
            return
        found = self._join(message)
        if found is None:
            return
        header, payload = found
        if isinstance(header, Reply | Fault) and header.request == number:
            self._sink.deliver_answer(number, header, payload)
        else:
            self._malformed += 1

    async def _take_event(self, message: Msg) -> None:
        found = self._join(message)
        if found is None or self._sink is None:
            return
        header, _ = found
        if isinstance(header, Attached | Detached):
            key = WorkerId(header.worker), Session(header.session)
            if key not in self._subscriptions:  # Our own are known already.
                self._sink.deliver_attached(*key, is_here=isinstance(header, Attached))

    def _join(self, message: Msg) -> tuple[Frame, memoryview] | None:
        """The frame that a chunk completes. A relay that sends nonsense starts anew."""
        self._taken += 1
        source = message.subject, message.reply
        joiner = self._joiners.pop(source, None) or Joiner()
        self._joiners[source] = joiner
        if len(self._joiners) > SOURCES_MAX:
            self._joiners.popitem(last=False)
        try:
            frame = joiner.take(message.data)
            if frame is None:
                return None
            if not joiner.bytes_held:
                del self._joiners[source]
            return unpack(frame)
        except FrameError as error:
            self._malformed += 1
            self._joiners.pop(source, None)
            log_event(logger, "a relay sent nonsense", level=logging.WARNING, why=str(error))
            return None

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)

    async def _on_error(self, error: Exception) -> None:
        problem = str(error) or type(error).__name__
        if problem != self._problem:
            self._problem = problem
            log_event(logger, "NATS", level=logging.WARNING, why=problem)

    async def _close_client(self) -> None:
        with contextlib.suppress(NatsError, OSError, TimeoutError):
            await self._client.close()


def _subject(worker: str, session: int) -> str:
    return f"{PREFIX}.w.{worker}.{session}"


def _origin(reply: str) -> Origin | None:
    """Of a call's answer subject; None if it is none of ours."""
    if not reply.startswith(f"{PREFIX}.r."):
        return None
    relay, _, number = reply.removeprefix(f"{PREFIX}.r.").partition(".")
    is_number = number.isascii() and number.isdecimal() and len(number) <= 19
    if NAME.fullmatch(relay) is None or not is_number:
        return None
    return Origin(relay, int(number))


async def _unsubscribe(subscription: Any) -> None:
    with contextlib.suppress(NatsError, OSError, ValueError):
        await subscription.unsubscribe()
