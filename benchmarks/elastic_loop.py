"""The elastic loop, end to end, with real processes on this machine: what happens, and when.

    .venv/bin/python benchmarks/elastic_loop.py [--repeats 5] [--delay-ms N] [--json] [--out DIR]

A hub, a tiny random qwen3moe model (8 layers, 16 experts, top-4) in two stages, and three idle
workers. Load comes; slots saturate; the target rises from base 0 to boost 1; the workers get
disjoint slices, download, dial, prove themselves and serve; load goes and they fade out. All times
of the policy are divided by ten. Moments come from the event logs of hub and coordinators, each
replayed through a fresh core, so every run is a parity check too.

The last line with `--json`: `{runs: [...], median: {...}}`, times in seconds, null if not reached.
"""

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.e2e.swarm_timeline import (
    Moment,
    first,
    last,
    moments_of,
    replay_coordinator,
    replay_hub,
)
from tests.e2e.swarm_world import Load, World, WorldOptions, until, world
from tests.rt.swarm.swarms import read_status
from tests.rt.tiny_models import TinyModel

WORKERS = 3
CLIENTS = 8
TOKENS = 24
EXPERTS_MAX = 48  # Of one worker: three hold eight layers of sixteen.
MODEL = TinyModel(architecture="qwen3moe", layers=8, experts=16, experts_used=4)
STEADY_S = 15.0  # The swarm serves for so long.
LOCAL_S = 3.5  # Before the market answers to load: as long for "before" as for "after".
WARM_S = 1.0
REST_S = 3.0  # Everybody is there and nobody asks for anything: what polling costs.
SAMPLE_S = 0.2
RISE_S, FADE_S = 120.0, 240.0
TELL = (
    "hub reads high", "engages", "target rises", "assigned", "covers", "dials", "trial",
    "hub knows it proven", "hub reads low", "disengages", "target falls", "released", "leaves",
    "lost",
)  # fmt: skip


