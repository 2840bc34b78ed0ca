"""The elastic loop as a user has it: hub, served model and workers as processes, and clients.

Used by the tests here and by `benchmarks/elastic_loop.py`.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx

from tests.rt.swarm.swarms import WorkerProcess, end_process, read_status, wait_for
from tests.rt.tiny_models import TinyModel, write_tiny_model

TOKEN = "service-token-of-this-world"
NAME = "tiny"
UP_S = 120.0  # On a machine that does much else.
END_S = 20.0
SETTLE_S = 120.0


@dataclass(frozen=True, kw_only=True)
class WorldOptions:
    """What is started.

    Attributes:
        model: What to write and serve.
        faster: All policy times are divided by this.
        base: Replicas wanted at rest.
        boost: More under load.
        overlap: Micro-batches a stage holds at once.
        policy: Of hub and coordinators alike, `NAME=VALUE`.
        serve: More options of `kvasir-rt serve`.
        host: Where the hub listens.
    """

    model: TinyModel = field(
        default_factory=lambda: TinyModel(architecture="qwen3moe", layers=8, experts=16)
    )
    faster: int = 10
    base: int = 0
    boost: int = 1
    overlap: int = 4
    policy: tuple[str, ...] = ("no_gain_s=3600",)  # So small a model never gains.
    serve: tuple[str, ...] = ()
    host: str = "127.0.0.1"


class World:
    """The processes. Made by `world`."""

    def __init__(self, root: Path, options: WorldOptions) -> None:
        self.root = root
        self.options = options
        self.model_file = write_tiny_model(root / "tiny.gguf", options.model)
        self.events = root / "events"
        self.events.mkdir()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.workers: dict[str, WorkerProcess] = {}
        self.http = httpx.Client(timeout=30.0, trust_env=False)
        self.hub_url = ""
        self.url = ""
        self.is_elsewhere = options.host != "127.0.0.1"
        self.port = _free_port(options.host) if self.is_elsewhere else 0
        if self.is_elsewhere:  # Then the bridge needs a key.
            self.http.headers["Authorization"] = f"Bearer {TOKEN}"

    def start_hub(self, port: int = 0) -> subprocess.Popen[bytes]:
        options = self.options
        elsewhere: tuple[str, ...] = ()
        if self.is_elsewhere:
            elsewhere = ("--open", "--allow-coordinator", f"http://{options.host}:{self.port}",
                         "--model", f"{NAME}={self.model_file}")  # fmt: skip
        hub = self.run(
            "hub", "--host", options.host, "--port", str(port), "--state", str(self.root / "hub"),
            "--base", str(options.base), "--boost", str(options.boost),
            "--faster", str(options.faster), *_each("--policy", options.policy),
            "--status-file", str(self.root / "hub.json"), "--seed", "1",
            "--events", str(self.events / "hub.jsonl"), *elsewhere,
        )  # fmt: skip
        self.hub_url = self._url(hub, self.root / "hub.json")
        return hub

    def start_server(self, *more: str) -> subprocess.Popen[bytes]:
        server = self.begin_server(*more)
        self.await_server(server)
        return server

    def await_server(self, server: subprocess.Popen[bytes]) -> None:
        """Its ring serves."""
        self.url = self._url(server, self.root / "serve.json")

    def begin_server(self, *more: str) -> subprocess.Popen[bytes]:
        """Start it; its ring may wait for stages that join."""
        options = self.options
        return self.run(
            "serve", os.path.relpath(self.model_file), "--stages", "2", "--port", str(self.port),
            "--name", NAME, "--hub", self.hub_url, *self._reachable(),
            "--experts-overlap", str(options.overlap), "--experts-faster", str(options.faster),
            *_each("--experts-policy", options.policy), "--experts-events", str(self.events),
            "--status-file", str(self.root / "serve.json"), *options.serve, *more,
        )  # fmt: skip

    def _reachable(self) -> list[str]:
        """The bridge's options where the hub is not at loopback."""
        if not self.is_elsewhere:
            return []
        host, key = self.options.host, self.root / "api.key"
        key.touch(mode=0o600)
        key.write_text(TOKEN)
        return ["--host", host, "--slots-url", f"http://{host}:{self.port}",
                "--api-key-file", str(key)]  # fmt: skip

    def start_worker(
        self, name: str, *options: str, prefix: tuple[str, ...] = (), hub: str | None = None
    ) -> WorkerProcess:
        home = self.root / name
        home.mkdir(exist_ok=True)
        process = self.run(
            "worker", "--hub", hub or self.hub_url, "--store", str(home / "store"),
            "--threads", "1", "--status-file", str(home / "status.json"), "--quiet-s", "0.5",
            *options, log=name, prefix=prefix,
        )  # fmt: skip
        worker = WorkerProcess(process, home / "status.json", self.root / f"{name}.txt")
        self.workers[name] = worker
        return worker

    def run(
        self, *arguments: str, log: str = "", prefix: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        with (self.root / f"{log or arguments[0]}.txt").open("ab") as file:
            process = subprocess.Popen(
                [*prefix, sys.executable, "-m", "kvasir_rt.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env={**os.environ, "KVASIR_HUB_TOKEN": TOKEN, "OMP_NUM_THREADS": "1"},
            )
        self.processes.append(process)
        return process

    def _url(self, process: subprocess.Popen[bytes], status: Path) -> str:
        def is_up() -> bool:
            assert process.poll() is None, self.logs()
            found = read_status(status)
            return found.get("state") == "ready" and found["pid"] == process.pid

        wait_for(f"{status.stem} is up", is_up, UP_S)
        return str(read_status(status)["url"])

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-2000:]}" for path in self.root.glob("*.txt")
        )

    # ------------------------------------------------------------------ what is to be seen

    def get(self, url: str) -> Any:
        return self.http.get(url).raise_for_status().json()

    def recruitment(self) -> dict[str, Any]:
        """The model's row of `GET /api/moe/recruitment`."""
        rows = self.get(f"{self.hub_url}/api/moe/recruitment")["models"]
        found: dict[str, Any] = next(row for row in rows if row["model"] == NAME)
        return found

    def segments(self) -> list[dict[str, Any]]:
        """All segments of `GET /api/expert-demand`, each with its layer."""
        model = self.get(f"{self.hub_url}/api/expert-demand?model={NAME}")["models"][0]
        return [
            {"layer": layer["layer"], **segment}
            for layer in model["layers"]
            for segment in layer["segments"]
        ]

    def is_covered(self) -> bool:
        """Whether somebody holds each segment; the hub may not yet know the model."""
        found = self.http.get(f"{self.hub_url}/api/expert-demand?model={NAME}")
        return found.is_success and all(segment["replicas"] for segment in self.segments())

    def ring(self) -> dict[str, Any]:
        ring: dict[str, Any] = self.get(f"{self.url}/api/ring")
        return ring

    def has_proven_worker(self) -> bool:
        nodes = self.get(f"{self.hub_url}/api/swarm")["statistics"]["nodes"]
        return any(node["last_serve_ms"] > 0 for node in nodes)

    def complete(self, prompt: str, tokens: int) -> str:
        """The greedy text of so many tokens."""
        answer = self.http.post(
            f"{self.url}/v1/completions",
            json={"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
                  "ignore_eos": True},
        )  # fmt: skip
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def close(self) -> None:
        """SIGTERM for all, so that their logs are whole; then by force."""
        for worker in self.workers.values():
            with suppress(ProcessLookupError):
                worker.process.send_signal(signal.SIGCONT)
        for process in reversed(self.processes):  # Workers first, the hub last.
            if process.poll() is None:
                process.terminate()
                if process in self.processes[:2]:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(END_S)
        for process in self.processes:
            end_process(process)
        self.http.close()


