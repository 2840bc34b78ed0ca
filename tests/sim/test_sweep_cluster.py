"""The same sweep on a real Ray cluster of two nodes, both on loopback."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ray_nodes import two_nodes
from tests.sim.sweeps import refusal, run_command, small

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed (extra `cluster`)"
)
GRID = ("--grid", "ring.window=1:8:1", "--seeds", "2", "--json")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with two_nodes() as address:
        yield address


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
