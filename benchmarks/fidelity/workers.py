"""Real expert workers against the simulator: what is measured near foretells what is far.

    python benchmarks/fidelity/workers.py [--repeats 3] [--delay-ms 20] [--out FILE] [--json]

All experts of a tiny qwen3moe are with three workers. A first real run, whose workers answer at
once and whose stages hold one micro-batch at a time, so that nobody waits long for a core, is
measured: how long each stage computes for a micro-batch, how long an expert call is on the way, and
what processor time a token takes in all processes. With these figures the simulator foretells two
others, whose every answer waits 20 ms, for stages that hold one micro-batch at a time (`far_1`) and
eight (`far_8`); no rate is above this machine's cores over the processor time of a token. Both are
then run for real, in turn. What is compared is tokens a second.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.elastic_loop import machine_cpu_s  # noqa: E402 - After the path.
from benchmarks.elastic_overlap import CLIENTS, MODEL, TOKENS, WIDTH  # noqa: E402
from benchmarks.elastic_predict import Calls, measure_calls  # noqa: E402
from kvasir_sim.run import run  # noqa: E402
from tests.e2e.swarm_world import Load, WorldOptions, until, world  # noqa: E402

STAGES = 2
WORKERS = 3
PROMPT_TOKENS = 17
MEASURE_S = 10.0
SIMULATED_S = 60.0
NEAR_OVERLAP = 1
SCENARIOS = {"far_1": 1, "far_8": 8}


@dataclass(frozen=True)
class Observed:
    """One real run in its steady state."""

    tokens_per_s: float
    busy_s: list[float]  # Of each stage, for one micro-batch.
    calls: Calls
    token_cpu_s: float  # Processor time of a token, of all processes.


def observe(overlap: int, delay_ms: float) -> Observed:
    """Start everything, wait until all experts are remote, and measure."""
    options = WorldOptions(
        model=MODEL,
        base=1,
        boost=0,
        overlap=overlap,
        serve=("--micro-batch-width", str(WIDTH), "--running-max", str(CLIENTS)),
    )
    with tempfile.TemporaryDirectory() as folder, world(Path(folder), options) as made:
        for number in range(WORKERS):
            made.start_worker(
                f"worker-{number}", "--max-experts", "32", "--delay-ms", str(delay_ms)
            )
        with Load(made, CLIENTS, TOKENS) as load:
            until("all is covered", made.is_covered)
            until("a worker proves itself", made.has_proven_worker)
            load.wait_rounds(2 * CLIENTS)  # Past the first answers, all of which are checked.
            began, before, cpu_s = time.monotonic_ns(), made.ring(), machine_cpu_s()
            time.sleep(MEASURE_S)
            ended, after, cpu_s = time.monotonic_ns(), made.ring(), machine_cpu_s() - cpu_s
        assert not load.errors, load.errors
        calls = measure_calls(made.events, began, ended)
    busy = [
        (new["busy_s"] - old["busy_s"]) / (new["micro_batches"] - old["micro_batches"])
        for old, new in zip(before["stages"], after["stages"], strict=True)
    ]
    tokens = after["output_tokens"] - before["output_tokens"]
    return Observed(tokens / (ended - began) * 1e9, busy, calls, cpu_s / tokens)


def predict(near: Observed, overlap: int, delay_s: float) -> float:
    """Tokens a second, from the near run's figures and the delay.

    A simulated stage or worker has a core of its own; here they share, and cannot use more.
    """
    calls = near.calls
    layers = MODEL.layers // STAGES
    worker_s = min(calls.pairs * calls.pair_s, calls.trip_s)
    scenario: dict[str, Any] = {
        "name": "far",
        "model": {"layers": MODEL.layers, "context": MODEL.context, "experts": MODEL.experts,
                  "experts_used": MODEL.experts_used},
        "ring": {"stages": [{"layers": layers, "pass_s": busy_s} for busy_s in near.busy_s],
                 "row_width": 128, "micro_batch_width": WIDTH, "window": "auto",
                 "window_max": (overlap + 2) * STAGES, "running_max": CLIENTS, "kv_tokens": 16000},
        "costs": {"kind": "fixed"},
        "workload": {"kind": "closed", "users": CLIENTS, "prompt_tokens": PROMPT_TOKENS,
                     "output_tokens": TOKENS, "duration_s": SIMULATED_S},
        "experts": {
            "overlap": overlap,
            "model": {"bytes_per_expert": 4 * 3 * MODEL.hidden * MODEL.expert_ffn},
            "local": {"per_expert_s": 0.0, "per_row_s": MODEL.experts_used * calls.pair_s},
            "coordinator": {"no_gain_s": 3600, "engaged_min_s": 3600},
            "hub": None,
            "workers": [{"name": "worker", "count": WORKERS, "experts_max": 32,
                         "per_expert_s": max(1e-7, worker_s / calls.pairs),
                         "download_bytes_per_s": 1e9,
                         "link": {"latency_s": (calls.trip_s - worker_s + delay_s) / 2}}],
        },
        "run": {"warmup_s": SIMULATED_S / 2, "horizon_s": SIMULATED_S},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "far.json"
        path.write_text(json.dumps(scenario))
        rate = run(path).report.throughput.output_tokens_per_s
    assert rate is not None
    return min(rate, len(os.sched_getaffinity(0)) / near.token_cpu_s)


def main() -> None:
    """Print a row per scenario; the last line is JSON with `--json`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--delay-ms", type=float, default=20.0)
    parser.add_argument("--out", type=Path, help="write the figures here")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    near = observe(NEAR_OVERLAP, 0.0)
    print(f"near: {near}", file=sys.stderr, flush=True)
    measured: dict[str, list[float]] = {name: [] for name in SCENARIOS}
    for _ in range(given.repeats):
        for name, overlap in SCENARIOS.items():
            measured[name].append(observe(overlap, given.delay_ms).tokens_per_s)
            print(f"{name}: {measured[name][-1]:.1f} tokens/s", file=sys.stderr, flush=True)
    rows = {}
    for name, overlap in SCENARIOS.items():
        foretold, came = predict(near, overlap, given.delay_ms / 1e3), median(measured[name])
        rows[name] = {
            "predicted_tokens_per_s": round(foretold, 1),
            "measured_tokens_per_s": [round(rate, 1) for rate in measured[name]],
            "error": round((foretold - came) / came, 3),
        }
    if given.out is not None:
        given.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows) if given.json else json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
