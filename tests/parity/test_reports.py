"""One report, two worlds: `kvasir-sim X.yaml` and `kvasir-rt X.yaml` write the same keys."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kvasir_rt.run_scenario import run_scenario
from kvasir_rt.scenario_ring import fixed_ring
from kvasir_scenario.load import load_text
from kvasir_scenario.report_schema import Report
from kvasir_scenario.schema import Scenario
from kvasir_sim.run import run

jsonschema = pytest.importorskip("jsonschema", reason="needs the package jsonschema")

TEXT = """
name: both
model: {layers: 8, context: 4096}
ring: {stages: 3, micro_batch_width: 2, row_width: 32, window: 3, kv_tokens: 4096}
costs: {kind: fixed, pass_s: 0.004}
workload: {kind: trace, requests: [[0, 5, 8], [0.02, 40, 3], [0.04, 1, 1], [0.05, 9, 12]]}
what_if: {drained: {policy.packer: drained}}
"""
TABLES = ("requests", "micro_batches", "stages")


def in_both_worlds(tmp_path: Path) -> tuple[Path, Path]:
    scenario = load_text(TEXT, label="both.yaml", base=tmp_path)
    simulated, measured = tmp_path / "simulated", tmp_path / "measured"
    run(scenario, simulated)

    def ring_for(each: Scenario) -> Any:
        return fixed_ring(each, (0.004,) * 3, 1000)

    run_scenario(scenario, measured, ring_for=ring_for)
    return simulated, measured


def keys_of(value: Any) -> Any:
    """The shape of a document: keys, and what the items of its lists have; sentences are free."""
    if isinstance(value, dict):
        return {key: keys_of(item) for key, item in value.items()}
    if isinstance(value, list):
        shapes = {
            json.dumps(keys_of(item), sort_keys=True) for item in value if isinstance(item, dict)
        }
        return sorted(shapes)
    return None


def test_both_reports_have_the_same_keys_and_fit_one_schema(tmp_path: Path) -> None:
    directories = in_both_worlds(tmp_path)
    documents = [json.loads((path / "report.json").read_text()) for path in directories]
    schema = Report.model_json_schema()
    for document, mode in zip(documents, ("simulated", "measured"), strict=True):
        jsonschema.validate(document, schema)
        assert document["mode"] == mode
    simulated, measured = (keys_of(document) for document in documents)
    assert simulated == measured
    for table in TABLES:
        schemas = [pq.read_schema(path / f"{table}.parquet") for path in directories]
        assert schemas[0].equals(schemas[1]), table


def test_a_scenario_of_fixed_stages_comes_out_alike(tmp_path: Path) -> None:
    """Same counts and tokens; what the ring adds to 4 ms holds makes the real one slower."""
    reports = [
        Report.model_validate_json((path / "report.json").read_text())
        for path in in_both_worlds(tmp_path)
    ]
    simulated, measured = reports
    assert measured.counts == simulated.counts
    assert [stage.rows for stage in measured.stages] == [stage.rows for stage in simulated.stages]
    assert measured.elapsed_s > 0.9 * simulated.elapsed_s
