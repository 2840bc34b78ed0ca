"""`kvasir-rt hub` as a user runs it: addresses, tokens, signals, sleep (cases O1, E5 d)."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from click.testing import CliRunner

from kvasir_core.swarm import SwarmPolicy
from kvasir_rt.cli import main
from kvasir_rt.hub.cli import command, make_policy
from kvasir_rt.swarm.identity import Identity
from tests.rt.hub.hubs import MODEL, bearer, running_hub, tiny_moe, wait_for

END_S = 20.0


@dataclass
class Process:
    process: "subprocess.Popen[str]"
    status_file: Path
    state: Path

    @property
    def status(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.status_file.read_text()))
        except FileNotFoundError:
            return {}

    @property
    def token(self) -> str:
        return (self.state / "service.token").read_text().strip()

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
        return self.status.get("state") == "ready"

    def end(self, how: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(how)
        return self.process.wait(END_S)


def arguments(*given: object) -> list[str]:
    return [sys.executable, "-m", "kvasir_rt.cli", "hub", *map(str, given)]


@contextlib.contextmanager
def hub_process(tmp_path: Path, *given: object) -> Iterator[Process]:
    status, state = tmp_path / "status.json", tmp_path / "state"
    environment = {k: v for k, v in os.environ.items() if k != "KVASIR_HUB_TOKEN"}
    process = subprocess.Popen(
        arguments("--port", 0, "--state", state, "--status-file", status, *given),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    try:
        hub = Process(process, status, state)
        wait_for(hub.is_ready, "the hub", seconds=30)
        yield hub
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.kill()
        process.communicate()


class Node:
    """A worker over plain HTTP."""

    def __init__(self, hub: Process) -> None:
        self.identity = Identity.fresh()
        self.client = httpx.Client(base_url=hub.status["url"], timeout=END_S)
        key = self.identity.public_key.hex()
        given = self.client.post("/api/node-challenge", json={"public_key": key}).json()
        signature = self.identity.sign_challenge(given["hub"], given["nonce"]).hex()
        body = {"public_key": key, "nonce": given["nonce"], "signature": signature}
        token = self.client.post("/api/node-token", json=body).json()["token"]
        self.client.headers.update(bearer(token))

    def cover(self) -> int:
        body = {"worker": self.identity.node, "model": MODEL, "segments": [[0, 0, 8]]}
        return self.client.post("/api/expert-coverage", json=body).status_code


def test_it_serves_at_port_0_and_leaves_nothing(tmp_path: Path) -> None:
    model = tiny_moe(tmp_path / "tiny.gguf")
    with hub_process(tmp_path, "--model", f"{MODEL}={model}") as hub:
        url = hub.status["url"]
        assert hub.status["port"] > 0
        assert hub.status["pid"] == hub.process.pid
        shown = httpx.get(f"{url}/api/moe/recruitment").json()
        assert [each["model"] for each in shown["models"]] == [MODEL]
        answer = httpx.get(
            f"{url}/api/models/{MODEL}/expert-shard?layer=0&begin=0&end=2",
            headers=bearer(hub.token),
        )
        assert answer.content[:4] == b"GGUF"
        assert (hub.state / "service.token").stat().st_mode & 0o777 == 0o600
        started = time.monotonic()
        assert hub.end() == 0
        assert time.monotonic() - started < 5
        out, _ = hub.process.communicate()
        assert out.startswith(f"{url} hub ")
        assert not hub.status_file.exists()
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)
    with hub_process(tmp_path, "--port", url.rpartition(":")[2]) as again:  # At once.
        assert again.status["url"] == url
        assert again.end(signal.SIGINT) == 0


def test_sigterm_does_not_wait_for_a_slow_client(tmp_path: Path) -> None:
    with hub_process(tmp_path) as hub:
        host, port = hub.status["host"], hub.status["port"]
        with socket.create_connection((host, port)) as slow:
            slow.sendall(b"POST /api/node-token HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
                         b"Content-Type: application/json\r\n\r\n{")  # fmt: skip
            started = time.monotonic()
            assert hub.end() == 0
            assert time.monotonic() - started < 15


def test_a_taken_port_is_refused_at_once_and_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = subprocess.run(
            arguments("--port", port, "--state", tmp_path / "state"),
            capture_output=True, text=True, timeout=END_S, check=False,
        )  # fmt: skip
    assert ended.returncode == 1
    assert f"127.0.0.1:{port}" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "state").exists()  # Nothing was begun.


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--host", "0.0.0.0"], "--join-token-file"),
        (["--model", "m=/nowhere.gguf"], "cannot be opened"),
        (["--model", "=x"], "NAME=FILE"),
        (["--policy", "nonsense=1"], "no number"),
        (["--policy", "base=-1"], "at least 0"),
        (["--policy", "hub_up_s=soon"], "seconds"),
        (["--policy", "hub_up_ns=5"], "no number"),
        (["--policy", "hub_up_s=1e30"], "at most 1,000,000,000"),
        (["--policy", "nodes_max=99999999999999999999"], "at most 1,000,000,000"),
        (["--policy", "hub_up_s=1", "--policy", "hub_up_s=2"], "given twice"),
        (["--model", "m\n=x"], "NAME=FILE"),
        (["--allow-coordinator", "10.0.0.1:80"], "http://"),
        (["--slices-bytes", "many"], "500M"),
        (["--database", "mysql://h/db"], "sqlite or postgresql"),
        (["--join-token-file", "/nowhere"], "/nowhere"),
        (["--model", "a=x", "--model", "a=y"], "twice"),
        (["--events", __file__], "did not write it"),
        (["--status-file", __file__], "did not write it"),
    ],
)
def test_wrong_options_end_with_2_and_say_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str], why: str
) -> None:
    assert why in refusal(capsys, "--state", tmp_path / "state", *given)


def refusal(capsys: pytest.CaptureFixture[str], *given: object) -> str:
    """What the command, run in this process, says when it ends with status 2."""
    with pytest.raises(SystemExit) as ended:
        main(["hub", "--port", "0", *map(str, given)])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_log_and_status_in_one_file_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = tmp_path / "one"
    given = ("--state", tmp_path / "state", "--events", one, "--status-file", one)
    assert "name two" in refusal(capsys, *given)
    assert not one.exists()


def test_a_second_hub_on_the_same_state_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running_hub(tmp_path):
        assert "another hub" in refusal(capsys, "--state", tmp_path / "state")


def test_a_token_that_others_can_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("a-service-token-of-24-ch")
    token.chmod(0o644)
    given = ("--state", tmp_path / "state", "--service-token-file", token)
    assert "chmod 600" in refusal(capsys, *given)
    token.chmod(0o600)
    token.write_text("short")
    assert "at least 16" in refusal(capsys, *given)


def test_hostile_bodies_leave_its_memory_flat(tmp_path: Path) -> None:
    bodies = (
        b'{"public_key": ' + b"[" * 900_000,
        b'{"public_key": "' + b"a" * 900_000 + b'"}',
        b'{"public_key": [' + b"1," * 400_000 + b"1]}",
        b"{" + b",".join(b'"%d":1' % n for n in range(80_000)) + b"}",
    )
    with hub_process(tmp_path) as hub, httpx.Client(base_url=hub.status["url"]) as client:
        memory = psutil.Process(hub.process.pid)

        def send(times: int) -> None:
            for body in bodies * times:
                answer = client.post(
                    "/api/node-challenge",
                    content=body,
                    headers={"Content-Type": "application/json"},
                )
                assert answer.status_code == 400
                assert len(answer.content) < 1000

        send(3)  # Until the allocator has what it keeps.
        before = memory.memory_info().rss
        send(12)
        assert memory.memory_info().rss - before < 8 << 20
        assert httpx.get(hub.status["url"] + "/health").status_code == 200
        assert hub.end() == 0


def test_a_stopped_hub_marks_nobody_lost_before_one_full_limit(tmp_path: Path) -> None:
    model = tiny_moe(tmp_path / "tiny.gguf")
    limits = ("coverage_ttl_s=1.5", "tick_s=0.1", "silence_max_s=0.8")
    settings = [part for each in limits for part in ("--policy", each)]
    with hub_process(tmp_path, "--model", f"{MODEL}={model}", *settings) as hub:
        node = Node(hub)
        with contextlib.closing(node.client):
            assert node.cover() == 200

        def workers() -> int:
            shown = httpx.get(hub.status["url"] + "/api/moe/recruitment").json()
            return int(shown["models"][0]["workers"])

        hub.process.send_signal(signal.SIGSTOP)
        time.sleep(3.0)  # Twice the limit: the hub's own sleep, not a wait for it.
        hub.process.send_signal(signal.SIGCONT)
        woken = time.monotonic()
        assert workers() == 1
        wait_for(lambda: workers() == 0, "the loss of a silent worker")
        assert time.monotonic() - woken >= 1.4
        events = httpx.get(hub.status["url"] + "/api/swarm").json()["events"]
        assert [event["kind"] for event in events].count("lost") == 1
        assert hub.end() == 0


def test_policy_options_build_the_policy() -> None:
    assert make_policy(()) == SwarmPolicy()
    fast = make_policy(
        ("hub_down_s=2", "counts_claims=false", "check_share=0.5"), faster=10, base=0
    )
    assert fast.hub_up_ns == 3_000_000_000
    assert fast.hub_down_ns == 2_000_000_000
    assert (fast.counts_claims, fast.check_share, fast.base, fast.boost) == (False, 0.5, 0, 1)


def test_help_needs_nothing_heavy() -> None:
    code = (
        "import sys, click.testing\n"
        "from kvasir_rt.hub.cli import command\n"
        "assert click.testing.CliRunner().invoke(command, ['--help']).exit_code == 0\n"
        "print([m for m in ('torch', 'fastapi', 'sqlalchemy', 'numpy') if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
    assert "--allow-coordinator" in CliRunner().invoke(command, ["--help"]).output
