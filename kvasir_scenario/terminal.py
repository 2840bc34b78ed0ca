"""The report on the screen: the verdict first, then the figures, every one with its unit."""

import os

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvasir_core.verdict import SHOWN_SHARE, VerdictKind
from kvasir_scenario.report_schema import LatencyPart, Report
from kvasir_scenario.terminal_swarm import swarm_lines, swarm_variant_table
from kvasir_scenario.wording import UNDEFINED, duration, rate

COLOURS = {
    VerdictKind.IDLE: "bright_black",
    VerdictKind.STARVED: "blue",
    VerdictKind.BALANCED: "green",
    VerdictKind.BOTTLENECKED: "yellow",
    VerdictKind.KV_BOUND: "yellow",
    VerdictKind.LINK_BOUND: "yellow",
    VerdictKind.SATURATED: "green",
    VerdictKind.OVERLOADED: "red",
}
FILE_WIDTH = 1000  # Characters: wider than any table of ours.
MARK = "*"  # Behind a percentile on too few samples.


def output_console() -> Console:
    """Standard output. A file or a pipe has no edge to wrap at, unless COLUMNS gives one."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


def print_report(report: Report, console: Console | None = None) -> None:
    """Print a report to `console` (default: standard output)."""
    console = console or output_console()
    _print_verdict(report, console)
    _print_requests(report, console)
    console.print(_latency_table(report))
    console.print(_stage_table(report))
    _print_limits(report, console)
    if report.swarm is not None:
        lines = _lines()
        for heading, sentence in swarm_lines(report.swarm):
            lines.add_row(heading, sentence)
        console.print("\n[italic]Swarm[/]")
        console.print(lines)
    if report.variants:
        console.print(_variant_table(report))
    runs = [("baseline", report), *((variant.name, variant.report) for variant in report.variants)]
    if len(runs) > 1 and any(run.swarm is not None for _, run in runs):
        console.print(swarm_variant_table(runs))


def _print_verdict(report: Report, console: Console) -> None:
    verdict = report.verdict
    kind = verdict.kind.value.replace("_", " ")
    where = "" if verdict.stage is None else f" at stage {verdict.stage}"
    clock = "virtual" if report.mode == "simulated" else "real"
    console.print(
        f"[bold]{escape(report.name)}[/]  {report.mode} (stage times {report.costs.provenance}), "
        f"{duration(report.elapsed_s)} of {clock} time"
    )
    console.print(f"Verdict: [bold {COLOURS[verdict.kind]}]{kind}{where}[/]")
    lines = Table.grid(padding=(0, 1), pad_edge=True)
    for sentence in verdict.evidence:
        lines.add_row("-", escape(sentence))
    for note in report.notes:
        if note not in verdict.evidence:
            lines.add_row("[yellow]![/]", escape(note))
    console.print(lines)
    console.print()


def _print_requests(report: Report, console: Console) -> None:
    counts, throughput = report.counts, report.throughput
    parts = [
        f"{getattr(counts, name):,} {name}"
        for name in ("finished", "running", "waiting", "refused", "cancelled", "failed")
        if getattr(counts, name) or name == "finished"
    ]
    start, stop = report.measured_window_s
    lines = _lines()
    lines.add_row("Requests", f"{counts.offered:,} offered = {' + '.join(parts)}")
    lines.add_row(
        "Throughput",
        f"{rate(throughput.requests_per_s, 'requests/s')}, "
        f"{rate(throughput.output_tokens_per_s, 'output tokens/s')}{_goodput(report)}, "
        f"measured from {duration(start)} to {duration(stop)}",
    )
    console.print(lines)


def _lines() -> Table:
    """A heading and its sentence per line; long sentences wrap beside the heading."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    return table


def _goodput(report: Report) -> str:
    good = report.throughput.goodput_requests_per_s
    if good is None:
        return ""
    limits = [
        f"{name} <= {duration(limit)}"
        for name, limit in (("TTFT", report.slo.ttft_s), ("TPOT", report.slo.tpot_s))
        if limit is not None
    ]
    return f", goodput {rate(good, 'requests/s')} ({', '.join(limits)})"


def _latency_table(report: Report) -> Table:
    few = any(part.n and part.few_samples for _, part in report.latency)
    table = Table(
        title="Latency",
        box=SIMPLE_HEAD,
        title_justify="left",
        caption=f"{MARK} too few samples to be trusted" if few else None,
        caption_justify="left",
    )
    table.add_column("")
    for heading in ("mean", "p50", "p90", "p99", "samples"):
        table.add_column(heading, justify="right")
    labels = {
        "ttft_s": "TTFT",
        "tpot_s": "TPOT",
        "itl_s": "between tokens",
        "e2e_s": "end to end",
    }
    for name, part in report.latency:
        table.add_row(labels[name], *_latency_cells(part), f"{part.n:,}")
    return table


