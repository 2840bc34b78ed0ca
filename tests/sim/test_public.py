"""The public Python API stands where the documentation says, however the package was imported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_sim import Result, find_capacity, find_cheapest, run

USES = {
    "from": "from kvasir_sim import Result, run",
    "twice": "import kvasir_sim; kvasir_sim.run; run, Result = kvasir_sim.run, kvasir_sim.Result",
    "module first": "import kvasir_sim.run\nfrom kvasir_sim import Result, run",
    "module last": "from kvasir_sim.run import run as r\nimport kvasir_sim\nrun = kvasir_sim.run\n"
    "Result = kvasir_sim.Result\nassert r is run",
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_run_is_a_function_and_result_a_class(use: str) -> None:
    program = (
        f"{use}\nassert type(run).__name__ == 'function', run\nassert isinstance(Result, type)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_package_is_light_until_it_is_used() -> None:
    program = (
        "import sys, kvasir_sim\nassert 'simpy' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


TWO_STAGES = """\
model: {layers: 4, context: 128}
devices: {card: {preset: rtx4090, price_per_hour: 0.5}}
ring: {stages: 2, device: card, row_width: 64, micro_batch_width: 1, running_max: 64}
costs: {kind: fixed, pass_s: 0.01, per_token_s: 0.0}
workload: {kind: poisson, rate_per_s: 50, requests: 200, prompt_tokens: 4, output_tokens: 1}
"""


def test_what_a_scenario_carries_can_be_asked_from_python(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(TWO_STAGES)
    told: list[tuple[int, int, str]] = []
    answer = find_capacity(
        path, {"e2e_p50": 10.0}, seeds=1, precision=0.1, jobs=1,
        progress=lambda *each: told.append(each),
    )  # fmt: skip
    assert answer.load is not None
    assert answer.next_load is not None
    assert 85 < answer.load < answer.next_load < 110, "10 ms each: a hundred a second"
    assert answer.unit == "requests/s"
    assert answer.breaks == {"the queue grows": 1}
    assert answer.binding == "micro_batch_width"
    gains = answer.gains.set_index("resource")
    assert gains.gain_share["micro-batch width"] > 0.5
    assert gains.is_untouched["running"]
    assert gains.gain_share.isna()["link"]
    assert answer.document["cost"]["usd_per_h"] == 1.0, "the scenario's own prices"
    assert [runs for runs, _, _ in told] == sorted(runs for runs, _, _ in told)
    assert all(runs < expected for runs, expected, _ in told)
    assert len({doing for _, _, doing in told}) >= 4, "it says what it tries"
    dear = find_cheapest(path, 40.0, seeds=1, prices={"card": 3}, stages_max=2, jobs=1)
    assert dear.best is not None
    assert dear.best == {"stages": 2, "devices": {"card": 2}, "usd_per_h": 6.0, "layers": None}
    with pytest.raises(ScenarioError, match="did you mean ttft_p99"):
        find_capacity(path, {"ttft_p95": 1.0})
    wrongs: list[dict[str, Any]] = [
        {"seeds": 0}, {"seeds": 101}, {"precision": 0.0}, {"precision": float("nan")},
    ]  # fmt: skip
    for wrong in wrongs:
        with pytest.raises(ScenarioError, match=f"{next(iter(wrong))}=.*it must be"):
            find_capacity(path, **wrong)
    with pytest.raises(ScenarioError, match="found 'nan'"):
        find_capacity(path, {"ttft_p99": float("nan")})


def test_a_result_can_be_read_back_and_says_what_is_missing(tmp_path: Path) -> None:
    scenario = Path(__file__).parents[2] / "scenarios" / "three_requests.yaml"
    result = run(scenario, tmp_path / "run")
    again = Result.read(tmp_path / "run")
    assert again.report == result.report
    for name in ("requests", "micro_batches", "stages"):
        frame = getattr(again, name)
        assert len(frame) > 0
        assert frame.equals(getattr(result, name))
    with pytest.raises(ScenarioError, match=r"no report\.json"):
        Result.read(tmp_path)
