"""What the ring costs by itself: stages that hold each micro-batch for 5 ms and compute nothing.

    python benchmarks/bench_overhead.py [--json]

In-flight against drained at the same micro-batch width for 4 and 8 stages (ideal: 4 and 8 times),
and the processor time of the bridge's engine thread per lap at width 8. Both rings are measured in
one run, interleaved, as medians of `REPEATS`.
"""

import json
import sys
import threading
from dataclasses import dataclass
from statistics import median

from kvasir_core.plan import Plan, split_evenly
from kvasir_rt import wire
from kvasir_rt.engine import Engine, EngineOptions
from kvasir_rt.member import CrewOptions
from kvasir_rt.sampling import SamplingParams
from kvasir_rt.submission import EndEvent, EngineEvent, Submission
from kvasir_rt.switchboard import LineOptions

HOLD_NS = 5_000_000
WIDTH = 8
REPEATS = 3
LAPS = 300  # Per repeat in flight; drained gets a share of it that takes about as long.


@dataclass(frozen=True, slots=True)
class Measured:
    """One repeat, from the first full lap to the last."""

    tokens_per_s: float
    engine_cpu_us_per_lap: float


def window_of(stages: int) -> int:
    """Deep enough to cover links and handovers, about a tenth of a hold each."""
    return stages + stages // 4


def plan_of(stages: int, packer: str) -> Plan:
    window = 1 if packer == "drained" else window_of(stages)
    return Plan(
        layers=split_evenly(stages, stages),
        row_width=64,
        micro_batch_width=WIDTH,
        window=window,
        window_max=window,
        running_max=WIDTH * window_of(stages),
        context=4096,
        kv_tokens=(1 << 20,) * stages,
        hidden=576,
        element_bytes=2,
        packer=packer,
    )


def measure(engine: Engine, requests: int, tokens: int, first: int) -> Measured:
    """Decode `tokens` each for `requests` one-token prompts."""
    ended = threading.Semaphore(0)

    def take(event: EngineEvent) -> None:
        if isinstance(event, EndEvent):
            ended.release()

    before = engine.snapshot()
    for request in range(first, first + requests):
        engine.submit(
            Submission(
                request_id=request,
                prompt_ids=[request],
                output_tokens_max=tokens,
                sampling=SamplingParams(),
                stop_ids=frozenset(),
                on_event=take,
            )
        )
    for _ in range(requests):
        assert ended.acquire(timeout=120)
    after = engine.snapshot()
    laps = after.laps - before.laps
    return Measured(
        tokens_per_s=(after.tokens - before.tokens) / (after.now_ns - before.now_ns) * 1e9,
        engine_cpu_us_per_lap=(after.engine_cpu_ns - before.engine_cpu_ns) / laps / 1e3,
    )


def compare(stages: int) -> dict[str, float]:
    """In flight against drained on this many stages."""
    engines = {}
    for packer in ("drained", "cohort"):
        compute = wire.FixedSpec((HOLD_NS,) * stages, 50_000)
        crew = CrewOptions(
            plan=plan_of(stages, packer), dtype="float16", compute=compute, secret="bench"
        )
        engines[packer] = Engine(EngineOptions(lines=LineOptions(crew=crew)))
    results: dict[str, list[Measured]] = {"drained": [], "cohort": []}
    try:
        for engine in engines.values():
            engine.start()
        for repeat in range(REPEATS):
            first = 10_000 * repeat
            results["drained"].append(measure(engines["drained"], WIDTH, LAPS // stages, first))
            requests = WIDTH * window_of(stages)
            results["cohort"].append(
                measure(engines["cohort"], requests, LAPS // window_of(stages), first)
            )
    finally:
        for engine in engines.values():
            engine.close()
    drained, in_flight = (
        median(one.tokens_per_s for one in results[packer]) for packer in ("drained", "cohort")
    )
    return {
        "drained_tokens_per_s": drained,
        "in_flight_tokens_per_s": in_flight,
        "in_flight_over_drained": in_flight / drained,
        "engine_cpu_us_per_lap": median(one.engine_cpu_us_per_lap for one in results["cohort"]),
    }


def main() -> None:
    """Print one line per ring, or with `--json` the figures as the last line."""
    figures = {f"{stages}_stages": compare(stages) for stages in (4, 8)}
    if "--json" in sys.argv:
        print(json.dumps(figures))
        return
    for name, figure in figures.items():
        print(
            f"{name}: in flight {figure['in_flight_tokens_per_s']:.0f} tokens/s, drained "
            f"{figure['drained_tokens_per_s']:.0f}: {figure['in_flight_over_drained']:.2f} times; "
            f"bridge {figure['engine_cpu_us_per_lap']:.0f} us a lap"
        )


if __name__ == "__main__":
    main()
