"""A full disk: the file is named, what to do is said, the status is 1, and no half file is left."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.serving import environment
from tests.rt.tiny_models import TinyModel, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
ROOM = "No space left on device; make room there, or name another place"
SCENARIO = """
name: small
model: {{path: {model}, context: 64}}
ring: {{stages: 2, micro_batch_width: 1, row_width: 16, kv_tokens: 4096}}
workload: {{kind: poisson, rate_per_s: 100, requests: 100, prompt_tokens: 4, output_tokens: 8}}
"""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 32 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(place)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk cannot be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def complaint(disk: Path, program: str, *words: str | Path) -> str:
    """The last line of a command that must find no room, and leave the disk as it was."""
    before = sorted(disk.rglob("*"))
    done = subprocess.run(
        [sys.executable, "-m", program, *map(str, words)],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment(), timeout=120,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert sorted(disk.rglob("*")) == before
    return done.stderr.strip().rpartition("\n")[2]


def test_a_simulated_run(disk: Path) -> None:
    out = disk / "run"
    said = complaint(disk, "kvasir_sim", "scenarios/starved.yaml", "--no-plots", "--out", out)
    assert said == f"kvasir-sim: {out / 'micro_batches.parquet'} cannot be written: {ROOM}"


@pytest.mark.nightly
def test_a_real_run(disk: Path, tmp_path: Path) -> None:
    scenario, out = tmp_path / "small.yaml", disk / "run"
    model = write_tiny_model(tmp_path / "tiny.gguf", TinyModel())
    scenario.write_text(SCENARIO.format(model=model))
    said = complaint(disk, "kvasir_rt", scenario, "--no-plots", "--events", "--out", out)
    assert said.startswith(f"kvasir-rt: {out}/")
    assert said.endswith(ROOM)


def test_a_plan(disk: Path) -> None:
    fill(disk)
    target = disk / "plan.yaml"
    said = complaint(disk, "kvasir_sim", "plan", "scenarios/uneven_gpus.yaml", "--out", target)
    assert said == f"kvasir-sim: {target} cannot be written: {ROOM}"


def test_a_sweep_goes_on_when_there_is_room(disk: Path) -> None:
    """What is in the journal stays: it is not half a file, but all that was done."""
    target = disk / "sweep.parquet"
    done = subprocess.run(
        [sys.executable, "-m", "kvasir_sim", "sweep", "scenarios/three_requests.yaml",
         "--seeds", "100", "--jobs", "1", "--out", str(target)],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr, done.stderr
    assert done.stderr.startswith(f"kvasir-sim: {target}.journal cannot be written: ")
    assert done.stderr.endswith("the same command goes on from where it was\n")
    assert not target.exists()


def test_a_hub(disk: Path) -> None:
    fill(disk)
    state = disk / "hub"
    state.mkdir(mode=0o700)
    said = complaint(disk, "kvasir_rt", "hub", "--port", "0", "--state", state)
    assert str(state) in said


def fill(disk: Path) -> None:
    try:
        (disk / "others").write_bytes(bytes(1 << 16))
    except OSError:
        return
    raise AssertionError("the disk is larger than it should be")
