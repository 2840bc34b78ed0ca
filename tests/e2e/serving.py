"""Starts `kvasir-rt serve` as a user does, and waits until it is ready."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

READY_S = 60.0
END_S = 20.0


def wait_for(condition: Callable[[], bool], what: str, seconds: float = READY_S) -> None:
    """Polls until the condition holds; fails by name when it does not in time."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"{what} did not come within {seconds} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@dataclass
class Server:
    process: "subprocess.Popen[str]"
    status_file: Path
    errors: Path

    def status(self) -> dict[str, Any]:
        try:
            status: dict[str, Any] = json.loads(self.status_file.read_text())
        except FileNotFoundError:
            return {}
        return status

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.errors.read_text()
        return self.status().get("state") == "ready"

    @property
    def url(self) -> str:
        return str(self.status()["url"])

    def ring(self) -> dict[str, Any]:
        ring: dict[str, Any] = httpx.get(self.url + "/api/ring").json()
        return ring

    def pids(self) -> list[int]:
        """The stages' processes."""
        return [stage["pid"] for stage in self.ring()["stages"]]

    def end(self, how: signal.Signals) -> int:
        """Sends the signal and waits; returns the exit status."""
        self.process.send_signal(how)
        return self.process.wait(END_S)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvasir_rt.cli", *arguments]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if not k.startswith("KVASIR_API")} | {
        "OMP_NUM_THREADS": "1"
    }


def start(folder: Path, model: str, *arguments: str) -> Server:
    """Starts a server; does not wait."""
    folder.mkdir(exist_ok=True)
    status, errors = folder / "status.json", folder / "stderr.txt"
    with errors.open("w") as stream:
        process = subprocess.Popen(
            command("serve", model, "--port", "0", "--status-file", str(status), *arguments),
            stdout=subprocess.PIPE,
            stderr=stream,
            text=True,
            env=environment(),
        )
    return Server(process, status, errors)


@contextlib.contextmanager
def serving(folder: Path, model: str, *arguments: str) -> Iterator[Server]:
    """A server that is ready; ended with the block, by force if need be."""
    server = start(folder, model, *arguments)
    try:
        wait_for(server.is_ready, "the server")
        yield server
    finally:
        stop(server)


def stop(server: Server) -> None:
    if server.process.poll() is None:
        server.process.send_signal(signal.SIGINT)
        try:
            server.process.wait(END_S)
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
            raise
    assert server.process.stdout is not None
    server.process.stdout.close()


def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Runs `kvasir-rt` to its end."""
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=environment() | variables,
    )
