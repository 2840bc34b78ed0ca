"""The figures of one run that a table of many runs has: name with unit, type, and where from.

Undefined figures are null, as in the report. Shares are of the elapsed time, or of micro-batches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from kvasir_core.microbatch import BindingLimit
from kvasir_scenario.report_schema import LatencyPart, Report, StagePart

Kind = Literal["text", "whole", "number"]
LATENCIES = ("ttft", "tpot", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")


@dataclass(frozen=True, slots=True)
class Figure:
    """One column."""

    name: str
    kind: Kind
    of: Callable[[Report], Any]


def _latency(name: str, statistic: str) -> Figure:
    def of(report: Report) -> Any:
        return getattr(getattr(report.latency, f"{name}_s"), statistic)

    return Figure(f"{name}_{statistic}_s", "number", of)


def _few(report: Report) -> str:
    """Percentiles on too few samples to be trusted, such as `ttft_p99 e2e_p99`."""
    few = []
    for name in LATENCIES:
        part: LatencyPart = getattr(report.latency, f"{name}_s")
        few += [f"{name}_{percentile}" for percentile in part.few_samples]
    return " ".join(few)


def _share(name: str, seconds: Callable[[StagePart], float], *, most: bool = False) -> Figure:
    """Of the elapsed time: mean over the stages, or of the stage that has most."""

    def of(report: Report) -> float | None:
        if not report.elapsed_s:
            return None
        shares = [seconds(stage) / report.elapsed_s for stage in report.stages]
        return max(shares) if most else sum(shares) / len(shares)

    return Figure(name, "number", of)


def _limit(limit: BindingLimit) -> Figure:
    def of(report: Report) -> float | None:
        count = getattr(report.binding_limits, limit.value)
        return count / report.micro_batches if report.micro_batches else None

    return Figure(f"{limit.value}_share", "number", of)


def _swarm(name: str, kind: Kind) -> Figure:
    def of(report: Report) -> Any:
        return None if report.swarm is None else getattr(report.swarm, name)

    return Figure(name, kind, of)


def _count(name: str) -> Figure:
    return Figure(name, "whole", lambda report: getattr(report.counts, name))


def _throughput(name: str) -> Figure:
    return Figure(name, "number", lambda report: getattr(report.throughput, name))


FIGURES = (
    Figure("verdict", "text", lambda report: report.verdict.kind.value),
    Figure("verdict_stage", "whole", lambda report: report.verdict.stage),
    *map(_count, ("offered", "finished", "running", "waiting", "refused", "cancelled", "failed")),
    *map(_throughput, ("requests_per_s", "output_tokens_per_s", "goodput_requests_per_s")),
    *(_latency(name, statistic) for name in LATENCIES for statistic in STATISTICS),
    Figure("few_samples", "text", _few),
    Figure("residence_mean_s", "number", lambda report: report.little.residence_mean_s),
    Figure("in_system_mean", "number", lambda report: report.little.in_system_mean),
    _share("busy_share_mean", lambda stage: stage.busy_s),
    _share("busy_share_max", lambda stage: stage.busy_s, most=True),
    _share("blocked_share_mean", lambda stage: stage.blocked_s),
    _share("starved_share_mean", lambda stage: stage.starved_s),
    *(_limit(limit) for limit in BindingLimit),
    Figure("micro_batches", "whole", lambda report: report.micro_batches),
    Figure("window", "whole", lambda report: report.plan.window),
    Figure("kv_blocks_peak", "whole", lambda report: report.kv.blocks_peak),
    Figure("kv_blocks_total", "whole", lambda report: report.kv.blocks_total),
    Figure("preemptions", "whole", lambda report: report.kv.preemptions),
    Figure("recomputed_tokens", "whole", lambda report: report.kv.recomputed_tokens),
    Figure("trace_span_s", "number", lambda report: report.workload.trace_span_s),
    Figure("elapsed_s", "number", lambda report: report.elapsed_s),
    _swarm("workers_covering_max", "whole"),
    _swarm("share_remote_pairs", "number"),
    _swarm("engaged_s", "number"),
    _swarm("downloads", "whole"),
)


def figures_of(report: Report) -> dict[str, Any]:
    """Every figure by name."""
    return {figure.name: figure.of(report) for figure in FIGURES}
