"""A ring whose stages a Ray cluster of two nodes has placed."""

import importlib.util
import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import READY_S, Server, command, is_alive, serving, wait_for
from tests.ray_nodes import two_nodes
from tests.rt.tiny_models import TinyModel, write_tiny_model

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `cluster`)"
)


def text_of(server: Server) -> str:
    body = {"prompt": "the ring", "max_tokens": 6, "temperature": 0, "logprobs": 0}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=READY_S).json()
    return str(answer["choices"][0]["text"])


def test_stages_placed_by_ray_serve_survive_a_death_and_leave_with_the_ring(tmp_path: Path) -> None:
    model = str(write_tiny_model(tmp_path / "tiny.gguf", TinyModel()))
    with serving(tmp_path / "here", model) as server:
        alone = text_of(server)
    with (
        two_nodes() as (address, _),
        serving(tmp_path / "ray", model, "--launcher", "ray", "--cluster", address) as server,
    ):
        assert text_of(server) == alone
        before = server.pids()
        os.kill(before[1], signal.SIGKILL)
        wait_for(lambda: before[1] not in server.pids(), "another stage", 2 * READY_S)
        assert text_of(server) == alone
        last = server.pids()
        assert server.end(signal.SIGTERM) == 0
        wait_for(lambda: not any(map(is_alive, {*before, *last})), "nobody running")
        assert "placed on the Ray cluster" in server.errors.read_text()


def test_a_launcher_that_places_every_stage_takes_no_word_on_remote_ones(tmp_path: Path) -> None:
    import subprocess

    model = str(write_tiny_model(tmp_path / "tiny.gguf", TinyModel()))
    result = subprocess.run(
        command("serve", model, "--launcher", "ray", "--remote", "1"),
        capture_output=True, text=True, timeout=READY_S, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    assert "leave --remote and --ring-* out" in result.stderr
