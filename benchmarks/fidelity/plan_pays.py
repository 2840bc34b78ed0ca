"""Does a plan bring what it promised? Even split against planned split, foretold and for real.

    python benchmarks/fidelity/plan_pays.py [--repeats 3] [--profile FILE] [--out DIR] [--json]

Twice: SmolLM2 on two stages of which the second is slowed twofold (`slowed.yaml`), and three stages
that hold a micro-batch for 1, 2 and 3 ms a layer and compute nothing. Each ring runs with the even
split and with what `kvasir-sim plan` chose, in turn. The gain is tokens/s planned over even.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fidelity.runs import command  # noqa: E402 - After the path.
from benchmarks.fidelity.suite import take_profile  # noqa: E402
from kvasir_rt.run_scenario import run_scenario  # noqa: E402
from kvasir_rt.scenario_ring import fixed_ring, plan_layers, read_shape, ring_of  # noqa: E402
from kvasir_scenario.load import load_scenario, load_text  # noqa: E402
from kvasir_scenario.planning import plan_of  # noqa: E402
from kvasir_scenario.report_schema import Report  # noqa: E402
from kvasir_scenario.schema import Scenario  # noqa: E402
from kvasir_sim.planner import auto_layers  # noqa: E402
from kvasir_sim.simulate import simulate  # noqa: E402

PER_LAYER_S = (0.001, 0.002, 0.003)
FIXED = """
name: three_fixed
model: {{layers: 18, context: 512}}
ring:
  stages: [{{pass_s: 0, pass_s_per_layer: 0.001}}, {{pass_s: 0, pass_s_per_layer: 0.002}},
           {{pass_s: 0, pass_s_per_layer: 0.003}}]
  row_width: 32
  micro_batch_width: 4
  window: 4
  running_max: 16
  kv_tokens: 8192
costs: {{kind: fixed}}
workload: {{kind: closed, users: 16, prompt_tokens: 4, output_tokens: 40, requests: 64}}
"""


def rate_of(report: Report) -> float:
    rate = report.throughput.output_tokens_per_s
    assert rate is not None
    return rate


def compare(
    even: Scenario,
    planned: Scenario,
    real: Callable[[Scenario], Report],
    repeats: int,
) -> dict[str, Any]:
    """Gains, foretold and measured, and the layers of both splits."""
    foretold = rate_of(simulate(planned)) / rate_of(simulate(even))
    rates: dict[str, list[float]] = {"even": [], "planned": []}
    for _ in range(repeats):
        rates["even"].append(rate_of(real(even)))
        rates["planned"].append(rate_of(real(planned)))
    came = median(a / b for a, b in zip(rates["planned"], rates["even"], strict=True))
    return {
        "foretold_gain": round(foretold, 3),
        "measured_gain": round(came, 3),
        "error": round((foretold - came) / came, 3),
        "tokens_per_s": {name: [round(rate, 1) for rate in seen] for name, seen in rates.items()},
    }


def slowed(profile: Path, out: Path, repeats: int) -> dict[str, Any]:
    """Two real stages, the second at half speed."""
    settings = (f"costs={{kind: profile, file: {profile.resolve()}}}",)
    source = HERE / "slowed.yaml"
    target = HERE / "slowed.planned.yaml"  # Beside it, for relative paths.
    try:
        command("kvasir-sim", "plan", str(source), *_set(settings), "--out", str(target))
        chosen = load_scenario(target, (), planner=auto_layers)
    finally:
        target.unlink(missing_ok=True)
    counts = tuple(stop - start for start, stop in plan_layers_of(chosen))

    def split(layers: tuple[int, ...]) -> Scenario:
        stages = ", ".join(f"{{layers: {count}}}" for count in layers)
        return load_scenario(
            source,
            (*settings, f"ring.stages=[{stages}]"),
            planner=plan_layers,
            read_shape=read_shape,
        )

    def real(scenario: Scenario) -> Report:
        return run_scenario(scenario, out / "plan_pays", ring_for=ring_of)

    found = compare(split((15, 15)), split(counts), real, repeats)
    return {"layers": {"even": [15, 15], "planned": list(counts)}, **found}


def plan_layers_of(scenario: Scenario) -> tuple[tuple[int, int], ...]:
    return plan_of(scenario, auto_layers).layers


def _set(settings: tuple[str, ...]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def three_fixed(repeats: int) -> dict[str, Any]:
    """Three real processes that hold for a fixed time a layer."""
    text = FIXED.format()
    chosen = tuple(
        stop - start
        for start, stop in plan_layers_of(
            load_text(
                text.replace("pass_s: 0,", "layers: auto, pass_s: 0,"),
                label="three_fixed",
                base=HERE,
                planner=auto_layers,
            )
        )
    )

    def split(layers: tuple[int, ...]) -> Scenario:
        stages = [
            f"{{layers: {count}, pass_s_per_layer: {per_layer_s}}}"
            for count, per_layer_s in zip(layers, PER_LAYER_S, strict=True)
        ]
        setting = f"ring.stages=[{', '.join(stages)}]"
        return load_text(text, label="three_fixed", base=HERE, overrides=(setting,))

    def real(scenario: Scenario) -> Report:
        stages = plan_layers_of(scenario)
        holds = tuple(
            (stop - start) * per_layer_s
            for (start, stop), per_layer_s in zip(stages, PER_LAYER_S, strict=True)
        )
        return run_scenario(
            scenario, None, ring_for=lambda each: fixed_ring(each, holds, vocabulary=1000)
        )

    found = compare(split((6, 6, 6)), split(chosen), real, repeats)
    return {"layers": {"even": [6, 6, 6], "planned": list(chosen)}, **found}


def main() -> None:
    """Print both gains; the last line is JSON with `--json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--profile", type=Path, help="use this one instead of measuring")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "fidelity")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    fixed = three_fixed(given.repeats)
    print(f"three fixed stages: {fixed}", file=sys.stderr, flush=True)
    profile = given.profile or take_profile(given.out)
    found = {"three_fixed": fixed, "slowed": slowed(profile, given.out, given.repeats)}
    if given.json:
        print(json.dumps(found))
        return
    for name, one in found.items():
        print(
            f"{name}: {one['layers']['planned']} over {one['layers']['even']}: foretold "
            f"{one['foretold_gain']:.2f} times, measured {one['measured_gain']:.2f} times "
            f"({one['error']:+.1%})"
        )


if __name__ == "__main__":
    main()
