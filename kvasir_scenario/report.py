"""From a finished run to its report: the laws are checked here, and the verdict is asked for."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from kvasir_core.causes import Cause
from kvasir_core.meter import StageMeter
from kvasir_core.microbatch import BindingLimit
from kvasir_core.plan import Plan
from kvasir_core.statistics import RingStatistics
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_core.verdict import RunFacts, StageTimes, Verdict, VerdictKind, judge
from kvasir_scenario import report_schema as schema
from kvasir_scenario import tables
from kvasir_scenario.dump import to_yaml
from kvasir_scenario.latency import EXACT_MAX, Quantiles, quantiles_of
from kvasir_scenario.ledger import COMPLETE, NOT_YET, REASONS, UNSET, RequestLedger
from kvasir_scenario.run_dir import write_whole
from kvasir_scenario.schema import Scenario
from kvasir_scenario.tables import Floats, Ints


class WorkloadCounts(Protocol):
    """What reading the workload found out."""

    @property
    def trace_span_s(self) -> float | None: ...
    @property
    def out_of_order(self) -> int: ...
    @property
    def ties(self) -> int: ...
    @property
    def clipped(self) -> int: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """What a report repeats of its scenario.

    Attributes:
        name: The scenario's.
        mode: `simulated` or `measured`.
        seed: The run's.
        slo_ttft_s: A request within the SLO has its first token by then.
        slo_tpot_s: And its tokens at this pace.
        provenance: Whether the stage times are assumed, fitted or measured.
        cost_notes: How they were come by.
        notes: What a reader must know besides.
    """

    name: str
    mode: schema.Mode
    seed: int | None = None
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    provenance: schema.Provenance = "assumed"
    cost_notes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """A finished run, as the recorder knows it."""

    plan: Plan
    end_ns: int
    warmup_ns: int
    statistics: RingStatistics
    ledger: RequestLedger
    meters: tuple[StageMeter, ...]
    binding: Mapping[BindingLimit, int]
    spans: int
    rows: int
    trace_failed: int
    workload: WorkloadCounts
    labels: Labels
    link_busy_ns: tuple[int, ...]

    @property
    def micro_batches(self) -> int:
        return sum(self.binding.values())

    @property
    def window_s(self) -> float:
        """Length of the measured window."""
        return max(0, self.end_ns - self.warmup_ns) / NANOS_PER_SECOND


def report_of(run: RunRecord) -> schema.Report:
    """Check the laws R11 and R12, judge the run, and put its figures together."""
    _check_laws(run)
    verdict = judge(_facts(run))
    throughput, latency = _performance(run)
    plan, statistics, labels = run.plan, run.statistics, run.labels
    return schema.Report(
        schema_version=schema.SCHEMA_VERSION,
        name=labels.name,
        mode=labels.mode,
        seed=labels.seed,
        verdict=schema.VerdictPart(
            kind=verdict.kind, stage=verdict.stage, evidence=list(verdict.evidence)
        ),
        notes=_notes(run, verdict, latency),
        plan=schema.PlanPart(
            row_width=plan.row_width,
            micro_batch_width=plan.micro_batch_width,
            boundary_bytes_max=plan.boundary_bytes_max,
            result_bytes_max=plan.result_bytes_max,
            window=statistics.window,
            digest=plan.digest,
        ),
        counts=_counts(run),
        throughput=throughput,
        latency=latency,
        stages=[_stage(run, stage) for stage in range(plan.stages)],
        binding_limits=schema.BindingPart(
            **{
                limit.value: run.binding.get(limit, 0) + statistics.stalls.get(limit, 0)
                for limit in BindingLimit
            }
        ),
        micro_batches=run.micro_batches,
        kv=schema.KvPart(
            blocks_total=statistics.kv_blocks_total,
            blocks_peak=statistics.kv_blocks_peak,
            preemptions=statistics.preemptions,
            recomputed_tokens=statistics.rows_recomputed,
        ),
        workload=schema.WorkloadPart(
            trace_span_s=run.workload.trace_span_s,
            out_of_order=run.workload.out_of_order,
            ties=run.workload.ties,
            clipped=run.workload.clipped,
            trace_failed=run.trace_failed,
        ),
        little=_little(run),
        slo=schema.SloPart(ttft_s=labels.slo_ttft_s, tpot_s=labels.slo_tpot_s),
        costs=schema.CostsPart(provenance=labels.provenance, notes=list(labels.cost_notes)),
        elapsed_s=run.end_ns / NANOS_PER_SECOND,
        measured_window_s=(
            min(run.warmup_ns, run.end_ns) / NANOS_PER_SECOND,
            run.end_ns / NANOS_PER_SECOND,
        ),
        swarm=None,
        variants=[],
    )


def write_report(run_dir: Path, report: schema.Report) -> Path:
    """Write `report.json`, the last file of a run; a directory without it is unfinished."""
    path = run_dir / "report.json"
    write_whole(path, report.to_json().encode())
    return path


def finish_run_dir(
    run_dir: Path, scenario: Scenario, report: schema.Report, *, plots: bool
) -> None:
    """What stands beside the tables: the scenario as it was run, plots and page, the report.

    Raises:
        OutputError: A file cannot be written.
    """
    write_whole(run_dir / "scenario.yaml", to_yaml(scenario).encode())
    if plots:
        from kvasir_scenario.page import write_page
        from kvasir_scenario.plots import write_plots

        write_plots(run_dir, report)
        write_page(run_dir, report)
    write_report(run_dir, report)


def _check_laws(run: RunRecord) -> None:
    """Assert R11 and R12 over the whole run, in integers."""
    statistics, ledger = run.statistics, run.ledger
    for stage, meter in enumerate(run.meters):
        times = (meter.busy_ns, meter.blocked_ns, meter.starved_ns)
        assert min(times) >= 0, f"stage {stage}: negative time in {times}"
        assert sum(times) == run.end_ns, f"stage {stage}: {times} do not sum to {run.end_ns} ns"
    counts = _counts(run)
    parts = counts.model_dump()
    offered = parts.pop("offered")
    assert offered == sum(parts.values()), f"requests were lost or doubled: {counts}"
    assert offered == ledger.offered.size, f"{ledger.offered.size} rows for {offered} requests"
    residence = ledger.residence_ns(run.end_ns)
    assert residence == statistics.in_system_ns, (
        f"Little's law: residences sum to {residence} ns, not to {statistics.in_system_ns}"
    )


def _counts(run: RunRecord) -> schema.CountsPart:
    """Requests over the whole run; those that failed in their trace never entered the ring."""
    statistics = run.statistics
    return schema.CountsPart(
        offered=statistics.offered + run.trace_failed,
        finished=statistics.finished,
        running=statistics.running,
        waiting=statistics.waiting,
        refused=statistics.refused,
        cancelled=statistics.cancelled,
        failed=statistics.failed + run.trace_failed,
    )


def _little(run: RunRecord) -> schema.LittlePart:
    entered = run.statistics.offered - run.statistics.refused
    in_system = run.statistics.in_system_ns
    return schema.LittlePart(
        in_system_mean=in_system / run.end_ns if run.end_ns else None,
        arrival_rate_per_s=entered / (run.end_ns / NANOS_PER_SECOND) if run.end_ns else None,
        residence_mean_s=in_system / entered / NANOS_PER_SECOND if entered else None,
    )


def _performance(run: RunRecord) -> tuple[schema.ThroughputPart, schema.LatenciesPart]:
    """Throughput and latency of the measured window: events count when they happen."""
    ledger, labels = run.ledger, run.labels
    slots = ledger.offered
    first = slots[ledger.in_window(ledger.first_token[slots])]
    first = first[ledger.first_token[first] >= 0]
    done = slots[np.isin(ledger.reasons[slots], COMPLETE)]
    done = done[ledger.in_window(ledger.ended[done])]
    ttft_ns = ledger.first_token - ledger.arrival
    e2e_ns = ledger.ended - ledger.arrival
    paced = done[ledger.tokens[done] > 1]
    tpot_ns = _tpot_ns(ledger, paced)
    latency = schema.LatenciesPart(
        ttft_s=_latency(quantiles_of(ttft_ns[first])),
        tpot_s=_latency(quantiles_of(tpot_ns)),
        itl_s=_latency(ledger.gaps.quantiles()),
        e2e_s=_latency(quantiles_of(e2e_ns[done])),
    )
    good: float | None = None
    if labels.slo_ttft_s is not None or labels.slo_tpot_s is not None:
        is_good = np.ones(ledger.size, np.bool_)
        if labels.slo_ttft_s is not None:
            is_good &= ttft_ns <= labels.slo_ttft_s * NANOS_PER_SECOND
        if labels.slo_tpot_s is not None:
            is_good[paced] &= tpot_ns <= labels.slo_tpot_s * NANOS_PER_SECOND
        good = float(is_good[done].sum())
    span = run.window_s
    throughput = schema.ThroughputPart(
        requests_per_s=done.size / span if span else None,
        output_tokens_per_s=ledger.tokens_in_window / span if span else None,
        goodput_requests_per_s=good / span if span and good is not None else None,
    )
    return throughput, latency


def _tpot_ns(ledger: RequestLedger, slots: Ints) -> Floats:
    """(End to end - TTFT) / (tokens - 1); the requests must have more than one token."""
    return (ledger.ended[slots] - ledger.first_token[slots]) / (ledger.tokens[slots] - 1)


def _latency(quantiles: Quantiles) -> schema.LatencyPart:
    return schema.LatencyPart(**{**asdict(quantiles), "few_samples": list(quantiles.few_samples)})


def _stage(run: RunRecord, index: int) -> schema.StagePart:
    meter = run.meters[index]

    def seconds(time_ns: int) -> float:
        return time_ns / NANOS_PER_SECOND

    return schema.StagePart(
        index=index,
        layers=run.plan.layers[index],
        held_s=seconds(meter.busy_ns + meter.blocked_ns),
        busy_s=seconds(meter.busy_ns),
        blocked_s=seconds(meter.blocked_ns),
        starved_s=seconds(meter.starved_ns),
        blocked_by=schema.BlockedPart(
            credit=seconds(meter.blocked_by_credit_ns),
            experts=seconds(meter.blocked_by_experts_ns),
        ),
        starved_by=schema.StarvedPart(
            **{cause.value: seconds(meter.starved_by_ns[cause]) for cause in Cause}
        ),
        micro_batches=meter.micro_batches,
        rows=meter.rows,
    )


def _facts(run: RunRecord) -> RunFacts:
    plan, statistics = run.plan, run.statistics
    counts = _counts(run)
    batches = max(1, run.micro_batches)
    return RunFacts(
        elapsed_ns=run.end_ns,
        stages=tuple(
            StageTimes(
                busy_ns=meter.busy_ns,
                blocked_by_credit_ns=meter.blocked_by_credit_ns,
                blocked_by_experts_ns=meter.blocked_by_experts_ns,
                starved_by_ns=meter.starved_by_ns,
            )
            for meter in run.meters
        ),
        binding=run.binding,
        spans_mean=run.spans / batches,
        micro_batch_width=plan.micro_batch_width,
        rows_mean=run.rows / batches,
        row_width=plan.row_width,
        queue=run.ledger.queue(run.end_ns),
        offered=counts.offered,
        finished=counts.finished,
        waiting=counts.waiting,
        running=counts.running,
        link_busy_shares=tuple(busy / max(1, run.end_ns) for busy in run.link_busy_ns),
        kv_blocks_peak=statistics.kv_blocks_peak,
        kv_blocks_total=statistics.kv_blocks_total,
        preemptions=statistics.preemptions,
    )


def _notes(run: RunRecord, verdict: Verdict, latency: schema.LatenciesPart) -> list[str]:
    """What a reader must know before using the figures, the most misleading first."""
    counts = _counts(run)
    notes = []
    if verdict.kind is VerdictKind.OVERLOADED:
        notes.append(verdict.evidence[0])
    if counts.running or counts.waiting:
        done = f"{counts.finished} of {counts.offered}"
        notes.append(f"end-to-end and TPOT are of the finished requests only: {done}")
    if run.end_ns <= run.warmup_ns and run.warmup_ns:
        notes.append("the run ended within the warm-up: nothing was measured")
    for name, part in latency:
        if part.n and part.few_samples:
            few = ", ".join(part.few_samples)
            notes.append(f"{name}: too few samples for {few} ({part.n} samples)")
    if not run.ledger.gaps.is_exact:
        notes.append(f"itl_s: percentiles within 0.02 % (more than {EXACT_MAX} samples)")
    return [*notes, *run.workload.warnings, *run.labels.notes]


def request_columns(ledger: RequestLedger) -> Iterator[Sequence[Any]]:
    """`requests.parquet`, one row group at a time, ascending by request id."""
    slots_all = ledger.offered
    for at in range(0, slots_all.size, tables.ROW_GROUP_ROWS):
        slots = slots_all[at : at + tables.ROW_GROUP_ROWS]
        arrival, ended = ledger.arrival[slots], ledger.ended[slots]
        composed, first = ledger.composed[slots], ledger.first_token[slots]
        codes = ledger.reasons[slots]
        is_done = np.isin(codes, COMPLETE)
        tpot = np.full(slots.size, np.nan)
        is_paced = is_done & (ledger.tokens[slots] > 1)
        tpot[is_paced] = _tpot_ns(ledger, slots[is_paced]) / NANOS_PER_SECOND
        yield [
            slots + ledger.base,
            tables.seconds(arrival),
            ledger.prompt_tokens[slots],
            ledger.tokens[slots],
            tables.seconds(np.where(composed == UNSET, NOT_YET, composed - arrival)),
            tables.seconds(np.where(first < 0, NOT_YET, first - arrival)),
            tables.numbers(tpot, ~is_paced),
            tables.seconds(np.where(is_done, ended - arrival, NOT_YET)),
            tables.texts(["" if code < 0 else REASONS[code] for code in codes], codes < 0),
            ledger.preemptions[slots],
        ]
