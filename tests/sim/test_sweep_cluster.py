"""The same sweep on a real Ray cluster of two nodes, both on loopback."""

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.ray_nodes import two_nodes
from tests.sim.sweeps import command, refusal, run_command, small

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `cluster`)"
)
WAIT_S = 150.0
GRID = ("--grid", "ring.window=1:8:1", "--seeds", "2", "--json")


@pytest.fixture(scope="module")
def nodes() -> Iterator[tuple[str, int]]:
    with two_nodes() as nodes:
        yield nodes


def actors_below(pid: int) -> list[psutil.Process]:
    """Processes of the cluster in which a point is being evaluated."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with suppress(psutil.Error):
            if "RemoteEvaluator.evaluate" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_a_cluster_of_two_nodes_makes_the_same_bytes_as_this_machine_though_an_actor_dies(
    nodes: tuple[str, int], tmp_path: Path
) -> None:
    address, pid = nodes
    scenario = small(tmp_path, **{"requests: 12": "requests: 800"})
    words = ("sweep", scenario, *GRID, "--out", "there.parquet", "--cluster", address)
    there = subprocess.Popen(
        command(*words), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        end = time.monotonic() + WAIT_S
        while not (working := actors_below(pid)):
            assert there.poll() is None, "the sweep ended before an actor could be killed"
            assert time.monotonic() < end, f"no point was evaluated within {WAIT_S:.0f} s"
            time.sleep(0.005)
        working[0].kill()
        said, errors = there.communicate(timeout=WAIT_S)
    finally:
        there.kill()
        there.wait()
    assert there.returncode == 0, errors
    assert said.startswith("{"), said
    summary = json.loads(said)
    assert (summary["processes"], summary["failed"]) == (2, 0)
    assert not psutil.pid_exists(working[0].pid) or not working[0].is_running()
    here = run_command(("sweep", scenario, *GRID, "--out", "here.parquet"), tmp_path)
    assert here.returncode == 0, here.stderr
    assert (tmp_path / "there.parquet").read_bytes() == (tmp_path / "here.parquet").read_bytes()


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.2:1", "no Ray cluster answers"), ("everywhere", "it must be auto or HOST:PORT")],
)
def test_a_cluster_that_is_not_there_is_a_clear_error(
    address: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "table.parquet"
    words = ("--grid", "ring.window=1,2", "--out", out, "--cluster", address)
    assert said in refusal(capsys, "sweep", small(tmp_path), *words)


def test_without_ray_the_error_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ("--grid", "ring.window=1,2", "--out", tmp_path / "t.parquet", "--cluster", "auto")
    assert "pip install 'kvasir[cluster]'" in refusal(capsys, "sweep", small(tmp_path), *words)
