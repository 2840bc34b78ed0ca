"""The scenarios that Kvasir ships, for tests; data that a clone lacks skips with the reason."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvasir_core import ScenarioError
from kvasir_scenario.data_paths import data_directory
from kvasir_scenario.load import load_scenario
from kvasir_scenario.schema import Scenario

ROOT = Path(__file__).parent.parent.parent


def shipped(name: str, overrides: Sequence[str] = (), *, seed: int | None = None) -> Scenario:
    return load_scenario(ROOT / "scenarios" / f"{name}.yaml", overrides, seed=seed)


def shared(relative: str) -> Path:
    """A file of the shared data, or skip."""
    path = data_directory(ROOT) / relative
    if not path.exists():
        pytest.skip(f"no {relative} under KVASIR_DATA")
    return path


__all__ = ["ROOT", "ScenarioError", "shared", "shipped"]
