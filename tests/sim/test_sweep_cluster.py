"""The same sweep on a real Ray cluster of two nodes, both on loopback."""

import importlib.util
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sim.sweeps import refusal, run_command, small

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `cluster`)"
)
START_S = 120.0
GRID = ("--grid", "ring.window=1:8:1", "--seeds", "2", "--json")

# Ray takes 127.0.0.1 for the machine's outer address; the rest of 127.0.0.0/8 it leaves alone.
CLUSTER = """\
import sys
from ray.cluster_utils import Cluster

node = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args={**node, "node_ip_address": "127.0.0.2"})
cluster.add_node(**node, node_ip_address="127.0.0.3")
print("address", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where a cluster of two nodes with one core each listens."""
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert select.select([process.stdout], [], [], START_S)[0], "the cluster starts"
        words = process.stdout.readline().split()
        assert words[:1] == ["address"], words
        yield words[1]
    finally:
        process.stdin.close()
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def test_a_cluster_of_two_nodes_makes_the_same_bytes_as_this_machine(
    address: str, tmp_path: Path
) -> None:
    scenario = small(tmp_path, **{"requests: 12": "requests: 150"})
    there = run_command(
        ("sweep", scenario, *GRID, "--out", "there.parquet", "--cluster", address), tmp_path
    )
    assert there.returncode == 0, there.stderr
    assert json.loads(there.stdout)["processes"] == 2
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
