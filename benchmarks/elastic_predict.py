"""The simulator, given what elastic loops measured, predicts them.

    .venv/bin/python benchmarks/elastic_loop.py --repeats 5 --out DIR
    .venv/bin/python benchmarks/elastic_predict.py DIR [--json]

Of each run rates and delays are taken. Rates are processor times: of a stage per micro-batch with
its experts here and elsewhere, of a routed pair, of workers and relay per expert call, of bridge
and clients per lap. Delays are what passes without computing: hops, the shortest of an expert
call's round trips, a slice's download. The same policy, plan and load are then simulated on as many
shared cores (`experts.cores`), with several seeds, since who polls when is chance on both sides.
Who waits how long for a core, and so the tokens per second, is the simulator's to find. Printed are
medians of both, and how far the prediction is off.
"""

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.elastic_loop import CLIENTS, EXPERTS_MAX, MODEL, TOKENS, WORKERS
from kvasir_core.eventlog import replay
from kvasir_core.swarm import Coordinator, SwarmPolicy
from kvasir_core.swarm.decisions import Dispatch
from kvasir_core.swarm.eventlog import COORDINATOR_EVENTS
from kvasir_core.swarm.events import AnswerArrived, StageMeasured
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_scenario.report_schema import Report
from kvasir_sim.run import run
from tests.e2e.swarm_timeline import Moment, moments_of

SEEDS = 3
STAGES = 2
OVERLAP = 4
SETTLED_S = 10.0  # Rates are of what lasts, as they are measured: not of the seconds before.
PROMPT_TOKENS = 17
SLICE_BYTES = 16 * 3 * MODEL.hidden * MODEL.expert_ffn * 4
COMPARED = (
    "saturation_to_first_remote_expert_s", "saturation_to_full_coverage_s",
    "tokens_per_s_before", "tokens_per_s_during", "contraction_s",
)  # fmt: skip


@dataclass(frozen=True)
class Calls:
    """What the coordinators' logs tell of one run."""

    pair_s: float  # Of one routed pair, computed by the stage.
    trip_s: float  # From sending one layer's rows to having the sums, the mean.
    count: int
    pairs: float  # Of one call, on average,
    experts: float  # and distinct experts.


def measure_calls(events: Path, begin_ns: int, end_ns: int) -> Calls:
    """Of a window for the trips, of the run for what is computed here."""
    trips: list[int] = []
    sizes: list[tuple[int, int]] = []
    local_pairs = local_ns = 0
    for path in sorted(events.glob("coordinator-*.jsonl")):
        core = json.loads(path.with_name(path.name + ".core.json").read_text())
        state = Coordinator(SwarmPolicy(**core["policy"]), random.Random(core["seed"]))
        sent: dict[tuple[Any, ...], tuple[int, tuple[int, int]]] = {}
        with path.open(encoding="utf-8") as lines:
            for event, now, decisions in replay(state, lines, COORDINATOR_EVENTS):
                if isinstance(event, StageMeasured):
                    local_pairs += event.local_pairs
                    local_ns += event.local_ns
                if isinstance(event, AnswerArrived):
                    found = sent.pop((event.call, event.part, event.worker), None)
                    if found is not None and begin_ns <= now <= end_ns:
                        trips.append(now - found[0])
                        sizes.append(found[1])
                for order in decisions:
                    if isinstance(order, Dispatch) and not order.is_trial:
                        size = sum(share.pairs for share in order.shares), len(order.shares)
                        sent[order.call, order.part, order.worker] = now, size
    return Calls(
        pair_s=local_ns / max(1, local_pairs) / NANOS_PER_SECOND,
        trip_s=mean(trips) / NANOS_PER_SECOND,
        count=len(trips),
        pairs=mean(pairs for pairs, _ in sizes),
        experts=mean(experts for _, experts in sizes),
    )


def download_s(moments: list[Moment]) -> float:
    """From assignment to coverage, the mean."""
    assigned: dict[str, int] = {}
    times = []
    for moment in moments:
        if moment.kind == "assigned":
            assigned[moment.detail] = moment.at_ns
        elif moment.kind == "covers" and moment.detail in assigned:
            times.append(moment.at_ns - assigned.pop(moment.detail))
    return mean(times) / NANOS_PER_SECOND


def batches_of(measured: dict[str, Any], when: str) -> int:
    """Micro-batches of a phase."""
    batches: int = measured[when]["stages"][0]["micro_batches"]
    return batches