def _each(option: str, values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


@contextmanager
def world(root: Path, options: WorldOptions | None = None) -> Iterator[World]:
    """A hub and a served model; everything that was started is ended."""
    made = World(root, options or WorldOptions())
    try:
        made.start_hub()
        made.start_server()
        yield made
    except BaseException:
        print(made.logs())
        raise
    finally:
        made.close()


class Load:
    """Clients in a closed loop; each asks for the same again and again."""

    def __init__(self, world: World, clients: int, tokens: int, first: int = 0) -> None:
        self._world = world
        self._tokens = tokens
        self._stop = threading.Event()
        self.texts: dict[str, set[str]] = {}
        self.errors: list[str] = []
        self.seconds: list[float] = []
        self.done = 0  # Requests.
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=self._run, args=(f"client {k}: tell me",), daemon=True)
            for k in range(first, first + clients)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """No more requests; those under way end."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self, prompt: str) -> None:
        body = {"model": NAME, "prompt": prompt, "max_tokens": self._tokens, "temperature": 0,
                "ignore_eos": True}  # fmt: skip
        headers = self._world.http.headers
        with httpx.Client(timeout=120.0, trust_env=False, headers=headers) as client:
            while not self._stop.is_set():
                started = time.monotonic()
                try:
                    answer = client.post(f"{self._world.url}/v1/completions", json=body)
                    text = answer.json()["choices"][0]["text"]
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.errors.append(repr(error))
                    return
                with self._lock:
                    self.done += 1
                    self.seconds.append(time.monotonic() - started)
                    self.texts.setdefault(prompt, set()).add(text)

    def wait_rounds(self, count: int) -> None:
        """So many requests more."""
        until = self.done + count
        wait_for(f"{count} answers", lambda: self.done >= until or self.errors, SETTLE_S)
        assert not self.errors, self.errors


def until(what: str, is_so: Callable[[], object], limit_s: float = SETTLE_S) -> float:
    """Seconds until it was so; it is asked ten times a second."""
    started = time.monotonic()
    while not is_so():
        assert time.monotonic() - started < limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.1)
    return time.monotonic() - started
