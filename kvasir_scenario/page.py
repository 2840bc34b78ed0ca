"""`report.html`: one run as one file that needs no network, from its report and its tables.

Words and tables are HTML already when the file is opened; a script adds sorting and the plots. The
plotting library is embedded. A policy in the page lets no other script run and nothing be fetched.
The same run gives the same bytes.
"""

import base64
import hashlib
import json
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from kvasir_core.errors import ScenarioError
from kvasir_core.verdict import VerdictKind
from kvasir_scenario import page_figures as figures
from kvasir_scenario import page_tables as tables
from kvasir_scenario.page_part import Drawing, PageTable
from kvasir_scenario.page_ring import timeline
from kvasir_scenario.page_swarm import elastic_curve
from kvasir_scenario.plots import BLUE, GREEN, GREY, ORANGE, RED
from kvasir_scenario.report_schema import Report
from kvasir_scenario.run_dir import PAGE, write_whole
from kvasir_scenario.terminal_swarm import swarm_lines
from kvasir_scenario.wording import duration, rate

BASELINE = "baseline"
VERDICT_COLOURS = {
    VerdictKind.IDLE: GREY,
    VerdictKind.STARVED: BLUE,
    VerdictKind.BALANCED: GREEN,
    VerdictKind.BOTTLENECKED: ORANGE,
    VerdictKind.KV_BOUND: ORANGE,
    VerdictKind.LINK_BOUND: ORANGE,
    VerdictKind.SATURATED: GREEN,
    VerdictKind.OVERLOADED: RED,
}


def write_page(run_dir: Path, report: Report) -> Path:
    """Write `report.html` from a run's report and tables.

    Raises:
        ScenarioError: A table is missing, or the plotting library is.
    """
    variants = [(each.name, each.report) for each in report.variants]
    is_taken = BASELINE in dict(variants)  # Two bars of one name would lie over each other.
    runs = [(f"({BASELINE})" if is_taken else BASELINE, report), *variants]
    parts: list[Drawing | PageTable | None] = [
        tables.variants(runs) if len(runs) > 1 else None,
        figures.variants(runs) if len(runs) > 1 else None,
        tables.latencies(report),
        figures.latency(run_dir, report),
        tables.stages(report),
        figures.time_split(report),
        figures.limits(runs),
        timeline(run_dir, report),
        figures.load_over_time(run_dir, report),
        figures.queue_and_kv(run_dir, report),
    ]
    if any(run.swarm is not None for _, run in runs):
        parts.append(elastic_curve(run_dir, report) if report.swarm is not None else None)
        parts.append(tables.swarm_variants(runs) if len(runs) > 1 else None)
    parts.append(tables.slowest_requests(run_dir))
    path = run_dir / PAGE
    write_whole(path, _html(report, [part for part in parts if part is not None]).encode())
    return path


