"""Starting and stopping `kvasir-rt serve`: ports, signals, wrong input (cases O1, M3)."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import is_alive, run, serving, start, stop, wait_for
from tests.rt.tiny_models import TinyModel, write_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinyModel()))


def test_o1_a_taken_port_is_told_at_once_and_nothing_is_started(tiny: str, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        before = os.times()
        result = run("serve", tiny, "--port", str(port), "--status-file", str(tmp_path / "s"))
        after = os.times()
    assert result.returncode == 1
    assert f"127.0.0.1:{port}" in result.stderr
    assert "in use" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "s").exists()
    spent = after.children_user + after.children_system
    assert spent - before.children_user - before.children_system < 2


def test_o1_port_0_is_printed_and_written_to_the_status_file(tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny) as server:
        status = server.status()
        assert status["pid"] == server.process.pid
        assert httpx.get(status["url"] + "/v1/models").status_code == 200
        assert httpx.get(status["url"] + "/health").json()["status"] == "ok"
        assert server.end(signal.SIGTERM) == 0
        assert server.process.stdout is not None
        lines = server.process.stdout.read().splitlines()
        assert len(lines) == 1
        for word in (status["url"], "tiny", "2 stages", "window"):
            assert word in lines[0]
    assert not server.status_file.exists()


def test_o1_a_restart_right_after_a_stop_gets_the_same_port(tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny) as server:
        port = server.status()["port"]
        with httpx.Client(base_url=server.url) as client:
            client.get("/v1/models")  # Leaves a connection for the stop to close.
            assert server.end(signal.SIGTERM) == 0
    with serving(tmp_path, tiny, "--port", str(port)) as server:
        assert server.status()["port"] == port


def test_o1_ten_servers_started_at_once_all_come_up(tiny: str, tmp_path: Path) -> None:
    servers = [start(tmp_path / str(i), tiny, "--context", "64") for i in range(10)]
    try:
        wait_for(lambda: all(s.is_ready() for s in servers), "all ten", 240)
        assert len({s.status()["port"] for s in servers}) == 10
        body = {"prompt": "hello", "max_tokens": 2}
        for server in servers:
            assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
    finally:
        for server in servers:
            server.process.send_signal(signal.SIGINT)
        for server in servers:
            stop(server)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_however_it_ends_no_process_is_left(tiny: str, tmp_path: Path, how: signal.Signals) -> None:
    with serving(tmp_path, tiny, "--stages", "3") as server:
        pids = server.pids()
        assert len(pids) == 3
        assert all(map(is_alive, pids))
        server.end(how)
        wait_for(lambda: not any(map(is_alive, pids)), "the end of the stages", 5)


def test_sigterm_lets_a_stream_end(tiny: str, tmp_path: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 300, "stream": True, "ignore_eos": True}
    with serving(tmp_path, tiny) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(20) == 0


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGHUP])
def test_an_end_that_does_not_wait_is_told_to_every_client(
    tiny: str, tmp_path: Path, how: signal.Signals
) -> None:
    body = {"prompt": "hello", "max_tokens": 500, "stream": True, "ignore_eos": True, "n": 8}
    with serving(tmp_path, tiny) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(how)
            rest = [line for line in lines if line]
        assert '"code":"draining"' in rest[-1]
        assert server.process.wait(20) == 0
        assert not server.status_file.exists()
        assert "Traceback" not in server.errors.read_text()


def test_a_second_sigterm_ends_the_drain(tiny: str, tmp_path: Path) -> None:
    body = {"prompt": "hello", "max_tokens": 500, "stream": True, "ignore_eos": True, "n": 8}
    with serving(tmp_path, tiny) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            wait_for(lambda: _is_draining(server.url), "the drain")
            server.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"code":"draining"' in rest[-1]
        assert server.process.wait(20) == 0


def _is_draining(url: str) -> bool:
    error = httpx.get(url + "/health").json().get("error", {})
    return bool(error.get("code") == "draining")


def test_ctrl_c_while_loading_leaves_nothing(tiny: str, tmp_path: Path) -> None:
    server = start(tmp_path, tiny)
    try:
        wait_for(lambda: server.status() != {}, "the port")
        assert server.end(signal.SIGINT) == 0
        assert not server.status_file.exists()
        assert (tmp_path / "stderr.txt").read_text().endswith("stopped\n")
    finally:
        stop(server)


def test_while_it_loads_the_port_answers(tiny: str, tmp_path: Path) -> None:
    server = start(tmp_path, tiny)
    try:
        wait_for(lambda: server.status() != {}, "the port")
        answer = httpx.get(server.url + "/health")
        assert answer.status_code in (200, 503)
        wait_for(server.is_ready, "the server")
        assert httpx.get(server.url + "/health").status_code == 200
    finally:
        stop(server)


NOT_MODELS = {
    "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "page": b"<!DOCTYPE html><html></html>",
    "empty": b"",
    "short": b"GGU",
    "old": b"GGUF\x01\x00\x00\x00" + bytes(16),
    "swapped": b"GGUF\x00\x00\x00\x03" + bytes(16),
}


@pytest.mark.parametrize("kind", [*NOT_MODELS, "folder", "missing"])
def test_m3_what_is_no_model_starts_nothing_and_opens_no_port(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.gguf"
    if kind == "folder":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes(NOT_MODELS[kind])
    result = run("serve", str(path), "--port", "0", "--status-file", str(tmp_path / "status"))
    assert result.returncode == 2
    assert str(path) in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    assert not (tmp_path / "status").exists()


def test_m5_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", TinyModel(has_tokenizer=False))
    result = run("serve", str(path), "--port", "0")
    assert result.returncode == 2
    assert "tokenizer.ggml" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--stages", "1"], ["--stages", "found 1", "from 2"]),
        (["--stages", "9"], ["9", "4"]),
        (["--layers", "3,3"], ["6", "4"]),
        (["--window", "none"], ["none", "auto"]),
        (["--context", "100000"], ["100000", "512"]),
        (["--packer", "magic"], ["magic", "cohort"]),
        (["--device", "cpu,cpu,cpu"], ["3", "2"]),
        (["--device", "gpu7"], ["gpu7", "cuda:0"]),
        (["--device", "cuda:99"], ["cuda:99", "not there"]),
        (["--remote", "1"], ["--ring-listen"]),
        (["--ring-listen", "127.0.0.1:0"], ["--ring-listen", "--remote"]),
        (["--stages", "3", "--layers", "2,2"], ["--stages is 3", "2,2 names 2"]),
        (["--window", "9" * 5000], ["auto"]),
        (["--layers", "9" * 5000 + ",2"], ["18,12"]),
        (["--remote", "9" * 5000], ["1,2"]),
        (["--name", ""], ["--name", "leave it out"]),
        (["--name", "a\nb"], ["--name", "one line"]),
        (["--cluster", "auto"], ["--cluster", "--launcher ray"]),
        (["--events", "/no/such/place"], ["--events", "no directory /no/such"]),
        (["--events", __file__], ["--events", "did not write it"]),
        (["--status-file", __file__], ["--status-file", "did not write it"]),
        (["--nonsense"], ["--nonsense"]),
        (["--host", "no.such.host.invalid"], ["API key"]),
    ],
)
def test_wrong_arguments_are_told_with_what_would_be_right(
    tiny: str, arguments: list[str], words: list[str]
) -> None:
    result = run("serve", tiny, "--port", "0", *arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


def test_layers_auto_measures_before_it_splits(tiny: str, tmp_path: Path) -> None:
    with serving(tmp_path, tiny, "--layers", "auto", "--stages", "3") as server:
        spans = server.ring()["plan"]["layers"]
        assert [spans[0][0], spans[-1][1], len(spans)] == [0, 4, 3]
        assert "measuring" in server.errors.read_text()


def test_a_mistyped_command_is_told_from_a_scenario() -> None:
    result = run("sevre", "model.gguf")
    assert result.returncode == 2
    assert "'sevre' is neither a command" in result.stderr
    assert "serve" in result.stderr


def test_beyond_loopback_a_key_is_needed(tiny: str, tmp_path: Path) -> None:
    result = run("serve", tiny, "--host", "0.0.0.0", "--port", "0")
    assert result.returncode == 2
    assert "KVASIR_API_KEY" in result.stderr
    short = run("serve", tiny, "--host", "0.0.0.0", "--port", "0", KVASIR_API_KEY="short")
    assert short.returncode == 2
    assert "short" not in short.stderr.replace("too short", "")
    key = tmp_path / "key"
    key.write_text("a long enough key\n")
    with serving(tmp_path, tiny, "--host", "0.0.0.0", "--api-key-file", str(key)) as server:
        url = f"http://127.0.0.1:{server.status()['port']}"
        assert httpx.get(url + "/v1/models").status_code == 401
        headers = {"authorization": "Bearer a long enough key"}
        assert httpx.get(url + "/v1/models", headers=headers).status_code == 200
        assert httpx.get(url + "/health").status_code == 200


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "kvasir_rt.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "serve" in result.stdout
    for heavy in ("torch", "numpy", "zmq", "uvicorn", "tokenizers"):
        assert f"| {heavy}\n" not in result.stderr.replace("  ", "")
