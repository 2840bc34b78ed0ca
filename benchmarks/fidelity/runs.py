"""Kvasir's two commands as the benchmarks of fidelity run them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN_S_MAX = 600


def command(name: str, *arguments: str) -> None:
    """Run one of Kvasir's commands as a user would; its own words come through on failure."""
    done = subprocess.run(
        [str(Path(sys.executable).with_name(name)), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S_MAX,
    )
    if done.returncode:
        raise SystemExit(f"{name} {' '.join(arguments)} failed:\n{done.stderr[-3000:]}")


def predict(scenario: Path, profile: Path, out: Path) -> dict[str, Any]:
    """The simulator's report."""
    costs = f"costs={{kind: profile, file: {profile.resolve()}}}"
    arguments = ("--set", costs, "--out", str(out), "--quiet", "--no-plots")
    command("kvasir-sim", str(scenario), *arguments)
    return report_of(out)


def measure(scenario: Path, out: Path) -> dict[str, Any]:
    """The report of a real run."""
    command("kvasir-rt", str(scenario), "--out", str(out), "--quiet", "--no-plots")
    return report_of(out)


def report_of(directory: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return report
