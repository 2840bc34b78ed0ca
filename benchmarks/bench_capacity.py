"""Does the search for the capacity find what trying everything finds, and for how many runs less?

    python benchmarks/bench_capacity.py [--rates 200] [--seeds 5] [--json]

Brute force simulates every load of a grid with every seed and takes the highest load up to which
each is carried by most seeds. The search (`kvasir-sim capacity`) has the same grid, seeds and test.
Where loads near the edge hold and break in turn, brute force has a band: from the last load before
the first that breaks, to the last that holds at all; the search must end within it.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from kvasir_sim.capacity.driver import Driver  # noqa: E402 - After the path, to run as a script.
from kvasir_sim.capacity.knob import knob_of  # noqa: E402
from kvasir_sim.capacity.limits import read_limits  # noqa: E402
from kvasir_sim.capacity.search import LoadSearch  # noqa: E402
from kvasir_sim.sweep.points import Source  # noqa: E402
from kvasir_sim.sweep.pool import LocalPool, Pool  # noqa: E402

PRECISION = 0.02
LENGTHS = "prompt_tokens: {lognormal: {median: 100, p90: 250}, max: 800}, output_tokens: 6"
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "stages alone": (
        "saturated.yaml",
        [f"workload={{kind: poisson, rate_per_s: 40, requests: 100, {LENGTHS}}}"],
        [],
    ),
    "time to first token": (
        "uneven_gpus.yaml",
        [
            f"workload={{kind: gamma, burstiness: 2, rate_per_s: 40, requests: 100, {LENGTHS}}}",
            "ring.running_max=64",
        ],
        ["ttft_p90=0.5"],
    ),
    "KV and pace": (
        "saturated.yaml",
        [
            f"workload={{kind: poisson, rate_per_s: 40, requests: 100, {LENGTHS}}}",
            "ring.kv_tokens=1600",
            "ring.running_max=64",
        ],
        ["tpot_p90=0.08", "e2e_p50=0.5"],
    ),
}


def measured(name: str, rates: int, seeds: int, pool: Pool, source: Source) -> dict[str, Any]:
    scenario = source.load()
    first = scenario.run.seed
    limits = read_limits(CASES[name][2])
    indexes = range(-rates // 2, rates - rates // 2)

    def search_on(driver: Driver) -> LoadSearch:
        return LoadSearch(driver, knob_of(scenario), limits, range(first, first + seeds), PRECISION)

    driver = Driver(pool)
    start = time.monotonic()
    search = search_on(driver)
    capacity = search.capacity()
    search_s = time.monotonic() - start
    brute_driver = Driver(pool)
    brute = search_on(brute_driver)
    start = time.monotonic()
    fates = brute_driver.drive(
        [brute.fate(index, seed) for index in indexes for seed in brute.seeds]
    )
    votes = [fates[at : at + seeds] for at in range(0, len(fates), seeds)]
    carried = [brute.is_carried(vote) for vote in votes]
    low = indexes[carried.index(False)] - 1
    high = max(index for index, holds in zip(indexes, carried, strict=True) if holds)
    assert capacity.index is not None, "the grid begins at a load that holds"
    return {
        "case": name,
        "search_index": capacity.index,
        "search_rate_per_s": capacity.load,
        "brute_index": low,
        "brute_rate_per_s": brute.load(low),
        "brute_band": [low, high],
        "agrees": low <= capacity.index <= high,
        "steps_off": capacity.index - low,
        "search_runs": driver.runs,
        "brute_runs": brute_driver.runs,
        "share_of_runs": driver.runs / brute_driver.runs,
        "search_s": search_s,
        "brute_s": time.monotonic() - start,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rates", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    results = []
    for name, (file, settings, _) in CASES.items():
        source = Source.of_file(ROOT / "scenarios" / file, ["what_if={}", *settings])
        with LocalPool(source, os.cpu_count() or 1) as pool:
            result = measured(name, options.rates, options.seeds, pool, source)
        results.append(result)
        if not options.json:
            print(
                f"{name:20} search {result['search_rate_per_s']:.4g}/s in {result['search_runs']} "
                f"runs, brute force {result['brute_rate_per_s']:.4g}/s (indexes "
                f"{result['brute_band']}) in {result['brute_runs']}: "
                f"{'agrees' if result['agrees'] else 'DIFFERS'}, {result['steps_off']:+d} steps of "
                f"{PRECISION:.0%}, {result['share_of_runs']:.1%} of the runs",
                flush=True,
            )
    if options.json:
        print(json.dumps(results, indent=2))
    sys.exit(not all(result["agrees"] and result["share_of_runs"] <= 0.1 for result in results))


if __name__ == "__main__":
    main()
