"""A real hub on a real port, in a thread, with workers and coordinators that speak HTTP to it."""

import asyncio
import contextlib
import http.server
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import httpx

from kvasir_core.swarm import SwarmPolicy
from kvasir_core.units import nanos
from kvasir_rt.bridge.server import listen, url_of
from kvasir_rt.hub.command import HubOptions, HubRun
from kvasir_rt.hub.service import HubService
from kvasir_rt.swarm.identity import Identity
from tests.rt.tiny_models import TinyModel, write_tiny_model

WAIT_S = 20.0
SERVICE = "service-token-of-the-tests"
LAYERS, EXPERTS, HIDDEN = 4, 16, 64
MODEL = "tiny"


def wait_for(condition: Callable[[], Any], what: str, seconds: float = WAIT_S) -> Any:
    """Polls until the condition holds and returns it; fails by name when it does not in time."""
    until = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < until, f"{what} did not come within {seconds} s"
        time.sleep(0.01)
    return found


def quick(**changes: object) -> SwarmPolicy:
    """A policy in which everything takes a fraction of a second."""
    policy = replace(
        SwarmPolicy(),
        poll_period_ns=nanos(0.05),
        poll_max_ns=nanos(0.5),
        hub_up_ns=nanos(0.1),
        hub_down_ns=nanos(0.3),
        tick_ns=nanos(0.1),
        volunteer_period_ns=nanos(0.1),
        base=0,
        boost=1,
    )
    return replace(policy, **changes)  # type: ignore[arg-type]


def tiny_moe(path: Path, **changes: Any) -> Path:
    return write_tiny_model(path, TinyModel(architecture="qwen3moe", layers=LAYERS, **changes))


@dataclass
class RunningHub:
    url: str
    token: str
    client: httpx.Client
    run: HubRun
    loop: asyncio.AbstractEventLoop
    model_path: Path

    @property
    def service(self) -> HubService:
        assert self.run.service is not None
        return self.run.service

    def post(self, path: str, token: str | None = None, /, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body, headers=bearer(token))

    def get(self, path: str, token: str | None = None, /, **query: Any) -> httpx.Response:
        return self.client.get(path, params=query, headers=bearer(token))

    def on_loop(self, act: Callable[[], Any]) -> Any:
        """Runs in the hub's own thread."""

        async def call() -> Any:
            return act()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(WAIT_S)

    def register(self, at: "Coordinator | None" = None, /, **changes: Any) -> httpx.Response:
        body: dict[str, Any] = {
            "coordinator": "c",
            "model": MODEL,
            "layers": list(range(LAYERS)),
            "experts": EXPERTS,
            "hidden_size": HIDDEN,
            "slots_url": at.url if at else "http://127.0.0.1:9",
        }
        return self.post("/api/coordinators", self.token, **{**body, **changes})

    def model(self, name: str = MODEL) -> dict[str, Any]:
        models = self.get("/api/moe/recruitment").json()["models"]
        (found,) = [each for each in models if each["model"] == name]
        return dict(found)

    def segments(self, layer: int = 0) -> list[dict[str, Any]]:
        layers = self.get("/api/expert-demand", model=MODEL).json()["models"][0]["layers"]
        return list(layers[layer]["segments"])


def bearer(token: str | None) -> dict[str, str]:
    return {} if token is None else {"Authorization": f"Bearer {token}"}


@contextlib.contextmanager
def running_hub(
    tmp_path: Path, *, has_model: bool = True, listen_on: int = 0, **changes: Any
) -> Iterator[RunningHub]:
    """Serves until the block is left; then everything has ended."""
    path = tmp_path / "tiny.gguf"
    if not path.exists():
        tiny_moe(path)
    options: dict[str, Any] = {
        "state": tmp_path / "state",
        "policy": quick(),
        "service_token": SERVICE,
        "models": ((MODEL, path),) if has_model else (),
        "has_relay": False,
        "seed": 1,
    }
    listener = listen("127.0.0.1", listen_on)
    url = url_of(listener)
    run = HubRun(HubOptions(**{**options, **changes}), listener)
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    failed: list[BaseException] = []

    def serve() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(run.run(stop))
        except BaseException as error:  # noqa: BLE001 - Told to the test below.
            failed.append(error)

    thread = threading.Thread(target=serve, name="hub")
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=WAIT_S) as client:

            def is_up() -> bool:
                return bool(failed) or _answers(client)

            wait_for(is_up, "the hub")
            if failed:
                raise failed[0]
            yield RunningHub(url, SERVICE, client, run, loop, path)
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(stop.set)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        listener.close()
        loop.close()
    if failed:
        raise failed[0]


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health", timeout=1.0).status_code == 200
    except httpx.HTTPError:
        return False