class Sampler:
    """The bridge's count of tokens and the machine's busy cores, over time."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stop = threading.Event()
        self._samples: list[tuple[int, dict[str, Any]]] = []
        self._cpu_s: list[dict[str, float]] = []  # At each sample, by part, since its beginning.
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            ring = self._world.ring()
            self._cpu_s.append(self._parts(ring))
            self._samples.append((time.monotonic_ns(), ring))

    def _parts(self, ring: dict[str, Any]) -> dict[str, float]:
        """Processor seconds of the machine and of each part of the loop."""
        made = self._world
        parts = {"machine": machine_cpu_s(), "clients": time.process_time()}
        for name, file in (("hub", "hub.json"), ("bridge", "serve.json")):
            parts[name] = cpu_s(read_status(made.root / file)["pid"])
        for number, stage in enumerate(ring["stages"]):
            parts[f"stage {number}"] = cpu_s(stage["pid"])
            parts[f"stage {number} computing"] = cpu_s(stage["pid"], is_main_only=True)
        for name, worker in made.workers.items():
            parts[name] = cpu_s(worker.process.pid)
        return parts

    def between(self, begin_ns: int, end_ns: int) -> dict[str, Any]:
        """What the ring did between two moments; empty where there are no two samples."""
        places = [k for k, (at, _) in enumerate(self._samples) if begin_ns <= at <= end_ns]
        if len(places) < 2:
            return {}
        (began, before), (ended, after) = (self._samples[places[end]] for end in (0, -1))
        seconds = (ended - began) / 1e9
        then, now = self._cpu_s[places[0]], self._cpu_s[places[-1]]
        cores = {part: (now[part] - then[part]) / seconds for part in now}
        stages = []
        for old, new in zip(before["stages"], after["stages"], strict=True):
            batches = max(1, new["micro_batches"] - old["micro_batches"])
            stages.append(
                {
                    "busy_s": (new["busy_s"] - old["busy_s"]) / batches,
                    "rows": (new["rows"] - old["rows"]) / batches,
                    "micro_batches": batches,
                    "busy_share": (new["busy_s"] - old["busy_s"]) / seconds,
                }
            )
        tokens = after["output_tokens"] - before["output_tokens"]
        return {"tokens_per_s": tokens / seconds, "stages": stages, "lap_s": after["lap_s"]["p50"],
                "cores_busy": cores, "begin_ns": began, "end_ns": ended}  # fmt: skip


def run_once(root: Path, faster: int, delay_ms: int, say: Any) -> dict[str, Any]:
    """One loop; its figures."""
    log = ("--events", str(root / "ring.jsonl"))
    options = WorldOptions(model=MODEL, faster=faster, overlap=4, serve=log)
    with world(root, options) as made, Sampler(made) as sampler:
        for number in range(WORKERS):
            made.start_worker(f"worker-{number}", *worker_options(delay_ms))
        until("idle workers ask", lambda: _states(made) == ["idle"] * WORKERS)
        rest_ns = time.monotonic_ns()
        time.sleep(REST_S)
        zero_ns = time.monotonic_ns()
        with Load(made, CLIENTS, TOKENS) as load:
            until("all slices are served", lambda: _is_covered(made), RISE_S)
            until("the swarm serves", made.has_proven_worker, RISE_S)
            time.sleep(STEADY_S)
        gone_ns = time.monotonic_ns()
        _check(load)
        fade_s = until("the workers fade out", lambda: _is_idle(made), FADE_S)
        parked = [stage["blocked_by"]["experts"] for stage in made.ring()["stages"]]
        again_ns = time.monotonic_ns()
        with Load(made, CLIENTS, TOKENS) as again:
            time.sleep(WARM_S + LOCAL_S)  # Shorter than the hub's dwell and a download: all local.
        over_ns = time.monotonic_ns()
        _check(again)
        assert all(load.texts.get(k) == v for k, v in again.texts.items()), "tokens differ"
    moments = moments_of(made.events)
    for moment in moments:
        if moment.kind in TELL and over_ns >= moment.at_ns >= zero_ns:
            say(f"{(moment.at_ns - zero_ns) / 1e9:8.2f} s  {moment.kind:20} {moment.detail}")
    warm_ns = int(WARM_S * 1e9)
    comes = first(moments, "covers", zero_ns)
    assert comes is not None
    measured: dict[str, Any] = {
        "rest": sampler.between(rest_ns, zero_ns),
        "before": sampler.between(zero_ns + warm_ns, comes.at_ns),
        "during": sampler.between(gone_ns - int(STEADY_S * 1e9) + 2 * warm_ns, gone_ns),
        "after": sampler.between(again_ns + warm_ns, over_ns),
    }
    found = figures([m for m in moments if zero_ns <= m.at_ns < again_ns], zero_ns, gone_ns)
    found |= {
        f"tokens_per_s_{when}": measured[when].get("tokens_per_s")
        for when in ("before", "during", "after")
    }
    found |= {
        "contraction_s": fade_s,
        "blocked_by_experts_s": sum(parked),
        "is_replay_identical": _is_identical(made.events),
    }
    measured |= {"figures": found, "load_s": (gone_ns - zero_ns) / 1e9, "faster": faster,
                 "delay_ms": delay_ms, "zero_ns": zero_ns,
                 "cores": len(os.sched_getaffinity(0))}  # fmt: skip
    (root / "measured.json").write_text(json.dumps(measured) + "\n")
    return found


def cpu_s(pid: int, *, is_main_only: bool = False) -> float:
    """Processor seconds of a process so far, of all its threads or of the main one."""
    path = f"/proc/{pid}/task/{pid}/stat" if is_main_only else f"/proc/{pid}/stat"
    fields = Path(path).read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_cpu_s() -> float:
    """Of everybody so far: user, nice, system, interrupts."""
    names = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return sum(int(names[place]) for place in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")


def worker_options(delay_ms: int) -> list[str]:
    delay = ["--delay-ms", str(delay_ms)] if delay_ms else []
    return ["--max-experts", str(EXPERTS_MAX), *delay]


def _check(load: Load) -> None:
    assert not load.errors, load.errors
    assert all(len(texts) == 1 for texts in load.texts.values()), "tokens differ"


def figures(moments: list[Moment], zero_ns: int, gone_ns: int) -> dict[str, Any]:
    """Times of the loop, in seconds from the first high reading, or from the load's end."""
    high = first(moments, "hub reads high", zero_ns)
    start_ns = high.at_ns if high is not None else zero_ns

    def since(kind: str, zero: int = start_ns) -> float | None:
        found = first(moments, kind, zero)
        return None if found is None else (found.at_ns - zero) / 1e9

    during = [m for m in moments if m.at_ns < gone_ns]
    accepts = [m for m in during if m.kind == "accepts"]
    last_remote = last(moments, "dispatch")
    covered = [m for m in during if m.kind == "covers"]
    return {
        "load_to_saturation_s": (start_ns - zero_ns) / 1e9,
        "saturation_to_target_s": since("target rises"),
        "saturation_to_first_slice_s": since("assigned"),
        "saturation_to_first_coverage_s": since("covers"),
        "saturation_to_full_coverage_s": (covered[-1].at_ns - start_ns) / 1e9 if covered else None,
        "saturation_to_first_remote_expert_s": (
            (accepts[0].at_ns - start_ns) / 1e9 if accepts else None
        ),
        "load_end_to_last_dispatch_s": (
            (last_remote.at_ns - gone_ns) / 1e9 if last_remote is not None else None
        ),
        "load_end_to_disengaged_s": since("disengages", gone_ns),
        "load_end_to_target_falls_s": since("target falls", gone_ns),
        "slices": len({m.detail for m in during if m.kind == "assigned"}),
        "workers": len({m.detail.split()[0] for m in covered}),
        "parts_accepted": len(accepts),
    }


