"""CPU time of the swarm's control plane alone: an hour with 100 workers, and no requests.

    python benchmarks/bench_swarm.py [--json] [--repeats 3] [--seconds-max 3]

Coordinator, hub and 100 workers of a model with 48 layers of 128 experts: polls, maps, heartbeats,
volunteers, downloads and the timeline's rows. With a base of three replicas nearly every worker
serves; the laws are watched as on every run. Exits 1 above the limit.
"""

import argparse
import json
import sys
import time
from statistics import median

from kvasir_scenario.load import load_text
from kvasir_scenario.swarm_report import SwarmPart
from kvasir_sim.simulate import Simulation

WORKERS = 100
SECONDS = 3600
SCENARIO = f"""
name: control_plane
model: {{layers: 48, context: 512, hidden: 256, experts: 128, experts_used: 8, expert_ffn: 256}}
ring: {{stages: 2, row_width: 64, micro_batch_width: 8, kv_tokens: 8192}}
costs: {{kind: fixed, pass_s: 0.1}}
workload: {{kind: trace, requests: [[7200, 1, 1]]}}  # After the end.
experts:
  hub: {{base: 3}}
  workers:
    - name: worker
      count: {WORKERS}
      per_expert_s: 0.001
      link: {{latency_s: 0.0002}}
      download_bytes_per_s: 1.0e+8
      experts_max: 192
      arrival_s: {{uniform: [0, 60]}}
run: {{horizon_s: {SECONDS}}}
"""


def measure() -> tuple[float, SwarmPart]:
    """CPU seconds of one hour, and what happened in it."""
    simulation = Simulation(load_text(SCENARIO), None)
    start = time.process_time()
    part = simulation.run().swarm
    spent = time.process_time() - start
    assert part is not None
    return spent, part


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds-max", type=float, default=3.0)
    asked = parser.parse_args()
    runs = [measure() for _ in range(max(1, asked.repeats))]
    spent, part = median(spent for spent, _ in runs), runs[0][1]
    if asked.json:
        result = {
            "cpu_s": spent, "workers": WORKERS, "simulated_s": SECONDS,
            "decisions": part.control_decisions, "covering": part.workers_covering_max,
        }  # fmt: skip
        print(json.dumps(result))
    else:
        print(
            f"{SECONDS} s with {WORKERS} workers, {part.workers_covering_max} of them serving: "
            f"{spent:.2f} s of CPU, {part.control_decisions:,} decisions"
        )
    return int(spent > asked.seconds_max)


if __name__ == "__main__":
    sys.exit(main())
