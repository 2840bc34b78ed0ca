"""A whole swarm on loopback for tests: a hub process, worker processes, and a bridge's slots."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from kvasir_core.swarm import SwarmPolicy
from kvasir_core.units import nanos
from kvasir_rt.bridge.server import listen
from kvasir_rt.experts.backend import load_local
from kvasir_rt.experts.caller import ExpertCaller
from kvasir_rt.experts.hub_link import CallerOptions
from kvasir_rt.gguf_file import open_gguf
from kvasir_rt.hub.command import HubOptions, HubRun
from kvasir_rt.hub.service import HubService
from kvasir_rt.model.linear import Numerics
from kvasir_rt.swarm.frames import Dtype
from kvasir_rt.worker.options import WorkerOptions
from kvasir_rt.worker.worker import Worker
from tests.rt.tiny_models import TinyModel, write_tiny_model

SERVICE_TOKEN = "service-token-of-the-tests"
FASTER = 10
LOCAL = "127.0.0.1"
POLICY = replace(
    SwarmPolicy(base=1, boost=0).faster(FASTER),
    no_gain_ns=nanos(3600),  # So small a model never gains; that is judged in the core's tests.
)
START_S = 60.0  # On a machine that does much else.
TINY = TinyModel(architecture="qwen3moe", layers=2, hidden=64, experts=16, experts_used=4)
ENVIRONMENT = {**os.environ, "KVASIR_HUB_TOKEN": SERVICE_TOKEN, "OMP_NUM_THREADS": "1"}


def wait_for(what: str, is_so: Callable[[], Any], limit_s: float = START_S) -> Any:
    """The first true value; asserts that it comes in time."""
    until = time.monotonic() + limit_s
    while True:
        value = is_so()
        if value:
            return value
        assert time.monotonic() < until, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)


def run_command(
    *arguments: str, log: Path, prefix: tuple[str, ...] = ()
) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen(
            [*prefix, sys.executable, "-m", "kvasir_rt.cli", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=ENVIRONMENT,
        )


def end_process(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)
        process.kill()
    process.wait()


def read_status(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    except (OSError, ValueError):
        return {}


@contextmanager
def slots_server(
    busy: int = 4, slots: int = 4, host: str = LOCAL
) -> Iterator[tuple[str, list[int]]]:
    """A bridge's `GET /slots`; the list's one number is how many are busy."""
    state = [busy]

    class Slots(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = [{"id": i, "is_processing": i < state[0]} for i in range(slots)]
            body = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer((host, 0), Slots)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@dataclass
class WorkerProcess:
    process: subprocess.Popen[bytes]
    status_path: Path
    log: Path
    node: str = ""

    def status(self) -> dict[str, Any]:
        return read_status(self.status_path)

    @property
    def is_serving(self) -> bool:
        status = self.status()
        return status.get("state") == "serving" and bool(status.get("connected"))

    def signal(self, number: int) -> None:
        self.process.send_signal(number)


@contextmanager
def hub_process(root: Path, model_file: Path, host: str, slots_url: str) -> Iterator[str]:
    """A hub of its own process; yields its URL."""
    status = root / "hub.json"
    elsewhere = () if host == LOCAL else ("--open", "--allow-coordinator", slots_url)
    hub = run_command(
        "hub", "--host", host, "--port", "0", "--state", str(root / "hub"),
        "--model", f"tiny={model_file}", "--status-file", str(status),
        "--faster", str(FASTER), "--base", "1", "--boost", "0", *elsewhere,
        log=root / "hub.txt",
    )  # fmt: skip
    try:
        found = wait_for("the hub is ready", lambda: hub.poll() is not None or read_status(status))
        assert hub.poll() is None, (root / "hub.txt").read_text()
        yield found["url"]
    finally:
        end_process(hub)


class ThreadHub:
    """A hub in a thread of the test: quick to start, open to look into."""

    def __init__(self, root: Path, model_file: Path, port: int = 0) -> None:
        self._options = HubOptions(
            port=0,
            state=root / "hub",
            models=(("tiny", model_file),),
            policy=POLICY,
            service_token=SERVICE_TOKEN,
            seed=1,
        )
        self._listener = listen(LOCAL, port)
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{host}:{port}"
        self.run = HubRun(self._options, self._listener)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)

    @property
    def service(self) -> HubService:
        assert self.run.service is not None
        return self.run.service

    def __enter__(self) -> Self:
        self._thread.start()
        wait_for("the hub is ready", lambda: self.run.service)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(RuntimeError):  # It has ended before.
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self.run.run(self._stop))


class ThreadWorker:
    """A worker in a thread of the test; `spoil` may change its desk before it starts."""

    def __init__(self, options: WorkerOptions, spoil: Callable[[Worker], None] | None) -> None:
        self._options = options
        self._spoil = spoil
        self.worker: Worker | None = None
        self._loop = asyncio.new_event_loop()
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    @property
    def is_serving(self) -> bool:
        return (
            self.worker is not None and bool(self.worker.desk.slices) and self.worker.is_connected
        )

    def stop(self) -> None:
        for event in (self._stop, self._hurry):
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(event.set)
        self._thread.join()

    def _live(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self.worker = Worker(self._options)
        if self._spoil is not None:
            self._spoil(self.worker)
        await self.worker.run(self._stop, self._hurry)


@dataclass
class Swarm:
    """A hub with a tiny model, and what joined it."""

    root: Path
    model_file: Path
    hub_url: str
    slots_url: str
    busy: list[int]
    hub: ThreadHub | None
    workers: list[WorkerProcess] = field(default_factory=list)
    threads: list[ThreadWorker] = field(default_factory=list)

    def end(self) -> None:
        for thread in self.threads:
            thread.stop()
        for worker in self.workers:
            end_process(worker.process)

    def thread_worker(
        self, name: str, *, hub: str | None = None, spoil: Callable[[Worker], None] | None = None,
        experts_max: int = 16, **changes: Any,
    ) -> ThreadWorker:  # fmt: skip
        options = WorkerOptions(
            hub=hub or self.hub_url, store=self.root / name, experts_max=experts_max, quiet_s=0.1,
            **changes,
        )  # fmt: skip
        worker = ThreadWorker(options, spoil)
        self.threads.append(worker)
        return worker

    def start_worker(
        self, name: str, *options: str, hub: str | None = None, prefix: tuple[str, ...] = ()
    ) -> WorkerProcess:
        home = self.root / name
        home.mkdir(exist_ok=True)
        status, log = home / "status.json", home / "log.txt"
        process = run_command(
            "worker",
            "--hub",
            hub or self.hub_url,
            "--store",
            str(home / "store"),
            "--threads",
            "1",
            "--status-file",
            str(status),
            "--quiet-s",
            "0.7",
            *options,
            log=log,
            prefix=prefix,
        )
        worker = WorkerProcess(process, status, log)
        self.workers.append(worker)
        return worker

    def caller(self, dtype: Dtype = "f32", **changes: Any) -> ExpertCaller:
        """A stage's caller with all layers' experts; not started."""
        with open_gguf(self.model_file) as gguf:
            local = load_local(gguf, (0, TINY.layers), Numerics.of("cpu", "float32"))
        options = CallerOptions(
            hub=self.hub_url,
            service_token=SERVICE_TOKEN,
            coordinator=changes.pop("coordinator", "stage-0"),
            model="tiny",
            layers=tuple(range(TINY.layers)),
            experts=TINY.experts,
            hidden=TINY.hidden,
            slots_url=self.slots_url,
            dtype=dtype,
            policy=replace(POLICY, **changes.pop("policy", {})),
            seed=1,
            **changes,
        )
        return ExpertCaller(options, local)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path}\n{path.read_text()[-3000:]}" for path in sorted(self.root.rglob("*.txt"))
        )


@contextmanager
def live_swarm(root: Path, *, host: str = LOCAL, has_processes: bool = False) -> Iterator[Swarm]:
    """Base 1, boost 0, all times divided by ten. Everything that was started is ended."""
    model_file = write_tiny_model(root / "tiny.gguf", TINY)
    with ExitStack() as stack:
        slots_url, busy = stack.enter_context(slots_server(host=host))
        hub = None
        if has_processes:
            url = stack.enter_context(hub_process(root, model_file, host, slots_url))
        else:
            hub = stack.enter_context(ThreadHub(root, model_file))
            url = hub.url
        swarm = Swarm(root, model_file, url, slots_url, busy, hub)
        stack.callback(swarm.end)
        try:
            yield swarm
        except BaseException:
            print(swarm.logs())
            raise
