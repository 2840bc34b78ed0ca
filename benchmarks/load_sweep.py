"""Busy share cannot tell a starved ring from a saturated one; binding limits can.

    python benchmarks/load_sweep.py [PNG]

Runs the golden input from 20 % to 230 % of capacity and draws verdict, busy share and limits
side by side. Capacity is what the ring delivers of this input when all of it is there at once.
"""

import argparse
from pathlib import Path

from kvasir_scenario.report_schema import Report
from kvasir_sim.run import run

ROOT = Path(__file__).parent.parent
LOADS = (0.2, 0.35, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 1.9, 2.3)
SPAN_S = 635.0  # Arrivals of the input at scale 1.
LIMITS = {
    "nothing_waiting": "#0072B2",
    "row_width": "#E69F00",
    "micro_batch_width": "#D55E00",
    "running_cap": "#CC79A7",
}


def report_at(scale: float) -> Report:
    path = ROOT / "scenarios" / "golden_pipeline.yaml"
    return run(path, overrides=[f"workload.time_scale={scale:.6g}"]).report


def draw(loads: list[float], reports: list[Report], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 4.6), layout="constrained")
    x = range(len(loads))
    bottom = [0.0] * len(loads)
    for limit, colour in LIMITS.items():
        shares = [
            100 * getattr(report.binding_limits, limit) / report.micro_batches for report in reports
        ]
        axes.bar(x, shares, bottom=bottom, color=colour, width=0.72, label=limit.replace("_", " "))
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    busy = [
        100 * sum(stage.busy_s for stage in report.stages) / len(report.stages) / report.elapsed_s
        for report in reports
    ]
    axes.plot(x, busy, "o-", color="black", label="busy share of the stages")
    for place, (share, report) in enumerate(zip(busy, reports, strict=True)):
        axes.annotate(f"{share:.0f}", (place, share), (0, 7), textcoords="offset points",
                      ha="center", fontsize=9, backgroundcolor="#ffffffb0")  # fmt: skip
        axes.annotate(report.verdict.kind, (place, 104), ha="center", fontsize=9, rotation=20)
    axes.set_xticks(list(x), [f"{load:.0%}" for load in loads])
    axes.set_xlabel("load, share of capacity")
    axes.set_ylabel("share of micro-batches, and of time (%)")
    axes.set_ylim(0, 122)
    axes.set_yticks(range(0, 101, 20))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    default = ROOT / "docs" / "img" / "load_sweep.png"
    parser.add_argument("png", type=Path, nargs="?", default=default, help="what to write")
    path = parser.parse_args().png
    flood = report_at(0.001)
    capacity = flood.counts.finished / flood.elapsed_s
    requests = flood.counts.finished
    loads, reports = list(LOADS), []
    print(f"capacity {capacity:.2f} requests/s")
    for load in loads:
        report = report_at(requests / SPAN_S / (load * capacity))
        reports.append(report)
        busy = sum(stage.busy_s for stage in report.stages) / len(report.stages) / report.elapsed_s
        free = report.binding_limits.nothing_waiting / report.micro_batches
        print(f"{load:5.0%}  {report.verdict.kind:12}  busy {busy:.1%}  nothing waiting {free:.1%}")
    draw(loads, reports, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