@dataclass
class Worker:
    """A node that volunteers and reports, by hand."""

    hub: RunningHub
    identity: Identity = field(default_factory=Identity.fresh)
    token: str = ""

    @property
    def node(self) -> str:
        return self.identity.node

    def challenge(self, join: str | None = None) -> dict[str, Any]:
        answer = self.hub.post("/api/node-challenge", join, public_key=self.key)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    @property
    def key(self) -> str:
        return self.identity.public_key.hex()

    def prove(self, challenge: dict[str, Any]) -> httpx.Response:
        signature = self.identity.sign_challenge(challenge["hub"], challenge["nonce"]).hex()
        return self.hub.post(
            "/api/node-token", public_key=self.key, nonce=challenge["nonce"], signature=signature
        )

    def login(self, join: str | None = None) -> "Worker":
        answer = self.prove(self.challenge(join))
        assert answer.status_code == 200, answer.text
        assert answer.json()["node"] == self.node
        self.token = answer.json()["token"]
        return self

    def volunteer(self, max_experts: int = 64, **more: Any) -> dict[str, Any]:
        answer = self.hub.post("/api/expert-volunteer", self.token, max_experts=max_experts, **more)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def cover(self, *segments: list[int], model: str = MODEL, **more: Any) -> dict[str, Any]:
        answer = self.hub.post(
            "/api/expert-coverage", self.token,
            worker=self.node, model=model, segments=list(segments), **more,
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def dial(self, session: int) -> httpx.Response:
        return self.hub.post(
            "/api/relay-sessions", self.hub.token, token=self.token, session=session
        )


class Coordinator:
    """A bridge's `GET /slots`, as busy (or as broken) as a test wants."""

    def __init__(self, busy: int = 0, slots: int = 4) -> None:
        self.busy = busy
        self.slots = slots
        self.mode = "good"
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.released = threading.Event()
        coordinator = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                coordinator.asked.append((self.path, dict(self.headers)))
                with contextlib.suppress(OSError):
                    coordinator._answer(self)

            def log_message(self, *_: Any) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                pass  # The hub hangs up on those that hang.

        self.server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self.server.shutdown()
        self._thread.join(WAIT_S)
        self.server.server_close()

    def _answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        body = json.dumps(
            [{"id": i, "is_processing": i < self.busy, "n_ctx": 1} for i in range(self.slots)]
        ).encode()
        status = 200
        match self.mode:
            case "hang":
                self.released.wait(WAIT_S)
                return
            case "drip":
                handler.send_response(200)
                handler.send_header("Content-Length", "1000000")
                handler.end_headers()
                while not self.released.wait(0.02):
                    handler.wfile.write(b" ")
                return
            case "flood":
                handler.send_response(200)
                handler.end_headers()
                while not self.released.is_set():
                    handler.wfile.write(b"[" * 65536)
                return
            case "redirect":
                handler.send_response(302)
                handler.send_header("Location", f"{self.url}/elsewhere")
                handler.send_header("Content-Length", "0")
                handler.end_headers()
                return
            case "error":
                status, body = 500, b"{}"
            case "good":
                pass
            case other:
                body = BAD_SLOTS[other]
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)


BAD_SLOTS = {
    "no json": b"<html>busy</html>",
    "no list": b'{"slots": 4}',
    "numbers": b'[{"id": 0, "is_processing": 1}]',
    "nested": b"[" * 100_000,
    "empty": b"",
    "nan": b'[{"id": NaN, "is_processing": true}]',
}
