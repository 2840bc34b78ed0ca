"""The swarm's section of the report on the screen."""

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from kvasir_scenario.report_schema import Report
from kvasir_scenario.swarm_report import SpanPart, SwarmPart, TripsPart
from kvasir_scenario.swarm_variants import columns, labels, what_pays
from kvasir_scenario.wording import UNDEFINED, duration, rate


def swarm_lines(swarm: SwarmPart) -> list[tuple[str, str]]:
    """What came, what it gave, what it cost: headings and their sentences."""
    lines: list[tuple[str, str]] = []

    def add(heading: str, sentence: str) -> None:
        lines.append((heading, sentence))

    bound = swarm.bound
    if bound is not None:
        terms = ", ".join(f"{name} {value:,.4g}" for name, value in bound.terms.items())
        add(
            "Bound",
            f"{bound.output_tokens_per_s:,.4g} output tokens/s, limited by {bound.limited_by} "
            f"({terms}); without workers {bound.alone_output_tokens_per_s:,.4g}",
        )
    reached = swarm.peak.output_tokens_per_s
    of_bound = ""
    if bound is not None and reached is not None and bound.output_tokens_per_s:
        of_bound = f", {reached / bound.output_tokens_per_s:.0%} of the bound"
    add("Peak" if swarm.rest else "Measured", _span(swarm.peak) + of_bound)
    if swarm.rest is not None:
        add("Before it", _span(swarm.rest))
    share = swarm.share_remote_pairs
    add(
        "Workers",
        f"{swarm.workers_covering_max} of {swarm.workers} covered experts at once; "
        f"{UNDEFINED if share is None else f'{share:.1%}'} of all pairs came from workers, "
        f"{swarm.hedges:,} hedges, {swarm.local_fallbacks:,} pairs fell back",
    )
    if swarm.trips is not None:
        add("Distance", _trips(swarm.trips, swarm.blocked_by_experts_share))
    add(
        "Elasticity",
        f"from the knee to first relief {duration(swarm.time_to_first_relief_s)}, to full "
        f"coverage {duration(swarm.time_to_full_coverage_s)}; from the last high load to "
        f"contraction {duration(swarm.time_to_contraction_s)}",
    )
    if swarm.target_base is not None:
        add(
            "Market",
            f"{swarm.target_changes} target changes ({rate(swarm.target_changes_per_hour, '/h')}), "
            f"{swarm.downloads} downloads, {swarm.wasted_downloads} wasted "
            f"({rate(swarm.wasted_downloads_per_hour, '/h')}), {swarm.warm_loads} from disk, "
            f"{swarm.recruits_above_target} recruits above the target",
        )
    liars = [
        f"{part.quarantined} of {part.workers} {honesty.replace('_', ' ')}"
        for honesty, part in swarm.quarantined.items()
        if honesty not in ("honest", "real") or part.quarantined
    ]
    if liars:
        error, wrong = swarm.output_error_mean, swarm.wrong_answers_accepted
        accepted = UNDEFINED if wrong is None else f"{wrong:,}"
        add(
            "Quarantined",
            f"{', '.join(liars)}; {accepted} wrong answers were accepted, "
            f"mean relative error of all results {UNDEFINED if error is None else f'{error:.2g}'}",
        )
    return lines


def _span(span: SpanPart) -> str:
    return (
        f"{rate(span.output_tokens_per_s, 'output tokens/s')}, "
        f"{duration(span.tpot_s)} a token ({duration(span.start_s)} to {duration(span.stop_s)})"
    )


def _trips(trips: TripsPart, blocked_share: float | None) -> str:
    """What the round trips cost, and whether the overlap hides them."""
    hidden = "which hides it" if trips.overlap >= trips.overlap_needed else "too few to hide it"
    blocked = "" if blocked_share is None else f"; stages waited {blocked_share:.1%} of the time"
    return (
        f"{duration(trips.layer_s)} there and back a layer keep a micro-batch waiting "
        f"{duration(trips.micro_batch_s)} a stage, which computes it for "
        f"{duration(trips.computing_s)}; {trips.overlap_needed:,} at once hide the wait, a stage "
        f"holds {trips.overlap:,} (experts.overlap), {hidden}{blocked}"
    )


def swarm_variant_table(runs: list[tuple[str, Report]]) -> Table:
    """Policies and pools side by side: what each gives and costs."""
    table = Table(
        title="What if: the swarm", box=SIMPLE_HEAD, title_justify="left", pad_edge=False,
        padding=0, caption_justify="left",
        caption=escape(what_pays(runs) or "") or None,
    )  # fmt: skip
    figures = columns(runs)
    table.add_column("", overflow="fold", min_width=12)
    for figure in figures:
        table.add_column(figure.short, justify="right", no_wrap=True)
    for index, label in enumerate(labels(runs)):
        table.add_row(escape(label), *(figure.texts[index] for figure in figures))
    return table
