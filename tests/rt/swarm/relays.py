"""A relay on loopback in the test's own event loop, with a gate that knows a few tokens."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

from kvasir_core.swarm.words import Session, WorkerId
from kvasir_rt.bridge.errors import ApiError
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.server import listen
from kvasir_rt.hub.server import HubServer
from kvasir_rt.relay.app import RelayApp
from kvasir_rt.relay.channel import Channel, Watch
from kvasir_rt.relay.dial import RELAY_PATH, dial
from kvasir_rt.relay.limits import RelayLimits
from kvasir_rt.relay.port import RelayPort
from kvasir_rt.relay.relay import Relay
from kvasir_rt.swarm.frames import Buffer, Call, Fault, Frame, Hello, Reply

SERVICE = "service-token-of-the-tests"
WORKER = WorkerId("a1" * 16)
OTHER = WorkerId("b2" * 16)


class TableGate:
    """Tokens by table; each session is admitted once."""

    def __init__(self, tokens: dict[str, WorkerId]) -> None:
        self.tokens = tokens
        self.open: dict[WorkerId, Session] = {}
        self.closed: list[tuple[WorkerId, Session]] = []
        self.asked = 0

    async def admit_coordinator(self, token: str) -> None:
        self.asked += 1
        if token != SERVICE:
            raise ApiError(401, "Not the service token.", code="unauthenticated")

    async def open_worker(self, token: str, session: Session) -> WorkerId:
        self.asked += 1
        worker = self.tokens.get(token)
        if worker is None:
            raise ApiError(401, "Nobody's token.", code="unauthenticated")
        if session <= self.open.get(worker, -1):
            raise ApiError(409, "Not the current generation.", code="stale")
        self.open[worker] = session
        return worker

    async def close_worker(self, worker: WorkerId, session: Session) -> None:
        self.closed.append((worker, session))


class LiveRelay:
    def __init__(self, app: RelayApp, gate: TableGate, address: tuple[str, int]) -> None:
        self.app = app
        self.relay = app.relay
        self.gate = gate
        self.address = address
        self.url = f"ws://{address[0]}:{address[1]}{RELAY_PATH}"


@asynccontextmanager
async def live_relay(
    limits: RelayLimits | None = None, port: RelayPort | None = None
) -> AsyncIterator[LiveRelay]:
    gate = TableGate({"worker-token": WORKER, "other-token": OTHER})
    app = RelayApp(Relay(limits, port), gate)
    with listen("127.0.0.1", 0) as listener:
        server = HubServer(Starlette(routes=[WebSocketRoute(RELAY_PATH, app)]), listener, Limits())
        await app.relay.open()
        serving = asyncio.create_task(server.serve())
        try:
            yield LiveRelay(app, gate, listener.getsockname()[:2])
        finally:
            await app.close()
            server.stop()
            await serving


class End:
    """One end of the relay, driven by a test: frames in arrival order."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.frames: asyncio.Queue[tuple[Frame, bytes]] = asyncio.Queue()

    def take(self, header: Frame, payload: memoryview) -> None:
        self.frames.put_nowait((header, bytes(payload)))

    async def next(self, *kinds: type[Any]) -> tuple[Any, bytes]:
        """The next frame of these kinds."""
        async with asyncio.timeout(10):
            while True:
                header, payload = await self.frames.get()
                if not kinds or isinstance(header, kinds):
                    return header, payload


@asynccontextmanager
async def dialled(
    relay: LiveRelay, token: str, session: int | None = None, limits: RelayLimits | None = None
) -> AsyncIterator[End]:
    channel = Channel(await dial(relay.url, token, session), limits or RelayLimits())
    end = End(channel)
    watch = Watch()
    watch.add(channel)
    running = asyncio.create_task(channel.run(end.take))
    try:
        await end.next(Hello)
        yield end
    finally:
        channel.end("the test is over")
        await running
        await watch.close()


def call_of(
    request: int, worker: str = WORKER, session: int = 1, rows: int = 1, hidden: int = 4,
    deadline_ms: int = 2000,
) -> tuple[Call, bytes]:  # fmt: skip
    header = Call(request, worker, session, "tiny", 0, "f32", rows, hidden, rows, deadline_ms)
    return header, bytes(rows * (12 + 4 * hidden))


def reply_to(call: Call, payload: Buffer | None = None) -> tuple[Reply, Buffer]:
    reply = Reply(call.request, call.dtype, call.rows, call.hidden, 1)
    return reply, payload if payload is not None else bytes(4 * call.rows * call.hidden)


async def exchange(coordinator: End, worker: End, request: int) -> Reply | Fault:
    """A whole valid call, answered."""
    coordinator.channel.post(*call_of(request))
    asked, _ = await worker.next(Call)
    worker.channel.post(*reply_to(asked))
    answer, _ = await coordinator.next(Reply, Fault)
    assert isinstance(answer, Reply | Fault)
    return answer


@contextmanager
def raw_socket(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=10) as connection:
        yield connection
