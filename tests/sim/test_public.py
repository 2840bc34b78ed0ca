"""The public Python API stands where the documentation says, however the package was imported."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvasir_core.errors import ScenarioError
from kvasir_sim import Result, run

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
