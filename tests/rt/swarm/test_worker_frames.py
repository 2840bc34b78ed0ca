"""A worker survives whatever a relay sends: it closes, dials again, and serves the next call."""

import asyncio
import struct
import threading
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from kvasir_rt.swarm.frames import Beat, Call, Joiner, Reply, chunks, pack, unpack
from kvasir_rt.worker import pause as pauses
from tests.rt.swarm.swarms import TINY, live_swarm, wait_for
from tests.rt.swarm.test_relay_hostile import HOSTILE_MESSAGES


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pauses, "PAUSE_S", 0.05)
    monkeypatch.setattr(pauses, "PAUSE_S_MAX", 0.05)


class HostileRelay:
    """On each connection: a valid call, which must be answered, then one hostile message."""

    def __init__(self, messages: dict[str, list[bytes | str]]) -> None:
        self._left = list(messages.items())
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self.node: Future[str] = Future()
        self.sent: list[str] = []
        self.answers = 0
        self.url = ""

    def __enter__(self) -> Self:
        self._thread.start()
        self._started.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        async with serve(
            self._meet, "127.0.0.1", 0, compression=None, ping_interval=None
        ) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            self.url = f"ws://127.0.0.1:{port}/api/expert-relay"
            self._started.set()
            await self._stop.wait()

    async def _meet(self, connection: ServerConnection) -> None:
        with suppress(ConnectionClosed):
            await self._call(connection)
            self.answers += 1
            if not self._left:
                await connection.wait_closed()
                return
            name, messages = self._left.pop(0)
            self.sent.append(name)
            for message in messages:
                await connection.send(message)
            async with asyncio.timeout(10):  # The worker closes.
                while True:
                    await connection.recv()

    async def _call(self, connection: ServerConnection) -> None:
        assert connection.request is not None
        session = int(connection.request.headers["Kvasir-Session"])
        node = await asyncio.wrap_future(self.node)
        header = Call(1, node, session, "tiny", 0, "f32", 1, TINY.hidden, 1, 5000)
        payload = struct.pack("<IIf", 0, 3, 1.0) + bytes(4 * TINY.hidden)
        for message in chunks(pack(header, payload), 1):
            await connection.send(message)
        joiner = Joiner()
        async with asyncio.timeout(10):
            while True:
                message_ = await connection.recv()
                assert isinstance(message_, bytes)
                frame = joiner.take(message_)
                if frame is not None and isinstance(unpack(frame)[0], Reply):
                    return


def test_hostile_frames_of_a_relay_end_a_connection_and_no_worker(tmp_path: Path) -> None:
    hostile: dict[str, list[bytes | str]] = {
        **HOSTILE_MESSAGES,
        "a frame that only relays read": [_message(pack(Beat()) * 2)],
    }
    with live_swarm(tmp_path) as swarm, HostileRelay(hostile) as relay:
        caller = swarm.caller()  # Without a coordinator nothing is wanted.
        caller.start()
        worker = swarm.thread_worker("a", relay=relay.url)
        node = wait_for("it begins", lambda: worker.worker).node
        relay.node.set_result(node)
        wait_for("every one was followed by an answer", lambda: relay.answers > len(hostile))
        assert relay.sent == list(hostile)
        worker.stop()
        swarm.threads.clear()
        caller.close()


def _message(frame: bytes) -> bytes:
    return struct.pack("<IIII", 1, 0, len(frame), len(frame)) + frame
