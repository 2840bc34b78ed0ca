"""What the simulator costs beyond the physical floor: bare SimPy callbacks that record nothing.

    python benchmarks/bench_sim.py [--json] [--repeats 3] [--growth]

One process and run. The floor is one Timeout, one callback and one deque per stage execution, with
as many stage executions. Our figure is the golden input at scale 1.0 with full telemetry: CPU from
the first event to the last, result files written included. Both are repeated in turns; the ratio is
of the medians. `--growth` adds CPU per request and peak memory at 3,000, 30,000 and 300,000
requests, each in a process of its own.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from statistics import median

import simpy

from kvasir_core import ScenarioError
from kvasir_scenario.load import load_scenario, load_text
from kvasir_scenario.report import write_report
from kvasir_scenario.run_dir import prepare_run_dir
from kvasir_scenario.schema import Scenario
from kvasir_sim.simulate import prepare

STAGES = 4
WINDOW = 4
ROOT = Path(__file__).parent.parent
SYNTHETIC = """
name: growth
model: {{layers: 8, context: 4096}}
ring: {{stages: 4, row_width: 512, micro_batch_width: 32, window: 4, kv_tokens: unbounded}}
costs: {{kind: fixed, pass_s: 0.01, per_token_s: 0.00001}}
workload:
  {{kind: poisson, rate_per_s: {rate}, prompt_tokens: 128, output_tokens: 16, requests: {requests}}}
"""
RATE = 130  # About 80 % of this ring's capacity (see `capacity_per_s`).


def floor_cpu_s(micro_batches: int) -> float:
    """CPU of a bare callback pipeline that carries so many micro-batches through STAGES stages."""
    env = simpy.Environment()
    queues: list[deque[int]] = [deque() for _ in range(STAGES)]
    left = micro_batches

    def start(stage: int) -> None:
        env.timeout(1000).callbacks.append(callbacks[stage])

    def ended(stage: int) -> Callable[[simpy.Event], None]:
        queue = queues[stage]
        following = queues[(stage + 1) % STAGES]

        def callback(_: simpy.Event) -> None:
            nonlocal left
            micro_batch = queue.popleft()
            if queue:
                start(stage)
            if stage == STAGES - 1:
                left -= 1
                if left < WINDOW:
                    return
            following.append(micro_batch)
            if len(following) == 1:
                start((stage + 1) % STAGES)

        return callback

    callbacks = [ended(stage) for stage in range(STAGES)]
    queues[0].extend(range(WINDOW))
    began = time.process_time()
    start(0)
    env.run()
    return time.process_time() - began


def ours_cpu_s(scenario: Scenario) -> tuple[float, int, int]:
    """(CPU seconds, micro-batches, requests) of a simulated run with all result files."""
    with tempfile.TemporaryDirectory() as folder:
        out = prepare_run_dir(Path(folder) / "run")
        simulation = prepare(scenario, out)
        began = time.process_time()
        report = simulation.run()
        write_report(out, report)
        return time.process_time() - began, report.micro_batches, report.counts.offered


def grow(requests: int) -> dict[str, float]:
    """CPU per request and peak memory of a synthetic run, measured in this process."""
    ours_cpu_s(load_text(SYNTHETIC.format(requests=100, rate=RATE)))  # Imports are not counted.
    scenario = load_text(SYNTHETIC.format(requests=requests, rate=RATE))
    cpu, micro_batches, _ = ours_cpu_s(scenario)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "requests": requests,
        "cpu_us_per_request": cpu / requests * 1e6,
        "peak_mb": peak / 1e6,
        "micro_batches": micro_batches,
    }


def growth() -> list[dict[str, float]]:
    """`grow` at three sizes, each in a fresh process, so that memory is that run's own."""
    rows = []
    for requests in (3_000, 30_000, 300_000):
        command = [sys.executable, __file__, "--grow", str(requests)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="last line: the figures as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--grow", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.grow:
        print(json.dumps(grow(options.grow)))
        return
    try:
        scenario = load_scenario(
            ROOT / "scenarios" / "golden_pipeline.yaml", ["workload.time_scale=1.0"]
        )
        ours = [ours_cpu_s(scenario)]
    except ScenarioError as error:
        print(f"skipped: {error}", file=sys.stderr)
        sys.exit(0)
    _, micro_batches, requests = ours[0]
    floors = [floor_cpu_s(micro_batches)]
    for _ in range(options.repeats - 1):
        ours.append(ours_cpu_s(scenario))
        floors.append(floor_cpu_s(micro_batches))
    cpu, floor = median(run[0] for run in ours), median(floors)
    figures: dict[str, object] = {
        "ratio_to_floor": round(cpu / floor, 3),
        "cpu_s": round(cpu, 3),
        "floor_cpu_s": round(floor, 3),
        "cpu_s_spread": [
            round(min(run[0] for run in ours), 3),
            round(max(run[0] for run in ours), 3),
        ],
        "micro_batches": micro_batches,
        "stage_executions": micro_batches * STAGES,
        "requests_per_cpu_s": round(requests / cpu),
        "micro_batches_per_cpu_s": round(micro_batches / cpu),
    }
    print(f"golden input at scale 1.0: {micro_batches} micro-batches, {requests} requests")
    print(f"  floor {floor:.2f} s, ours {cpu:.2f} s: {cpu / floor:.2f} times the floor")
    print(f"  {requests / cpu:.0f} requests/s, {micro_batches / cpu:.0f} micro-batches/s of CPU")
    if options.growth:
        rows = figures["growth"] = growth()
        base = rows[0]
        for row in rows:
            extra = (row["peak_mb"] - base["peak_mb"]) * 1e6 / max(1, row["requests"] - 3000)
            print(
                f"  {row['requests']:7.0f} requests: {row['cpu_us_per_request']:.1f} us each, "
                f"peak {row['peak_mb']:.0f} MB, {extra:.0f} bytes per further request"
            )
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
