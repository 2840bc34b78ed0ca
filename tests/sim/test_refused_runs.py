"""What is refused, or cannot end in the time that fits the tables, loses nothing."""

from pathlib import Path

import pytest

from kvasir_core import ScenarioError
from kvasir_sim.run import run
from tests.sim.shipped import shipped

SMALL = ["workload.requests=10", "what_if={}"]


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    run(shipped("saturated", SMALL), tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "change",
    [
        "costs={kind: fixed, pass_s: 0, pass_s_per_layer: 900000}",
        "workload={kind: trace, format: azure, path: nowhere.csv}",
        "costs={kind: table, file: nowhere.csv}",
        "costs={kind: profile, file: nowhere.json}",
    ],
)
def test_what_is_refused_costs_no_earlier_run(finished: Path, change: str) -> None:
    before = files_of(finished)
    with pytest.raises(ScenarioError):
        run(shipped("saturated", [change, "what_if={}"]), finished)
    assert files_of(finished) == before


def test_a_refused_variant_costs_no_earlier_run(finished: Path) -> None:
    before = files_of(finished)
    nowhere = "what_if={other: {costs: {kind: profile, file: nowhere.json}}}"
    with pytest.raises(ScenarioError, match="nowhere"):
        run(shipped("saturated", ["workload.requests=10", nowhere]), finished)
    assert files_of(finished) == before


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("costs.pass_s=1e9", "costs.pass_s"),
        ("costs.per_token_s=1e7", "costs.per_token_s"),
        ("ring.link.latency_s=1e8", "ring.link.latency_s"),
        ("ring.link.bandwidth_bytes_per_s=1e-300", "ring.link.bandwidth_bytes_per_s"),
        ("devices={card: {flops: 1e-300}}", "devices.card.flops"),
    ],
)
def test_numbers_of_another_unit_are_named(change: str, key: str) -> None:
    with pytest.raises(ScenarioError, match=key.replace(".", r"\.")):
        shipped("saturated", [change, "what_if={}"])


def test_a_run_that_does_not_end_in_thirty_years_says_so(tmp_path: Path) -> None:
    scenario = shipped("saturated", [*SMALL, "costs.per_token_s=1e6"])
    with pytest.raises(ScenarioError, match="simulated time passed"):
        run(scenario, tmp_path / "run")
    assert not any((tmp_path / "run").glob("*.parquet*"))


def test_residences_of_any_length_add_up() -> None:
    report = run(shipped("saturated", [*SMALL, "costs.pass_s=1e5"])).report  # Asserts its laws.
    assert report.elapsed_s > 1e6
    assert report.counts.finished == 10
