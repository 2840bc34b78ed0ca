"""The page's tables: latency, stages, variants, the swarm, and the slowest requests."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvasir_scenario.page_part import Cell, PageTable, count, share, word
from kvasir_scenario.plots import read_table
from kvasir_scenario.report_schema import LatencyPart, Report
from kvasir_scenario.swarm_variants import columns, labels, what_pays
from kvasir_scenario.wording import UNDEFINED, duration

REQUESTS_MAX = 200  # Rows of requests: what a person looks through.
MARK = "*"  # Behind a percentile on too few samples.
LATENCY_NAMES = {
    "ttft_s": "TTFT",
    "tpot_s": "TPOT",
    "itl_s": "between tokens",
    "e2e_s": "end to end",
}
Runs = Sequence[tuple[str, Report]]


def seconds(value: float | None, mark: str = "") -> Cell:
    return Cell(duration(value) + mark, value)


def latencies(report: Report) -> PageTable:
    few = any(part.n and part.few_samples for _, part in report.latency)
    note = "Arrival to first token (TTFT), time per later token (TPOT); both include queueing."
    return PageTable(
        heading="Latency",
        anchor="latency-table",
        columns=("kind", "mean", "p50", "p90", "p99", "samples"),
        rows=[
            [word(LATENCY_NAMES[name]), *_quantiles(part), count(part.n)]
            for name, part in report.latency
        ],
        note=note + (f" {MARK} too few samples to be trusted." if few else ""),
    )


def _quantiles(part: LatencyPart) -> list[Cell]:
    cells = [seconds(part.mean)]
    for name in ("p50", "p90", "p99"):
        mark = MARK if part.n and name in part.few_samples else ""
        cells.append(seconds(getattr(part, name), mark))
    return cells


def stages(report: Report) -> PageTable:
    elapsed = report.elapsed_s

    def of_time(value: float) -> Cell:
        return share(value / elapsed if elapsed else None)

    rows = []
    for stage in report.stages:
        causes = {**stage.blocked_by.model_dump(), **stage.starved_by.model_dump()}
        why = ", ".join(
            f"{cause.replace('_', ' ')} {value / elapsed:.1%}"
            for cause, value in causes.items()
            if elapsed and value >= 0.0005 * elapsed
        )
        rows.append(
            [
                Cell(str(stage.index), stage.index),
                Cell(f"[{stage.layers[0]}, {stage.layers[1]})", stage.layers[0]),
                *map(of_time, (stage.held_s, stage.busy_s, stage.blocked_s, stage.starved_s)),
                count(stage.micro_batches),
                count(stage.rows),
                word(why or UNDEFINED),
            ]
        )
    return PageTable(
        heading="Stages",
        anchor="stages",
        columns=(
            "stage", "layers", "held", "busy", "blocked", "starved", "micro-batches", "rows",
            "blocked and starved by",
        ),
        rows=rows,
        note="Shares of the time; held is busy and blocked together.",
    )  # fmt: skip


def variants(runs: Runs) -> PageTable:
    base = runs[0][1].throughput.output_tokens_per_s
    rows = []
    for name, run in runs:
        tokens = run.throughput.output_tokens_per_s
        where = "" if run.verdict.stage is None else f" at stage {run.verdict.stage}"
        ratio = tokens / base if tokens is not None and base else None
        rows.append(
            [
                word(name if run.mode == runs[0][1].mode else f"{name} ({run.mode})"),
                word(run.verdict.kind.value.replace("_", " ") + where),
                count(tokens),
                Cell(UNDEFINED if ratio is None else f"{ratio:.2f} x", ratio),
                seconds(run.latency.ttft_s.p50),
                seconds(run.latency.ttft_s.p99),
                seconds(run.latency.tpot_s.p50),
                count(run.counts.finished),
                count(run.counts.offered),
            ]
        )
    return PageTable(
        heading="What if",
        anchor="what-if",
        columns=(
            "run", "verdict", "tokens/s", "of base", "TTFT p50", "TTFT p99", "TPOT p50", "finished",
            "offered",
        ),
        rows=rows,
    )  # fmt: skip


def swarm_variants(runs: Runs) -> PageTable:
    figures = columns(runs)
    return PageTable(
        heading="What if: the swarm",
        anchor="what-if-swarm",
        columns=("run", *(figure.heading for figure in figures)),
        rows=[
            [word(label), *(Cell(f.texts[index], f.values[index]) for f in figures)]
            for index, label in enumerate(labels(runs))
        ],
        note=what_pays(runs) or "",
    )


def slowest_requests(run_dir: Path) -> PageTable:
    """The requests that waited longest for their first token; those without one come first."""
    names = [
        "request_id", "arrival_s", "prompt_tokens", "output_tokens", "queue_s", "ttft_s", "tpot_s",
        "e2e_s", "preemptions", "finish_reason",
    ]  # fmt: skip
    table = read_table(run_dir, "requests", names)
    ttft = table["ttft_s"].to_numpy()
    order = np.argsort(-np.where(np.isfinite(ttft), ttft, np.inf), kind="stable")[:REQUESTS_MAX]
    rows = [
        [
            Cell(str(each["request_id"]), each["request_id"]),
            seconds(each["arrival_s"]),
            count(each["prompt_tokens"]),
            count(each["output_tokens"]),
            *(seconds(each[name]) for name in ("queue_s", "ttft_s", "tpot_s", "e2e_s")),
            count(each["preemptions"]),
            word(each["finish_reason"] or "unfinished"),
        ]
        for each in table.take(order).to_pylist()
    ]
    note = "Unfinished and refused requests without a first token come first."
    if table.num_rows > len(rows):
        note = (
            f"The {len(rows)} that waited longest of {table.num_rows:,}; requests.parquet holds "
            f"all. {note}"
        )
    return PageTable(
        heading="Slowest requests",
        anchor="requests",
        columns=(
            "request", "arrival", "prompt", "output", "queue", "TTFT", "TPOT", "end to end",
            "preemptions", "ended by",
        ),
        rows=rows,
        note=note,
    )  # fmt: skip
