"""The wheel holds all it needs: built, installed and used outside the checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 240
KEPT = ("kvasir_core", "kvasir_scenario", "kvasir_sim", "kvasir_rt")


def call(*arguments: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [str(argument) for argument in arguments],
        cwd=cwd,
        env=environment | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; what Kvasir depends on is this environment's."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in KEPT:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md"):
        shutil.copy(ROOT / name, source / name)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    call(
        *pip,
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        folder,
        source,
        cwd=folder,
    )
    (wheel,) = folder.glob("kvasir-*.whl")
    venv = folder / "venv"
    call(sys.executable, "-m", "venv", "--without-pip", venv, cwd=folder)
    call(*pip, "--python", venv / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index",
         wheel, cwd=folder)  # fmt: skip
    (site,) = (venv / "lib").glob("python*/site-packages")
    # Paths in a .pth are searched, but their own .pth (this checkout's) are not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return venv / "bin"


def test_the_wheel_simulates_a_scenario_and_writes_every_file(
    installed: Path, tmp_path: Path
) -> None:
    shutil.copy(ROOT / "scenarios" / "three_requests.yaml", tmp_path)
    where = call(
        installed / "python", "-c", "import kvasir_sim; print(kvasir_sim.__file__)", cwd=tmp_path
    )
    assert Path(where.strip()).is_relative_to(installed.parent)
    call(installed / "kvasir-sim", "three_requests.yaml", "--out", "run", cwd=tmp_path)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"report.json", "requests.parquet", "stages.parquet", "scenario.yaml"} <= names
    call(installed / "kvasir-sim", "report", "run", cwd=tmp_path)
    assert any((tmp_path / "run").glob("*.html"))


def test_the_wheels_runtime_knows_its_commands(installed: Path, tmp_path: Path) -> None:
    for command in ("serve", "hub", "worker", "relay", "profile"):
        assert "Usage" in call(installed / "kvasir-rt", command, "--help", cwd=tmp_path)
