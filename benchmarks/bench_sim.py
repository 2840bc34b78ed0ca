"""What the simulator costs beyond the physical floor: bare SimPy callbacks that record nothing.

    python benchmarks/bench_sim.py [--json] [--repeats 5] [--growth]

The floor is one Timeout, one callback and one deque per stage execution. It runs in the same
process and in the same run, in slices between ours, so that a machine which others use as well
changes both alike. Our figure is the golden input at scale 1.0 with full telemetry: CPU from the
first event to the last, result files written included, imports and the floor's slices left out;
the ratio is to the floor's CPU for as many stage executions. Then synthetic runs of 3,000 and
30,000 requests, with `--growth` of 300,000, each in a process of its own: CPU per request, also
as a multiple of what the floor takes for a micro-batch, and memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import simpy

from kvasir_core import ScenarioError
from kvasir_scenario.load import load_scenario, load_text
from kvasir_scenario.report import write_report
from kvasir_scenario.run_dir import prepare_run_dir
from kvasir_scenario.schema import Scenario
from kvasir_sim.simulate import Simulation

ROOT = Path(__file__).parent.parent
STAGES = 4
WINDOW = 4
SLICE = 1000  # Micro-batches of a floor's slice; one follows every thousand of our events.

PASS_S, PER_TOKEN_S = 0.01, 0.00001
PROMPT, OUTPUT = 128, 16
WIDTH = 32
LOAD = 0.8
SYNTHETIC = f"""
name: growth
model: {{layers: 8, context: 4096}}
ring:
  stages: {STAGES}
  row_width: 512
  micro_batch_width: {WIDTH}
  window: {WINDOW}
  kv_tokens: unbounded
costs: {{kind: fixed, pass_s: {PASS_S}, per_token_s: {PER_TOKEN_S}}}
workload:
  kind: poisson
  prompt_tokens: {PROMPT}
  output_tokens: {OUTPUT}
"""
SIZES = (3_000, 30_000, 300_000)  # Requests of the synthetic runs.
REQUESTS_TIMED = 60_000  # Smaller runs are repeated up to so many requests, and the median taken.


class Floor:
    """A pipeline of bare callbacks that never ends, run a slice at a time."""

    def __init__(self) -> None:
        self._env = simpy.Environment()
        self._queues: list[deque[int]] = [deque() for _ in range(STAGES)]
        self._callbacks = [self._ended(stage) for stage in range(STAGES)]
        self._queues[0].extend(range(WINDOW))
        self._start(0)
        self._slices = 0
        self.cpu_s = 0.0

    def _start(self, stage: int) -> None:
        self._env.timeout(1000).callbacks.append(self._callbacks[stage])

    def _ended(self, stage: int) -> Callable[[simpy.Event], None]:
        start, following = self._start, (stage + 1) % STAGES
        queue, next_queue = self._queues[stage], self._queues[following]

        def callback(_: simpy.Event) -> None:
            micro_batch = queue.popleft()
            if queue:
                start(stage)
            next_queue.append(micro_batch)
            if len(next_queue) == 1:
                start(following)

        return callback

    def run_slice(self, *_: object) -> None:
        """Carry SLICE micro-batches through every stage."""
        step = self._env.step
        began = time.process_time()
        for _stage_execution in range(SLICE * STAGES):
            step()
        self.cpu_s += time.process_time() - began
        self._slices += 1

    @property
    def micro_batch_s(self) -> float:
        """CPU that it takes to carry one micro-batch through every stage."""
        return self.cpu_s / (self._slices * SLICE)


@dataclass(frozen=True, slots=True)
class Timing:
    """One run of ours, and the floor's slices in it."""

    cpu_s: float
    micro_batches: int
    requests: int
    floor_micro_batch_s: float

    @property
    def floor_cpu_s(self) -> float:
        """The floor's CPU for as many micro-batches."""
        return self.floor_micro_batch_s * self.micro_batches

    @property
    def ratio(self) -> float:
        return self.cpu_s / self.floor_cpu_s


def timed(scenario: Scenario) -> Timing:
    """Run a scenario with all result files, the floor in between."""
    floor = Floor()
    with tempfile.TemporaryDirectory() as folder:
        out = prepare_run_dir(Path(folder) / "run")
        simulation = Simulation(scenario, out, progress=floor.run_slice)
        floor.run_slice()
        before = floor.cpu_s
        began = time.process_time()
        report = simulation.run()
        write_report(out, report)
        cpu_s = time.process_time() - began - (floor.cpu_s - before)
    return Timing(cpu_s, report.micro_batches, report.counts.offered, floor.micro_batch_s)


