"""A ring whose second stage joins over TCP, as on another machine."""

import re
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest

from kvasir_rt.join import RingKeys
from tests.e2e.serving import END_S, command, environment, start, stop, wait_for
from tests.rt.tiny_models import TinyModel, write_tiny_model

WAITS = re.compile(r"stages join at (\S+) with the token (\S+)")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "tiny.gguf", TinyModel())


def join(address: str, token: str, model: Path) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        command("stage", "--join", address, "--listen", "127.0.0.1:0", "--model", str(model)),
        env=environment() | {"KVASIR_JOIN_TOKEN": token},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_stage_that_joins_serves_with_the_others_and_leaves_with_the_ring(
    tiny: Path, tmp_path: Path
) -> None:
    server = start(tmp_path / "run", str(tiny), "--remote", "1", "--ring-listen", "127.0.0.1:0")
    stage = None
    try:
        wait_for(lambda: WAITS.search(server.errors.read_text()) is not None, "the token")
        found = WAITS.search(server.errors.read_text())
        assert found is not None
        stage = join(found[1], found[2], tiny)
        wait_for(server.is_ready, "the ring")
        body = {"prompt": "the ring", "max_tokens": 4}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=30)
        assert answer.json()["usage"]["completion_tokens"] >= 1
        assert server.end(signal.SIGTERM) == 0
        assert stage.wait(END_S) == 0
    finally:
        stop(server)
        if stage is not None:
            stage.kill()
            stage.communicate()


def test_a_stage_with_a_wrong_token_or_none_is_told(tiny: Path, tmp_path: Path) -> None:
    for token in ("", "not-a-token"):
        stage = join("127.0.0.1:9", token, tiny)
        _, errors = stage.communicate(timeout=END_S)
        assert stage.returncode == 2
        assert "token" in errors
        assert "Traceback" not in errors
        assert not token or token not in errors


def test_a_place_where_no_stage_can_be_is_told_before_the_ring_hears_of_it(tiny: Path) -> None:
    token = RingKeys.fresh().token
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for options, words in (
            (["--listen", address], f"cannot listen on {address}: Address already in use"),
            (["--listen", "127.0.0.1:0", "--core", "4095"], "--core 4095 is none of those"),
        ):
            done = subprocess.run(
                command("stage", "--join", "127.0.0.1:9", "--model", str(tiny), *options),
                env=environment() | {"KVASIR_JOIN_TOKEN": token},
                capture_output=True,
                text=True,
                timeout=END_S,
                check=False,
            )
            assert done.returncode == 2
            assert done.stderr.startswith(f"kvasir-rt: {words}")
            assert len(done.stderr.splitlines()) == 1