def _latency_cells(part: LatencyPart) -> list[str]:
    cells = [duration(part.mean)]
    for name in ("p50", "p90", "p99"):
        mark = MARK if part.n and name in part.few_samples else ""
        cells.append(duration(getattr(part, name)) + mark)
    return cells


def _stage_table(report: Report) -> Table:
    table = Table(title="Stages, share of the time", box=SIMPLE_HEAD, title_justify="left")
    for heading in ("stage", "layers", "held", "busy", "blocked", "starved"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("blocked and starved by")
    elapsed = report.elapsed_s

    def share(seconds: float) -> str:
        return f"{seconds / elapsed:.1%}" if elapsed else UNDEFINED

    for stage in report.stages:
        causes = {**stage.blocked_by.model_dump(), **stage.starved_by.model_dump()}
        table.add_row(
            str(stage.index),
            f"[{stage.layers[0]}, {stage.layers[1]})",
            *map(share, (stage.held_s, stage.busy_s, stage.blocked_s, stage.starved_s)),
            ", ".join(
                f"{cause.replace('_', ' ')} {share(seconds)}"
                for cause, seconds in causes.items()
                if seconds and seconds >= SHOWN_SHARE * elapsed
            ),
        )
    return table


def _print_limits(report: Report, console: Console) -> None:
    limits = report.binding_limits.model_dump()
    window, dependency = limits.pop("window"), limits.pop("dependency")
    total = max(1, report.micro_batches)
    shares = ", ".join(
        f"{name.replace('_', ' ')} {count / total:.1%}"
        for name, count in limits.items()
        if count >= SHOWN_SHARE * total
    )
    kv = report.kv
    lines = _lines()
    lines.add_row(
        "Micro-batches",
        f"{report.micro_batches:,} with {report.stages[0].rows:,} rows, at most "
        f"{report.plan.micro_batch_width:,} spans and {report.plan.row_width:,} rows each",
    )
    lines.add_row("  stopped by", shares or UNDEFINED)
    lines.add_row(
        "  forbidden",
        f"{window:,} times by the window ({report.plan.window}), {dependency:,} times because "
        "every live request was in flight",
    )
    lines.add_row(
        "KV",
        f"peak {kv.blocks_peak:,} of {kv.blocks_total:,} blocks, {kv.preemptions:,} preemptions, "
        f"{kv.recomputed_tokens:,} tokens recomputed",
    )
    console.print(lines)


def _finished_share(run: Report) -> str:
    counts = run.counts
    return f"{counts.finished / counts.offered:.1%}" if counts.offered else UNDEFINED


def _variant_table(report: Report) -> Table:
    """One row per run, so that many variants stay readable on a narrow screen."""
    runs = [("baseline", report), *((variant.name, variant.report) for variant in report.variants)]
    table = Table(
        title="What if", box=SIMPLE_HEAD, title_justify="left", pad_edge=False,
        collapse_padding=True,
    )  # fmt: skip
    table.add_column("", overflow="fold", min_width=8)
    for heading in ("verdict", "tokens/s", "of base", "TTFT p50", "TTFT p99", "TPOT p50"):
        table.add_column(heading, justify="left" if heading == "verdict" else "right", no_wrap=True)
    has_unfinished = any(run.counts.finished < run.counts.offered for _, run in runs)
    if has_unfinished:
        table.add_column("ended", justify="right", no_wrap=True)
    base = report.throughput.output_tokens_per_s
    for name, run in runs:
        tokens = run.throughput.output_tokens_per_s
        where = "" if run.verdict.stage is None else f" @{run.verdict.stage}"
        table.add_row(
            escape(name if run.mode == report.mode else f"{name} ({run.mode})"),
            f"[{COLOURS[run.verdict.kind]}]{run.verdict.kind.value.replace('_', ' ')}{where}[/]",
            UNDEFINED if tokens is None else f"{tokens:,.4g}",
            f"{tokens / base:.2f} x" if tokens and base else UNDEFINED,
            _latency_cells(run.latency.ttft_s)[1],
            _latency_cells(run.latency.ttft_s)[3],
            _latency_cells(run.latency.tpot_s)[1],
            *([_finished_share(run)] if has_unfinished else []),
        )
    return table
