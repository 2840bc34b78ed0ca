"""Two relays joined by a real NATS server: workers dial one, coordinators the other."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvasir_rt.bridge.server import listen
from kvasir_rt.relay.nats_port import NatsPort, PortError
from kvasir_rt.swarm.frames import Attached, Call, Detached, Drop, Fault, Reply
from tests.rt.swarm.relays import (
    SERVICE,
    WORKER,
    End,
    LiveRelay,
    call_of,
    dialled,
    exchange,
    live_relay,
    reply_to,
)
from tests.rt.swarm.swarms import end_process, wait_for

SERVER = shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin")
pytestmark = pytest.mark.skipif(
    SERVER is None, reason="nats-server is not installed (Debian: apt-get install nats-server)"
)


class NatsServer:
    def __init__(self, log: Path) -> None:
        with listen("127.0.0.1", 0) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"nats://127.0.0.1:{self.port}"
        self._log = log
        self.start()

    def start(self) -> None:
        assert SERVER is not None
        self.process = subprocess.Popen(
            [SERVER, "-a", "127.0.0.1", "-p", str(self.port), "-l", str(self._log)]
        )
        wait_for("NATS is ready", lambda: "Server is ready" in self._read_log(), 20)

    def stop(self) -> None:
        end_process(self.process)
        self._log.unlink(missing_ok=True)

    def _read_log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path / "nats.log")
    try:
        yield server
    finally:
        server.stop()


@asynccontextmanager
async def two_relays(nats: NatsServer) -> AsyncIterator[tuple[LiveRelay, LiveRelay]]:
    async with (
        live_relay(port=NatsPort(nats.url)) as near,
        live_relay(port=NatsPort(nats.url)) as far,
    ):
        yield near, far


def is_joined(relay: LiveRelay) -> bool:
    return bool(relay.relay.figures()["nats_connected"])


async def attached(coordinator: End, session: int = 1) -> None:
    found, _ = await coordinator.next(Attached)
    assert (found.worker, found.session) == (WORKER, session)


def test_a_call_crosses_relays_and_its_answer_comes_back(nats: NatsServer) -> None:
    async def story() -> None:
        async with two_relays(nats) as (near, far), dialled(near, SERVICE) as coordinator:
            async with dialled(far, "worker-token", 1) as worker:
                await attached(coordinator)
                header, payload = call_of(7, rows=60, hidden=4000)  # Four chunks.
                payload = bytes(range(250)) * (len(payload) // 250) + bytes(len(payload) % 250)
                coordinator.channel.post(header, payload)
                asked, found = await worker.next(Call)
                assert found == payload
                worker.channel.post(*reply_to(asked, payload[: 60 * 4000 * 4]))
                answer, values = await coordinator.next(Reply)
                assert answer.request == 7
                assert values == payload[: 60 * 4000 * 4]
                for request in range(20):
                    assert isinstance(await exchange(coordinator, worker, request), Reply)
            assert (await coordinator.next(Detached))[0].worker == WORKER

    asyncio.run(story())


def test_a_call_to_nobody_is_answered_at_once(nats: NatsServer) -> None:
    async def story() -> None:
        async with two_relays(nats) as (near, _), dialled(near, SERVICE) as coordinator:
            started = time.monotonic()
            coordinator.channel.post(*call_of(1, deadline_ms=60_000))
            fault, _payload = await coordinator.next(Fault)
            assert (fault.request, fault.why) == (1, "closed")
            coordinator.channel.post(*call_of(2, worker="not>a.subject*"))
            assert (await coordinator.next(Fault))[0].why == "closed"
            assert time.monotonic() - started < 5

    asyncio.run(story())


def test_a_worker_that_goes_and_a_caller_that_drops_are_heard_across(nats: NatsServer) -> None:
    async def story() -> None:
        async with two_relays(nats) as (near, far), dialled(near, SERVICE) as coordinator:
            async with dialled(far, "worker-token", 1) as worker:
                await attached(coordinator)
                coordinator.channel.post(*call_of(1))
                asked, _ = await worker.next(Call)
                coordinator.channel.post_urgent(Drop(1))
                assert (await worker.next(Drop))[0].request == asked.request
                coordinator.channel.post(*call_of(2))
                await worker.next(Call)
            fault, _ = await coordinator.next(Fault)
            assert (fault.request, fault.why) == (2, "closed")

    asyncio.run(story())


def test_without_nats_local_workers_still_serve_and_its_return_heals(nats: NatsServer) -> None:
    async def story() -> None:
        async with (
            two_relays(nats) as (near, far),
            dialled(near, SERVICE) as coordinator,
            dialled(far, SERVICE) as other,
            dialled(far, "worker-token", 1) as worker,
        ):
            await attached(coordinator)
            await asyncio.to_thread(nats.stop)
            assert isinstance(await exchange(other, worker, 1), Reply)
            await asyncio.to_thread(wait_for, "near knows", lambda: not is_joined(near), 20)
            coordinator.channel.post(*call_of(1))
            assert (await coordinator.next(Fault))[0].why == "busy"
            await asyncio.to_thread(nats.start)
            await asyncio.to_thread(
                wait_for, "both are back", lambda: is_joined(near) and is_joined(far), 30
            )
            assert isinstance(await exchange(coordinator, worker, 3), Reply)

    asyncio.run(story())


def test_nonsense_on_the_subjects_is_dropped(nats: NatsServer) -> None:
    async def story() -> None:
        from nats.aio.client import Client

        async with (
            two_relays(nats) as (near, far),
            dialled(near, SERVICE) as coordinator,
            dialled(far, "worker-token", 1) as worker,
        ):
            await attached(coordinator)
            stranger = Client()
            await stranger.connect(nats.url)
            subject = f"kvasir.relay.v1.w.{WORKER}.1"
            port = near.relay.port
            assert isinstance(port, NatsPort)
            for data in (b"", b"x" * 40, b"\0" * 200, b"x" * (256 << 10)):
                await stranger.publish(subject, data)
                await stranger.publish(subject, data, reply="kvasir.relay.v1.r.nobody.1")
                await stranger.publish(subject, data, reply=f"kvasir.relay.v1.r.{'c' * 32}.1")
                await stranger.publish("kvasir.relay.v1.e", data)
                await stranger.publish(f"kvasir.relay.v1.r.{port.name}.1", data)
            await stranger.flush()
            assert isinstance(await exchange(coordinator, worker, 1), Reply)
            await stranger.close()

    asyncio.run(story())


def test_a_server_that_is_not_there_is_named() -> None:
    async def story() -> None:
        port = NatsPort("nats://user:secret@127.0.0.1:1")
        with pytest.raises(PortError) as refused:
            async with live_relay(port=port):
                pass
        assert "127.0.0.1:1" in str(refused.value)
        assert "secret" not in str(refused.value)

    asyncio.run(story())