def _html(report: Report, parts: list[Drawing | PageTable]) -> str:
    library, ours = _library(), _own("page.js")
    drawings = {
        part.anchor: {"data": part.traces, "layout": part.layout}
        for part in parts
        if isinstance(part, Drawing)
    }
    policy = (
        f"default-src 'none'; script-src {_hash(library)} {_hash(ours)}; "
        "style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    links = "".join(f"<a href=#{part.anchor}>{escape(part.heading)}</a>" for part in parts)
    return (
        '<!doctype html>\n<html lang=en><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(report.name)} ({report.mode})</title>"
        f"<style>{_own('page.css')}</style></head><body>\n"
        f"{_head(report)}<nav aria-label=Sections>{links}</nav>\n<main>"
        + "\n".join(part.html() for part in parts)
        + f"</main>\n{_foot(report)}"
        f"<script type=application/json id=drawings>{_json(drawings)}</script>\n"
        f"<script>{library}</script>\n<script>{ours}</script>\n</body></html>\n"
    )


def _head(report: Report) -> str:
    """The verdict and its evidence first, then the notes, then the figures most asked for."""
    verdict, counts, throughput = report.verdict, report.counts, report.throughput
    kind = verdict.kind.value.replace("_", " ")
    where = "" if verdict.stage is None else f" at stage {verdict.stage}"
    clock = "virtual" if report.mode == "simulated" else "real"
    evidence = "".join(f"<li>{escape(each)}</li>" for each in verdict.evidence)
    notes = "".join(
        f"<li>{escape(each)}</li>" for each in report.notes if each not in verdict.evidence
    )
    good = throughput.goodput_requests_per_s
    tiles = [
        ("output tokens/s", rate(throughput.output_tokens_per_s, "")),
        ("requests/s", rate(throughput.requests_per_s, "")),
        *([("within the SLO", rate(good, "requests/s"))] if good is not None else []),
        ("TTFT p50", duration(report.latency.ttft_s.p50)),
        ("TTFT p99", duration(report.latency.ttft_s.p99)),
        ("TPOT p50", duration(report.latency.tpot_s.p50)),
        ("finished", f"{counts.finished:,} of {counts.offered:,}"),
    ]
    shown = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value.strip())}</dd></div>"
        for name, value in tiles
    )
    return (
        f"<header><p class=mode>{escape(report.name)} &middot; {report.mode} (stage times "
        f"{report.costs.provenance}) &middot; {duration(report.elapsed_s)} of {clock} time</p>"
        f'<h1 style="border-color:{VERDICT_COLOURS[verdict.kind]}">{escape(kind + where)}</h1>'
        f"<ul>{evidence}</ul>"
        + (f"<ul class=notes aria-label=Notes>{notes}</ul>" if notes else "")
        + f"<dl class=tiles>{shown}</dl></header>\n"
    )


def _foot(report: Report) -> str:
    """What the plan was, where the times come from, and the swarm in sentences."""
    plan, kv, counts = report.plan, report.kv, report.counts.model_dump()
    offered = counts.pop("offered")
    widths = f"{plan.micro_batch_width:,} spans and {plan.row_width:,} rows"
    recomputed = f"{kv.preemptions:,} preemptions, {kv.recomputed_tokens:,} tokens recomputed"
    lines = [
        (
            "Requests",
            f"{offered:,} offered = "
            + " + ".join(f"{value:,} {name}" for name, value in counts.items() if value),
        ),
        (
            "Micro-batches",
            f"{report.micro_batches:,}, of {widths} at most; window {plan.window}",
        ),
        (
            "KV",
            f"peak {kv.blocks_peak:,} of {kv.blocks_total:,} blocks; {recomputed}",
        ),
        *(swarm_lines(report.swarm) if report.swarm is not None else []),
        *(("Stage times", note) for note in report.costs.notes),
        ("Seed", str(report.seed)),
        ("Plan", plan.digest),
    ]
    shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in lines)
    return f"<footer><h2>The run</h2><dl>{shown}</dl></footer>\n"


def _json(value: object) -> str:
    """JSON that cannot end the element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c")


def _own(name: str) -> str:
    return files("kvasir_scenario").joinpath(name).read_text(encoding="utf-8").strip()


def _library() -> str:
    """The plotting library's script; finding it imports nothing.

    Raises:
        ScenarioError: It is not installed, or could not stand in a page.
    """
    found = find_spec("plotly")
    if found is None or found.origin is None:
        raise ScenarioError("report.html needs the package plotly; install it with pip")
    path = Path(found.origin).parent / "package_data" / "plotly.min.js"
    try:
        text = path.read_text(encoding="utf-8").replace("\r\n", "\n").strip()
    except OSError as error:
        raise ScenarioError(f"{path}: plotly's script cannot be read: {error.strerror}") from error
    if "</script" in text.lower() or "<!--" in text:
        raise ScenarioError(f"{path}: would end the element it is put in; use another version")
    return text


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
