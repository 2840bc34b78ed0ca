"""Signals to `kvasir-rt` while it works: nobody is left, nothing half-written, and not a word more."""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.serving import END_S, environment, is_alive, wait_for
from tests.rt.tiny_models import TinyModel, write_tiny_model

SCENARIO = """
name: long
model: {{path: {model}, context: 64}}
ring: {{stages: 2, micro_batch_width: 1, row_width: 16, kv_tokens: 4096}}
workload: {{kind: poisson, rate_per_s: 1, requests: 1000, prompt_tokens: 4, output_tokens: 4}}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny.gguf", TinyModel())


@pytest.fixture
def sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where rings put their sockets: a short path, for a socket's has 107 bytes at most."""
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        yield Path(place)


def stopped(
    begun: Callable[[list[psutil.Process]], bool], how: signal.Signals, times: int, *words: str
) -> tuple[int, str]:
    """Starts a command, and stops it once its children are as wanted. Its status and last line.

    The signal goes to all of the command's group, as from a terminal.
    """
    with subprocess.Popen(
        [sys.executable, "-m", "kvasir_rt", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    ) as process:
        command = psutil.Process(process.pid)
        try:
            wait_for(lambda: begun(children_of(command)), "the work", 120)
            children = children_of(command)
            for _ in range(times):
                os.killpg(process.pid, how)
            said, complained = process.communicate(timeout=END_S)
        finally:
            process.kill()
    wait_for(lambda: not any(is_alive(child.pid) for child in children), "the end of all", END_S)
    assert "Traceback" not in complained, complained
    assert not said
    return process.returncode, complained.strip().rpartition("\n")[2]


def children_of(command: psutil.Process) -> list[psutil.Process]:
    assert command.status() != psutil.STATUS_ZOMBIE, "the command ended by itself"
    return command.children(recursive=True)


def is_neighbour(child: psutil.Process) -> bool:
    """Its body runs, or is halted: it has taken its place on a core."""
    return "spawn_main" in " ".join(child.cmdline()) and len(child.cpu_affinity() or ()) == 1


def ring_directories(place: Path) -> list[Path]:
    return list(place.glob("kvasir-ring-*"))


def test_a_real_run_that_is_interrupted_twice_leaves_nothing_and_nobody(
    tiny: Path, tmp_path: Path, sockets: Path
) -> None:
    out = tmp_path / "run"
    scenario = tmp_path / "long.yaml"
    scenario.write_text(SCENARIO.format(model=tiny))
    log = out / "events.jsonl"

    def begun(children: list[psutil.Process]) -> bool:
        return len(children) == 2 and log.exists() and log.stat().st_size > 0

    words = (str(scenario), "--quiet", "--events", "--csv", "--out", str(out))
    assert stopped(begun, signal.SIGINT, 2, *words) == (-signal.SIGINT, "stopped")
    assert not out.exists()
    assert not ring_directories(sockets)


def test_a_profile_that_is_interrupted_leaves_no_halted_neighbour(
    tiny: Path, tmp_path: Path
) -> None:
    """Neighbours compute or are halted: they must be killed, not asked, and have nothing to say."""

    def begun(children: list[psutil.Process]) -> bool:
        return any(map(is_neighbour, children))

    out = tmp_path / "profile.json"
    few = ("--rows", "1,2", "--decodes", "1", "--contexts", "1", "--chunks", "1", "--behind", "0")
    words = ("--neighbours", "1", "--repeats", "20", *few, "--out", str(out))
    told = stopped(begun, signal.SIGINT, 1, "profile", str(tiny), *words)
    assert told == (-signal.SIGINT, "stopped")
    assert not list(tmp_path.iterdir())


def test_a_bench_that_is_stopped_while_its_rings_start_leaves_nobody(
    tiny: Path, sockets: Path
) -> None:
    assert stopped(bool, signal.SIGHUP, 1, "bench", str(tiny), "--no-pin") == (129, "stopped")
    assert not ring_directories(sockets)
