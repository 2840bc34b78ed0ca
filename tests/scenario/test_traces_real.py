"""Public traces as they are; each test says why it is skipped where the data is not there."""

import csv
import os
from pathlib import Path

import numpy as np
import pytest

from kvasir_scenario.load import load_text
from kvasir_scenario.workload import Requests, WorkloadFacts, build_workload

DATA = Path(os.environ.get("KVASIR_DATA") or Path(__file__).parents[3] / "shared")
AZURE = DATA / "traces/azure_2023/AzureLLMInferenceTrace_conv.csv"
MOONCAKE = DATA / "traces/mooncake/synthetic_trace.jsonl"
GOLDEN = DATA / "golden/pipeline_4stage_a100"
RING = """
model: {layers: 32, context: 8192}
ring: {stages: 4, row_width: 512, micro_batch_width: 64, window: 4, kv_tokens: 1e8}
costs: {kind: fixed, pass_s: 1.0}
"""


def offered(path: Path, keys: str) -> tuple[Requests, WorkloadFacts]:
    if not path.is_file():
        pytest.skip(f"no {path}: set KVASIR_DATA to the folder with the traces")
    requests, facts = build_workload(
        load_text(f"{RING}workload: {{kind: trace, path: '{path}', {keys}}}\n")
    )
    assert isinstance(requests, Requests)
    return requests, facts


def test_the_azure_conversation_trace_is_read_whole() -> None:
    requests, facts = offered(AZURE, "format: azure")
    assert len(requests) == 19_366
    assert facts.trace_span_s == pytest.approx(3502, abs=0.5)
    assert np.percentile(requests.prompt_tokens, [50, 90, 99]) == pytest.approx(
        [1020, 2734, 4142], abs=1
    )
    assert np.percentile(requests.output_tokens, [50, 90, 99]) == pytest.approx(
        [129, 424, 601], abs=1
    )
    assert requests.arrival_ns[:3].tolist() == [0, 4_314_579_000, 4_541_877_000]
    assert (facts.out_of_order, facts.trace_failed, facts.clipped) == (0, 0, 0)
    assert facts.warnings == ()


def test_the_mooncake_trace_is_read_whole_with_its_hashes() -> None:
    requests, facts = offered(MOONCAKE, "format: mooncake")
    assert len(requests) == 3993
    assert facts.trace_span_s == pytest.approx(1022, abs=0.5)
    assert np.percentile(requests.prompt_tokens, 50) == 11_587
    hashes = requests.prefix_hashes
    assert hashes is not None
    blocks = np.diff(hashes.starts)
    assert (blocks == -(-requests.prompt_tokens // 512)).all()
    seen: set[int] = set()
    hits = 0
    for row in range(len(requests)):
        prompt = hashes.of(row)
        hits += sum(block in seen for block in prompt)
        seen.update(prompt)
    assert hits / blocks.sum() == pytest.approx(0.65, abs=0.02)


@pytest.mark.parametrize("scale", [0.2, 0.1, 0.4, 1.0])
def test_the_golden_input_is_rounded_once_to_nanoseconds(scale: float) -> None:
    source = GOLDEN / "requests_in.csv"
    requests, facts = offered(
        source,
        f"format: csv, time_unit: s, time_scale: {scale}, max_total_tokens: 8192, "
        "columns: {arrival: arrived_at, prompt: num_prefill_tokens, output: num_decode_tokens}",
    )
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(requests) == len(rows) == 3000
    assert requests.arrival_ns.tolist() == [
        round(float(row["arrived_at"]) * scale * 1e9) for row in rows
    ]
    if scale == 0.2:
        with (GOLDEN / "requests_out_scale0.2.csv").open(newline="") as file:
            out = list(csv.DictReader(file))
        assert requests.arrival_ns.tolist() == [
            round(float(row["arrived_at"]) * 1e9) for row in out
        ]
        assert requests.prompt_tokens.tolist() == [int(row["prefill"]) for row in out]
        assert requests.output_tokens.tolist() == [int(row["decode"]) for row in out]
    assert facts.trace_failed == 0
