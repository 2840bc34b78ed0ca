"""Predicted and measured, scenario by scenario: how far the simulator's word can be trusted.

    python benchmarks/fidelity/suite.py [--repeats 3] [--only NAME ...] [--out DIR] [--json]

Measures a profile of this machine first, then runs each scenario beside this file on real stage
processes, `--repeats` times, and simulates it once with that profile, scaled to the speed that the
machine had before, between and after those runs (`speed.py`: a short ring that is no scenario). A
row compares the simulated figure with the median of the real ones. What is allowed is the bar, or
twice the spread of the repeats where that is more: nobody can predict better than the machine
repeats itself. The table, the figures and a picture of every request go to `--out`; `--docs` writes
docs/fidelity.md as well.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.fidelity.runs import command, measure, predict  # noqa: E402 - After the path.
from benchmarks.fidelity.speed import Speed  # noqa: E402

MODEL = "smollm2-135m"
BARS = {"throughput": 0.05, "tpot_p50": 0.07, "ttft_p90": 0.15}
PROFILE_OPTIONS = (
    *("--dtype", "float32", "--neighbours", "1", "--repeats", "7"),
    *("--rows", "1,2,4,6,8,12,16,24,32,48,64,96,128", "--decodes", "1,2,4,6,8"),
    *("--contexts", "16,64,128,256,512", "--chunks", "1,8,16,32,48,64,96,128"),
    *("--behind", "0,64,128,256,384"),
)


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one scenario: what was foretold, what came, and what is allowed."""

    name: str
    predicted: float | None
    measured: tuple[float, ...]
    bar: float

    @property
    def middle(self) -> float:
        return median(self.measured)

    @property
    def error(self) -> float | None:
        """Relative; None where the figure is not defined."""
        if self.predicted is None or not self.middle:
            return None
        return (self.predicted - self.middle) / self.middle

    @property
    def spread(self) -> float:
        """Of the repeats: from least to most, relative to the median."""
        return (max(self.measured) - min(self.measured)) / self.middle if self.middle else 0.0

    @property
    def allowed(self) -> float:
        return max(self.bar, 2 * self.spread)

    @property
    def is_met(self) -> bool:
        return self.error is not None and abs(self.error) <= self.allowed


@dataclass(frozen=True, slots=True)
class Row:
    """One scenario."""

    name: str
    question: str
    figures: tuple[Figure, ...]
    verdicts: tuple[str, str]  # Predicted, measured.

    @property
    def is_met(self) -> bool:
        return all(figure.is_met for figure in self.figures)


def take_profile(out: Path, options: Sequence[str] = PROFILE_OPTIONS) -> Path:
    """Measure this machine."""
    path = out / "profile.json"
    command("kvasir-rt", "profile", MODEL, "--out", str(path), "--quiet", *options)
    return path


def figures_of(report: dict[str, Any]) -> dict[str, float | None]:
    """What is compared."""
    latency = report["latency"]
    return {
        "throughput": report["throughput"]["output_tokens_per_s"],
        "tpot_p50": latency["tpot_s"]["p50"],
        "ttft_p90": latency["ttft_s"]["p90"],
    }


def row_of(scenario: Path, simulated: dict[str, Any], real: Sequence[dict[str, Any]]) -> Row:
    """Put one scenario's figures together."""
    import yaml

    foretold, came = figures_of(simulated), [figures_of(report) for report in real]
    figures = tuple(
        Figure(name, foretold[name], tuple(value for one in came if (value := one[name])), bar)
        for name, bar in BARS.items()
    )
    verdicts = [
        f"{verdict['kind']}{'' if verdict['stage'] is None else ' @' + str(verdict['stage'])}"
        for verdict in (simulated["verdict"], real[-1]["verdict"])
    ]
    question = yaml.safe_load(scenario.read_text())["question"]
    return Row(scenario.stem, question, figures, (verdicts[0], verdicts[1]))


def run(scenario: Path, speed: Speed, out: Path, repeats: int) -> Row:
    """One scenario in both worlds; there was a look right before."""
    directory = out / scenario.stem
    directory.mkdir(parents=True, exist_ok=True)
    real = []
    for turn in range(repeats):
        real.append(measure(scenario, directory / f"real_{turn}"))
        speed.look()
    profile = speed.scaled_to(directory / "profile.json")
    row = row_of(scenario, predict(scenario, profile, directory / "simulated"), real)
    runs = [str(directory / name) for name in ("real_0", "simulated")]
    scatter = directory / "scatter.png"
    scatter.unlink(missing_ok=True)  # Earlier versions left no mark in it.
    command("kvasir-sim", "compare", *runs, "--plot", str(scatter), "--json")
    return row


def line_of(row: Row) -> str:
    """One row for the terminal."""
    cells = [f"{row.name:14}"]
    for figure in row.figures:
        error = "   n/a" if figure.error is None else f"{figure.error:+6.1%}"
        cells.append(f"{figure.name} {error} (of {figure.allowed:.0%})")
    return "  ".join([*cells, "met" if row.is_met else "MISSED"])


def document(rows: Sequence[Row], profile: Path) -> dict[str, Any]:
    """Everything, for machines."""
    measured = json.loads(profile.read_text())
    return {
        "machine": measured["machine"],
        "model": measured["model"],
        "dtype": measured["dtype"],
        "rows": [
            asdict(row)
            | {
                "is_met": row.is_met,
                "errors": {figure.name: figure.error for figure in row.figures},
                "spreads": {figure.name: figure.spread for figure in row.figures},
            }
            for row in rows
        ],
        "met": sum(row.is_met for row in rows),
    }


def main() -> int:
    """Run the suite; 1 if more than one scenario in eight misses its bars."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", nargs="*", help="names of scenarios")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "fidelity")
    parser.add_argument("--profile", type=Path, help="use this one instead of measuring")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--docs", action="store_true", help="write docs/fidelity.md")
    given = parser.parse_args()
    scenarios = sorted(HERE.glob("*.yaml"))
    unknown = set(given.only or ()) - {path.stem for path in scenarios}
    if unknown or given.repeats < 1:
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}" if unknown else "--repeats")
    given.out.mkdir(parents=True, exist_ok=True)
    profile = given.profile or take_profile(given.out)
    rows = []
    speed = Speed(profile, given.out)
    speed.look()
    for scenario in scenarios:
        if given.only and scenario.stem not in given.only:
            continue
        rows.append(run(scenario, speed, given.out, given.repeats))
        print(line_of(rows[-1]), file=sys.stderr, flush=True)
    whole = document(rows, profile)
    (given.out / "fidelity.json").write_text(json.dumps(whole, indent=1) + "\n")
    if given.docs:
        from benchmarks.fidelity.pages import write_pages

        write_pages(rows, whole, given.out, ROOT / "docs")
    print(json.dumps(whole) if given.json else f"{whole['met']} of {len(rows)} met their bars")
    return 0 if whole["met"] >= len(rows) - len(rows) // 8 else 1


if __name__ == "__main__":
    sys.exit(main())