def cpu_s(measured: dict[str, Any], when: str, *parts: str) -> float:
    """Processor seconds of some parts in a phase, beyond what they need at rest."""
    phase, rest = measured[when], measured["rest"]
    cores = sum(phase["cores_busy"][part] - rest["cores_busy"][part] for part in parts)
    seconds: float = cores * (phase["end_ns"] - phase["begin_ns"]) / NANOS_PER_SECOND
    return seconds


def network_s(measured: dict[str, Any], when: str) -> float:
    """Processor seconds of the stages' threads beside those that compute."""
    return sum(
        cpu_s(measured, when, f"stage {number}")
        - cpu_s(measured, when, f"stage {number} computing")
        for number in range(STAGES)
    )


def bridge_s(measured: dict[str, Any], when: str) -> float:
    """Processor seconds of a lap beside stages and workers."""
    spent = cpu_s(measured, when, "bridge", "clients")
    if when == "before":  # Else it is counted with the calls.
        spent += cpu_s(measured, when, "hub") + network_s(measured, when)
    return max(0.0, spent) / batches_of(measured, when)


def hops_of(folder: Path, measured: dict[str, Any]) -> list[float]:
    """Seconds on the way after each stage, before help came.

    The ring's log begins its time with the engine: its first request is the load's first.
    """
    lines = (folder / "ring.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    first = next(event[0] for event in events if event[1] == "RequestArrived")
    shift = first - measured["zero_ns"]
    begin, end = (measured["before"][name] + shift for name in ("begin_ns", "end_ns"))
    inside = [e for e in events if e[1] == "StageTimesMeasured" and begin <= e[0] <= end]
    return [mean(times) / NANOS_PER_SECOND for times in zip(*(e[3] for e in inside), strict=True)]


def scenario_of(folder: Path) -> dict[str, Any]:
    """The measured run as a scenario."""
    measured = read_measured(folder)
    during, before = measured["during"], measured["before"]
    calls = measure_calls(folder / "events", during["begin_ns"], during["end_ns"])
    layers = MODEL.layers // STAGES
    policy = SwarmPolicy().faster(measured["faster"])
    stages = []
    call_s = []
    for number in range(STAGES):
        rows = before["stages"][number]["rows"]
        here_s, there_s = (
            cpu_s(measured, when, f"stage {number} computing") / batches_of(measured, when)
            for when in ("before", "during")
        )
        rest_s = max(1e-6, here_s - rows * MODEL.experts_used * layers * calls.pair_s)
        stages.append({"layers": layers, "pass_s": rest_s})
        call_s.append(max(0.0, there_s - rest_s) / layers)
    parts = ["hub", *(name for name in during["cores_busy"] if name.startswith("worker"))]
    worker_s = cpu_s(measured, "during", *parts) + network_s(measured, "during")
    worker_s /= calls.count
    link_s, return_s = hops_of(folder, measured)
    return {
        "name": "elastic",
        "model": {"layers": MODEL.layers, "context": MODEL.context, "experts": MODEL.experts,
                  "experts_used": MODEL.experts_used},
        "devices": {},
        "ring": {"stages": stages, "row_width": 128, "micro_batch_width": 8, "window": "auto",
                 "window_max": (OVERLAP + 2) * STAGES, "running_max": 32, "kv_tokens": 16000,
                 "link": {"latency_s": link_s},
                 "return_link": {"latency_s": return_s}},
        "costs": {"kind": "fixed", "turnaround_s": bridge_s(measured, "during")},
        "workload": {"kind": "closed", "users": CLIENTS, "prompt_tokens": PROMPT_TOKENS,
                     "output_tokens": TOKENS, "duration_s": measured["load_s"]},
        "experts": {
            "overlap": OVERLAP,
            "cores": measured["cores"],
            "model": {"bytes_per_expert": SLICE_BYTES // MODEL.experts},
            "local": {"per_expert_s": 0.0, "per_row_s": MODEL.experts_used * calls.pair_s},
            "coordinator": coordinator_of(policy) | {"call_s": mean(call_s)},
            "hub": hub_of(policy),
            "workers": [
                {
                    "name": "worker", "count": WORKERS, "experts_max": EXPERTS_MAX,
                    "per_expert_s": max(1e-7, worker_s / calls.experts),
                    "link": {"latency_s": max(0.0, calls.trip_s - worker_s) / 2},
                    "download_bytes_per_s": SLICE_BYTES / download_s(moments_of(folder / "events")),
                    "arrival_s": {"uniform": [0, policy.volunteer_period_ns / NANOS_PER_SECOND]},
                }
            ],
        },
        "run": {"horizon_s": measured["load_s"] + 1},
    }  # fmt: skip


def seconds(policy: SwarmPolicy, *names: str) -> list[float]:
    return [getattr(policy, name + "_ns") / NANOS_PER_SECOND for name in names]


def coordinator_of(policy: SwarmPolicy) -> dict[str, Any]:
    keys = ("period_s", "engaged_min_s", "idle_timeout_s", "grace_s", "unknown_limit_s",
            "map_period_s", "quarantine_s")  # fmt: skip
    values = seconds(policy, "decision_period", "engaged_min", "idle_timeout", "grace",
                     "blind_local", "map_period", "quarantine")  # fmt: skip
    times = dict(zip(keys, values, strict=True))
    times["poll_timeout_s"] = times["period_s"]  # Answers of this machine come long before.
    return times | {"no_gain_s": 3600}


def hub_of(policy: SwarmPolicy) -> dict[str, Any]:
    keys = ("poll_s", "reading_valid_s", "up_s", "down_s", "coverage_ttl_s", "heartbeat_s",
            "claim_ttl_s", "volunteer_poll_s", "idle_exit_s", "release_period_s")  # fmt: skip
    values = seconds(policy, "poll_period", "reading_valid", "hub_up", "hub_down", "coverage_ttl",
                     "heartbeat", "claim_ttl", "volunteer_period", "idle_exit",
                     "release_period")  # fmt: skip
    times = dict(zip(keys, values, strict=True))
    return times | {"poll_timeout_s": times["poll_s"], "base": 0, "boost": 1}


def simulated(scenario: dict[str, Any], seed: int, folder: Path) -> Report:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump(scenario))
    return run(path, seed=seed).report


def predict(folder: Path) -> dict[str, float | None]:
    """Medians over the seeds."""
    scenario = scenario_of(folder)
    found: dict[str, list[float]] = {name: [] for name in COMPARED}
    whole = json.loads(json.dumps(scenario))  # With the time in which they leave.
    hub = scenario["experts"]["hub"]
    whole["run"]["horizon_s"] += 2 * (hub["down_s"] + hub["idle_exit_s"])
    scenario["run"] |= {"warmup_s": SETTLED_S, "horizon_s": scenario["workload"]["duration_s"]}
    alone = json.loads(json.dumps(scenario))
    alone["experts"]["workers"] = []
    alone["costs"]["turnaround_s"] = bridge_s(read_measured(folder), "before")
    served = json.loads(json.dumps(scenario))
    served["experts"]["hub"] = None
    served["experts"]["workers"][0]["arrival_s"] = 0
    with tempfile.TemporaryDirectory() as kept:
        for seed in range(1, SEEDS + 1):
            loop = simulated(whole, seed, Path(kept))
            assert loop.swarm is not None
            for name, value in (
                (COMPARED[0], loop.swarm.time_to_first_relief_s),
                (COMPARED[1], loop.swarm.time_to_full_coverage_s),
                (COMPARED[2], simulated(alone, seed, Path(kept)).throughput.output_tokens_per_s),
                (COMPARED[3], simulated(served, seed, Path(kept)).throughput.output_tokens_per_s),
                (COMPARED[4], loop.swarm.time_to_contraction_s),
            ):
                if value is not None:
                    found[name].append(value)
    return {name: median(values) if values else None for name, values in found.items()}


def read_measured(folder: Path) -> dict[str, Any]:
    measured: dict[str, Any] = json.loads((folder / "measured.json").read_text())
    return measured


def runs_in(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.glob("*/measured.json"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("runs", type=Path, help="what elastic_loop.py --out wrote")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    folders = runs_in(given.runs)
    if not folders:
        parser.error(f"{given.runs} holds no run of elastic_loop.py")
    runs = []
    for folder in folders:
        predicted = predict(folder)
        runs.append((read_measured(folder)["figures"], predicted))
        print(f"{folder.name}: simulated {SEEDS} times", file=sys.stderr)
    result: dict[str, Any] = {}
    for name in COMPARED:
        real = [m[name] for m, _ in runs if m[name] is not None]
        said = [value for _, p in runs if (value := p[name]) is not None]
        if real and said:
            one, other = median(real), median(said)
            result[name] = {"measured": one, "predicted": other, "error": (other - one) / one}
    if given.json:
        print(json.dumps(result))
        return
    for name, row in result.items():
        print(f"{name:40} measured {row['measured']:8.2f}  predicted {row['predicted']:8.2f}  "
              f"{row['error']:+.0%}")  # fmt: skip


if __name__ == "__main__":
    main()