def against_floor(scenario: Scenario, repeats: int) -> dict[str, Any]:
    """Our CPU on a scenario and as a multiple of the floor's: medians of several runs."""
    timed(scenario)  # Imports what a run imports.
    runs = [timed(scenario) for _ in range(repeats)]
    ratios = [run.ratio for run in runs]
    cpu_s, micro_batches = median(run.cpu_s for run in runs), runs[0].micro_batches
    return {
        "ratio_to_floor": round(median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "cpu_s": round(cpu_s, 3),
        "floor_cpu_s": round(median(run.floor_cpu_s for run in runs), 3),
        "requests": runs[0].requests,
        "micro_batches": micro_batches,
        "stage_executions": micro_batches * STAGES,
        "requests_per_cpu_s": round(runs[0].requests / cpu_s),
        "micro_batches_per_cpu_s": round(micro_batches / cpu_s),
    }


# ---------------------------------------------------------------------- growth


def capacity_per_s() -> float:
    """Requests per second that the synthetic ring can serve, its micro-batches full.

    A request is OUTPUT spans, one a lap: its prompt, whose last row gives the first token, and a
    decode for each other token. WIDTH spans fit, and every stage holds them equally long.
    """
    requests = WIDTH / OUTPUT
    rows = requests * (PROMPT + OUTPUT - 1)
    return requests / (PASS_S + rows * PER_TOKEN_S)


def synthetic(requests: int) -> Scenario:
    """So many requests at LOAD of what the ring can serve."""
    rate = LOAD * capacity_per_s()
    return load_text(f"{SYNTHETIC}  requests: {requests}\n  rate_per_s: {rate:.3f}\n")


def peak_mb() -> float:
    """Most memory that this process ever held. Linux counts its parent's into `ru_maxrss`."""
    status = Path("/proc/self/status")
    if status.exists():
        lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(lines["VmHWM"].split()[0]) * 1024 / 1e6
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def grow(requests: int) -> dict[str, float]:
    """CPU per request and peak memory of a synthetic run, measured in this process."""
    timed(synthetic(10))  # Imports what a run imports.
    scenario = synthetic(requests)
    runs = [timed(scenario) for _ in range(max(1, REQUESTS_TIMED // requests))]
    per_request = [run.cpu_s / requests for run in runs]
    floors = [cpu / run.floor_micro_batch_s for cpu, run in zip(per_request, runs, strict=True)]
    return {
        "requests": requests,
        "micro_batches": runs[0].micro_batches,
        "cpu_us_per_request": round(median(per_request) * 1e6, 2),
        "floors_per_request": round(median(floors), 3),
        "peak_mb": round(peak_mb(), 1),
    }


def growth(sizes: Sequence[int]) -> dict[str, Any]:
    """`grow` at each size, in a fresh process each, so that memory is that run's own."""
    rows = []
    for requests in sizes:
        command = [sys.executable, __file__, "--grow", str(requests)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    floors = [row["floors_per_request"] for row in rows]
    more_mb = rows[-1]["peak_mb"] - rows[0]["peak_mb"]
    return {
        "growth": rows,
        "growth_spread": round(max(floors) / min(floors) - 1, 3),
        "bytes_per_request": round(more_mb * 1e6 / (sizes[-1] - sizes[0])),
    }


def say(figures: dict[str, Any]) -> None:
    """The figures for people."""
    low, high = figures["ratio_spread"]
    print(
        f"golden input at scale 1.0: {figures['requests']} requests, "
        f"{figures['micro_batches']} micro-batches\n"
        f"  floor {figures['floor_cpu_s']} s, ours {figures['cpu_s']} s: "
        f"{figures['ratio_to_floor']} times the floor ({low} to {high})\n"
        f"  {figures['requests_per_cpu_s']} requests and {figures['micro_batches_per_cpu_s']} "
        f"micro-batches a second of CPU\n"
        f"{PROMPT} + {OUTPUT} tokens at {LOAD:.0%} of {capacity_per_s():.1f} requests/s"
    )
    for row in figures["growth"]:
        print(
            f"  {row['requests']:7} requests: {row['cpu_us_per_request']:.1f} us of CPU each "
            f"({row['floors_per_request']:.2f} floors of a micro-batch), peak {row['peak_mb']} MB"
        )
    print(
        f"  CPU per request differs by {figures['growth_spread']:.1%}; "
        f"{figures['bytes_per_request']} bytes of memory per request"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="last line: the figures as JSON")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--growth", action="store_true", help="also 300,000 requests")
    parser.add_argument("--grow", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.grow:
        print(json.dumps(grow(options.grow)))
        return
    try:
        scenario = load_scenario(
            ROOT / "scenarios" / "golden_pipeline.yaml", ["workload.time_scale=1.0"]
        )
        figures = against_floor(scenario, options.repeats)
    except ScenarioError as error:
        print(f"skipped: {error}", file=sys.stderr)
        sys.exit(0)
    figures |= growth(SIZES if options.growth else SIZES[:-1])
    say(figures)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
