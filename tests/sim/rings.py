"""Small rings for tests: the short form of the cases, as a scenario, simulated."""

import json
from pathlib import Path
from typing import Any

from kvasir_scenario.load import load_text
from kvasir_scenario.schema import Scenario
from kvasir_sim.run import Result, run


def scenario_of(
    requests: list[list[float]] | None = None,
    *,
    stages: int | list[dict[str, Any]] = 2,
    layers: int = 8,
    context: int = 4096,
    base: Path = Path(),
    costs: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
    workload: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    faults: list[dict[str, Any]] | None = None,
    **ring: Any,
) -> Scenario:
    """The cases' ring: 1 s a pass, free links, one request a micro-batch, window 2."""
    document: dict[str, Any] = {
        "name": "case",
        "model": {"layers": layers, "context": context},
        "ring": {
            "stages": stages,
            "row_width": 64,
            "micro_batch_width": 1,
            "window": 2,
            "kv_tokens": 100000,
            "kv_block": 1,
            **ring,
        },
        "costs": costs or {"kind": "fixed", "pass_s": 1.0},
        "policy": policy or {},
        "workload": workload or {"kind": "trace", "requests": requests},
        "run": run or {},
        "faults": faults or [],
    }
    return load_text(json.dumps(document), base=base)


def simulated(out: Path, *args: Any, **keys: Any) -> Result:
    """Run `scenario_of(...)` with its tables in `out`."""
    return run(scenario_of(*args, **keys), out / "run")