def _states(made: World) -> list[Any]:
    return [worker.status().get("state") for worker in made.workers.values()]


def _is_idle(made: World) -> bool:
    return _states(made) == ["idle"] * WORKERS and made.recruitment()["workers"] == 0


def _is_covered(made: World) -> bool:
    return all(segment["replicas"] >= 1 for segment in made.segments())


def _is_identical(events: Path) -> bool:
    replays = [replay_hub(events / "hub.jsonl")]
    replays += [replay_coordinator(path) for path in sorted(events.glob("coordinator-*.jsonl"))]
    return all(each.is_identical for each in replays if each.is_identical is not None)


def medians(runs: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key in runs[0]:
        values = [run[key] for run in runs]
        if all(isinstance(value, bool) for value in values):
            found[key] = all(values)
        else:
            known = [value for value in values if value is not None]
            found[key] = round(median(known), 3) if known else None
    return found


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.partition(":")[2].strip() for line in lines if "model name" in line), "?")
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--faster", type=int, default=10, help="divide all policy times by this")
    parser.add_argument(
        "--delay-ms", type=int, default=0,
        help="every answer of a worker waits so long, so that not all wait for the same cores",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="figures as JSON on standard output")
    parser.add_argument("--out", type=Path, help="keep logs and event logs here")
    given = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr if given.json else sys.stdout, flush=True)

    say(cpu_name())
    runs = []
    for number in range(given.repeats):
        say(f"run {number + 1} of {given.repeats}")
        keep = given.out is not None
        with nullcontext(str(given.out)) if keep else tempfile.TemporaryDirectory() as folder:
            root = Path(folder) / f"run-{number + 1}"
            root.mkdir(parents=True)
            runs.append(run_once(root, given.faster, given.delay_ms, say))
        for key, value in runs[-1].items():
            say(f"  {key:40} {value if not isinstance(value, float) else round(value, 2)}")
    found = {"machine": cpu_name(), "runs": runs, "median": medians(runs)}
    if given.json:
        print(json.dumps(found))
    elif given.repeats > 1:
        say(f"median: {json.dumps(found['median'], indent=1)}")


if __name__ == "__main__":
    main()
