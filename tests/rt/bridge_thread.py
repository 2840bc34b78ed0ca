"""A real bridge on a real port, in a thread, over a scripted engine."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import httpx

from kvasir_rt.bridge.app import Bridge
from kvasir_rt.bridge.jobs import Served
from kvasir_rt.bridge.limits import Limits
from kvasir_rt.bridge.queue_clock import QueueClock
from kvasir_rt.bridge.server import BridgeServer, listen, url_of
from tests.rt.scripted_engine import PieceTokenizer, ScriptedEngine

MODEL = "scripted"
WAIT_S = 20.0


def wait_for(condition: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    """Polls until the condition holds; fails by name when it does not in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not come within {seconds} s"
        time.sleep(0.005)


def served(engine: ScriptedEngine, tokenizer: PieceTokenizer) -> Served:
    return Served(
        model=MODEL,
        engine=engine,
        tokenizer=tokenizer,
        plan=engine.plan,
        vocabulary=tokenizer.vocabulary,
        created=1_700_000_000,
    )


@dataclass
class Running:
    url: str
    port: int
    bridge: Bridge
    client: httpx.Client
    server: BridgeServer
    loop: asyncio.AbstractEventLoop

    @property
    def connections(self) -> int:
        """Open connections that are not this test's own client's."""
        return self.server.connections


@contextlib.contextmanager
def running_bridge(
    engine: ScriptedEngine,
    tokenizer: PieceTokenizer,
    *,
    limits: Limits | None = None,
    api_key: str | None = None,
    is_loaded: bool = True,
    port: int = 0,
) -> Iterator[Running]:
    """Serves until the block is left; the engine is closed with it."""
    loop = asyncio.new_event_loop()
    listener = listen("127.0.0.1", port)
    url = url_of(listener)
    port = listener.getsockname()[1]
    bridge = Bridge(limits or Limits(stream_opens_s=0.05), api_key=api_key)
    server = BridgeServer(bridge, listener)
    engine.recorder = QueueClock(bridge.meters.admitted, engine.ring.causes)

    async def main() -> None:
        if is_loaded:
            bridge.open(served(engine, tokenizer))
        await server.serve()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())

    thread = threading.Thread(target=run, name="bridge")
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:
            yield Running(url, port, bridge, client, server, loop)
    finally:
        engine.run()
        asyncio.run_coroutine_threadsafe(server.stop(0.0), loop).result(WAIT_S)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        engine.close()
        loop.close()
