"""What a sweep costs beyond its simulations: 1,000 points of a 200-request scenario on all cores.

    python benchmarks/bench_sweep.py [--points 1000] [--json]

*Utilisation* is the CPU time of the simulations over what the cores had to give, from the moment
all workers are ready to the last reply. On a machine that others use too it says more about them;
there, look at *occupied*: the share of that time in which the workers ran or were ready to run and
waited for a core (Linux tells both apart), which on a machine of our own is time on a core. *Cost
per point* is all CPU time that is not simulation, in the workers and in the parent, hashing,
journal and table included.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvasir_sim.sweep.axes import Axis  # noqa: E402 - After the path, to run as a script.
from kvasir_sim.sweep.points import Source, Sweep  # noqa: E402
from kvasir_sim.sweep.pool import LocalPool  # noqa: E402
from kvasir_sim.sweep.run import Run  # noqa: E402

REQUESTS = 200


def own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def workers_cpu_s(pids: list[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in pids]
    return sum(each.user + each.system for each in times)


def wanted_s(pids: list[int]) -> float:
    """Time that the processes' main threads ran, or were ready and waited for a core."""
    total_ns = 0
    for pid in pids:
        ran, waited, _ = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()
        total_ns += int(ran) + int(waited)
    return total_ns / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cores = os.cpu_count() or 1
    windows, widths = Axis("ring.window", (4, 5, 6, 8)), Axis("ring.micro_batch_width", (8, 16))
    source = Source.of_file(
        ROOT / "scenarios" / "saturated.yaml", [f"workload.requests={REQUESTS}"]
    )
    with tempfile.TemporaryDirectory() as folder:
        begin_cpu = own_cpu_s()
        sweep = Sweep(source, [windows, widths], seeds=-(-options.points // 8))
        run = Run(sweep, Path(folder) / "table.parquet")
        with LocalPool(source, cores) as pool:
            pool.wait_ready()
            started, wanted = workers_cpu_s(pool.pids), wanted_s(pool.pids)
            start = time.monotonic()
            run.work(pool)
            wall_s = time.monotonic() - start
            workers_s = workers_cpu_s(pool.pids) - started
            wanted = wanted_s(pool.pids) - wanted
        outcome = run.finish()
        parent_s = own_cpu_s() - begin_cpu
    total_s = workers_s + parent_s
    result = {
        "points": run.total,
        "cores": cores,
        "wall_s": wall_s,
        "simulate_cpu_s": outcome.simulate_s,
        "utilisation": outcome.simulate_s / (wall_s * cores),
        "occupied": wanted / (wall_s * cores),
        "got_of_machine": total_s / (wall_s * cores),
        "simulation_share_of_our_cpu": outcome.simulate_s / total_s,
        "worker_cost_ms_per_point": (workers_s - outcome.simulate_s) / run.total * 1e3,
        "parent_cost_ms_per_point": parent_s / run.total * 1e3,
        "cost_ms_per_point": (total_s - outcome.simulate_s) / run.total * 1e3,
        "simulation_ms_per_point": outcome.simulate_s / run.total * 1e3,
    }
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name:30} {value:.4g}")


if __name__ == "__main__":
    main()
