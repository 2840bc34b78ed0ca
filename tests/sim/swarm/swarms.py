"""Small swarms for tests: a ring of two stages, a model of few experts, and what differs."""

import json
from pathlib import Path
from typing import Any

from kvasir_scenario.load import load_text
from kvasir_scenario.report_schema import Report
from kvasir_scenario.schema import Scenario
from kvasir_scenario.swarm_report import SwarmPart
from kvasir_sim.simulate import Simulation
from kvasir_sim.swarm.swarm import Swarm

LAN: dict[str, Any] = {
    "name": "lan", "count": 8, "per_expert_s": 0.001, "link": {"latency_s": 0.0002},
    "download_bytes_per_s": 1e8, "experts_max": 32,
}  # fmt: skip


def scenario_of(
    *,
    layers: int = 4,
    experts: int = 16,
    workers: list[dict[str, Any]] | None = None,
    workload: dict[str, Any] | None = None,
    hub: dict[str, Any] | None = None,
    has_hub: bool = True,
    coordinator: dict[str, Any] | None = None,
    faults: list[dict[str, Any]] | None = None,
    run: dict[str, Any] | None = None,
    section: dict[str, Any] | None = None,
    base: Path = Path(),
    slow: float = 1,
    **ring: Any,
) -> Scenario:
    """Laps of a fifth of a second and more; 3 ms for a local expert, 1 ms for a remote one.

    `slow` multiplies what the stages take: the same load on a slower clock is quicker to simulate.
    """
    document = {
        "name": "case",
        "model": {
            "layers": layers, "context": 512, "hidden": 256, "experts": experts,
            "experts_used": 2, "expert_ffn": 256,
        },
        "ring": {
            "stages": 2, "row_width": 64, "micro_batch_width": 8, "window": 2, "running_max": 16,
            "kv_tokens": 8192, **ring,
        },
        "costs": {
            "kind": "fixed", "pass_s": 0, "pass_s_per_layer": 0.05 * slow,
            "per_token_s": 0.0001 * slow,
        },
        "workload": workload
        or {"kind": "closed", "users": 4, "prompt_tokens": 16, "output_tokens": 8,
            "duration_s": 120},
        "experts": {
            "local": {"per_expert_s": 0.003 * slow},
            "coordinator": coordinator or {},
            "hub": {"slice_experts_max": 8, **(hub or {})} if has_hub else None,
            "workers": [LAN] if workers is None else workers,
            **(section or {}),
        },
        "faults": faults or [],
        "run": run or {"horizon_s": 120},
    }  # fmt: skip
    return load_text(json.dumps(document), base=base)


class Run:
    """A finished simulation, open for inspection."""

    def __init__(self, scenario: Scenario) -> None:
        simulation = Simulation(scenario, None)
        assert simulation.swarm is not None
        self.simulation = simulation
        self.swarm: Swarm = simulation.swarm.swarm
        self.report: Report = simulation.run()
        part = self.report.swarm
        assert part is not None
        self.part: SwarmPart = part

    @property
    def demand(self) -> list[tuple[int, tuple[int, int], int, int]]:
        """Layer, experts, replicas, target."""
        assert self.swarm.hub is not None
        return [
            (layer.layer, run.experts, run.replicas, run.target)
            for model in self.swarm.hub.hub.demand().models
            for layer in model.layers
            for run in layer.segments
        ]
