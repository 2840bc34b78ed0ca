"""The ring for people and programs: `/api/ring` and `/slots` as JSON, its metrics for `/metrics`.

Names are those of `report.json`. The engine's snapshot waits for the engine's thread, so routes
take it in a thread of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvasir_core.causes import Cause
from kvasir_core.microbatch import BindingLimit
from kvasir_core.plan import Plan
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_rt.bridge.swarm_view import swarm_metrics, swarm_view
from kvasir_rt.laps import StageTimes
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.snapshot import RingSnapshot, StageSnapshot

Json = dict[str, Any]


def seconds(nanos: int) -> float:
    return nanos / NANOS_PER_SECOND


def ring_view(model: str, snapshot: RingSnapshot) -> Json:
    """`/api/ring`: the plan, the stages with their processes and meters, the counts so far."""
    statistics = snapshot.statistics
    return {
        "model": model,
        "state": "down" if snapshot.down_why else "ready" if snapshot.is_ready else "recovering",
        "down_why": snapshot.down_why or None,
        "plan": _plan_part(snapshot.plan, statistics.window),
        "counts": {
            "offered": statistics.offered,
            "finished": statistics.finished,
            "running": statistics.running,
            "waiting": statistics.waiting,
            "refused": statistics.refused,
            "cancelled": statistics.cancelled,
            "failed": statistics.failed,
        },
        "stages": [_stage_part(stage) for stage in snapshot.stages],
        "binding_limits": binding_counts(snapshot),
        "micro_batches": statistics.micro_batches,
        "kv": {
            "blocks_total": statistics.kv_blocks_total,
            "blocks_in_use": statistics.kv_blocks_in_use,
            "blocks_peak": statistics.kv_blocks_peak,
            "preemptions": statistics.preemptions,
            "recomputed_tokens": statistics.rows_recomputed,
        },
        "elapsed_s": seconds(snapshot.now_ns),
        "window": statistics.window,
        "epoch": statistics.epoch,
        "open": statistics.open,
        "laps": snapshot.laps,
        "spans": snapshot.spans,
        "lap_s": {
            "p50": _seconds_or_none(snapshot.lap_ns_p50),
            "p95": _seconds_or_none(snapshot.lap_ns_p95),
        },
        "output_tokens": snapshot.tokens,
        "bridge": {
            "engine_cpu_s": seconds(snapshot.engine_cpu_ns),
            "traffic_bytes": snapshot.traffic,
        },
        "swarm": swarm_view(snapshot.stages),
    }


def slots_view(snapshot: RingSnapshot) -> list[Json]:
    """`/slots` as llama.cpp's server gives it: one entry per `running_max`.

    A slot is processing from a request's admission to its last token; who waits has none.
    """
    running = snapshot.statistics.running
    return [
        {"id": index, "is_processing": index < running, "n_ctx": snapshot.plan.context}
        for index in range(snapshot.plan.running_max)
    ]


def _plan_part(plan: Plan, window: int) -> Json:
    return {
        "layers": [list(span) for span in plan.layers],
        "row_width": plan.row_width,
        "micro_batch_width": plan.micro_batch_width,
        "boundary_bytes_max": plan.boundary_bytes_max,
        "result_bytes_max": plan.result_bytes_max,
        "window": window,
        "window_max": plan.window_max,
        "window_auto": plan.window_auto,
        "running_max": plan.running_max,
        "context": plan.context,
        "kv_tokens": list(plan.kv_tokens),
        "kv_block": plan.kv_block,
        "credits": plan.credits,
        "packer": plan.packer,
        "digest": plan.digest,
    }


def _stage_part(stage: StageSnapshot) -> Json:
    times = stage.times
    blocked_ns = times.blocked_by_credit_ns + times.blocked_by_experts_ns
    return {
        "index": stage.index,
        "layers": list(stage.layers),
        "state": stage.state,
        "pid": stage.pid,
        "host": stage.host,
        "device": stage.device,
        "restarts": stage.restarts,
        "resident_bytes": stage.resident_bytes,
        "holding": stage.holding,
        "held_s": seconds(times.busy_ns + blocked_ns),
        "busy_s": seconds(times.busy_ns),
        "blocked_s": seconds(blocked_ns),
        "starved_s": seconds(sum(times.starved_by_ns.values())),
        "blocked_by": {
            "credit": seconds(times.blocked_by_credit_ns),
            "experts": seconds(times.blocked_by_experts_ns),
        },
        "starved_by": {str(cause): seconds(times.starved_by_ns[cause]) for cause in Cause},
        "elapsed_s": seconds(times.elapsed_ns),
        "micro_batches": times.micro_batches,
        "rows": times.rows,
        "traffic_bytes": stage.traffic,
    }


def binding_counts(snapshot: RingSnapshot) -> dict[str, int]:
    """What stopped each micro-batch; of window and dependency, how often one forbade another."""
    stalls = snapshot.statistics.stalls
    return {
        str(limit): stalls.get(limit, 0) + snapshot.binding_limits.get(limit, 0)
        for limit in BindingLimit
    }


def _seconds_or_none(nanos: int | None) -> float | None:
    return None if nanos is None else seconds(nanos)


class RingCollector(Collector):
    """The ring's own metrics, read from a snapshot when they are scraped.

    Args:
        snapshot: The engine's.
    """

    def __init__(self, snapshot: Callable[[], RingSnapshot]) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        try:
            snapshot = self._snapshot()
        except RingDown:
            yield _gauge("ring_up", "Whether the ring serves.", 0)
            return
        yield _gauge("ring_up", "Whether the ring serves.", int(snapshot.is_ready))
        yield from _request_metrics(snapshot)
        yield from _ring_metrics(snapshot)
        yield from _stage_metrics(snapshot.stages)
        yield from swarm_metrics(snapshot.stages)


def _request_metrics(snapshot: RingSnapshot) -> Iterator[Metric]:
    statistics = snapshot.statistics
    used = statistics.kv_blocks_in_use / statistics.kv_blocks_total
    yield _gauge("num_requests_running", "Requests in the ring.", statistics.running)
    yield _gauge("num_requests_waiting", "Requests in the ring's queue.", statistics.waiting)
    yield _gauge("num_requests_running_max", "The plan's cap.", snapshot.plan.running_max)
    yield _gauge("kv_cache_usage_perc", "KV blocks in use, 1 is all.", used)
    yield _counter("num_preemptions", "Requests that lost their KV.", statistics.preemptions)
    yield _counter("rows_recomputed", "Rows computed again.", statistics.rows_recomputed)


def _ring_metrics(snapshot: RingSnapshot) -> Iterator[Metric]:
    statistics = snapshot.statistics
    yield _gauge("window", "Micro-batches that may be open.", statistics.window)
    yield _gauge("micro_batches_open", "Micro-batches in the ring.", statistics.open)
    yield _gauge("epoch", "Rebirths of the ring.", statistics.epoch)
    yield _counter("laps", "Micro-batches that came back.", snapshot.laps)
    yield _counter("micro_batches", "Micro-batches composed.", statistics.micro_batches)
    lap = Metric("kvasir_lap_time_seconds", "Head to tail to head, of the last laps.", "summary")
    for quantile, nanos in (("0.5", snapshot.lap_ns_p50), ("0.95", snapshot.lap_ns_p95)):
        value = float("nan") if nanos is None else seconds(nanos)
        lap.add_sample(lap.name, {"quantile": quantile}, value)
    yield lap
    binding = CounterMetricFamily(
        "kvasir_binding_limit", "What stopped micro-batches from filling.", labels=["limit"]
    )
    for limit, count in binding_counts(snapshot).items():
        binding.add_metric([limit], count)
    yield binding


def _stage_metrics(stages: Sequence[StageSnapshot]) -> Iterator[Metric]:
    yield _per_stage("busy_seconds", "Computing.", stages, lambda t: seconds(t.busy_ns))
    yield _per_stage(
        "blocked_seconds",
        "Holding a micro-batch that cannot go on.",
        stages,
        lambda t: seconds(t.blocked_by_credit_ns + t.blocked_by_experts_ns),
    )
    yield _per_stage(
        "starved_seconds",
        "Empty-handed.",
        stages,
        lambda t: seconds(sum(t.starved_by_ns.values())),
    )
    yield _per_stage("rows", "Rows computed.", stages, lambda t: t.rows)
    yield _per_stage("micro_batches", "Micro-batches done.", stages, lambda t: t.micro_batches)
    causes = CounterMetricFamily(
        "kvasir_stage_starved_by_seconds", "Empty-handed, by cause.", labels=["stage", "cause"]
    )
    up = GaugeMetricFamily("kvasir_stage_up", "Whether the stage is wired.", labels=["stage"])
    restarts = CounterMetricFamily(
        "kvasir_stage_restarts", "Replacements of a lost stage.", labels=["stage"]
    )
    for stage in stages:
        label = str(stage.index)
        for cause in Cause:
            causes.add_metric([label, str(cause)], seconds(stage.times.starved_by_ns[cause]))
        up.add_metric([label], int(stage.state == "wired"))
        restarts.add_metric([label], stage.restarts)
    yield from (causes, up, restarts)


def _per_stage(
    name: str, text: str, stages: Sequence[StageSnapshot], value: Callable[[StageTimes], float]
) -> Metric:
    family = CounterMetricFamily(f"kvasir_stage_{name}", text, labels=["stage"])
    for stage in stages:
        family.add_metric([str(stage.index)], value(stage.times))
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"kvasir_{name}", text, value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"kvasir_{name}", text, value)
