"""Two or more runs side by side: predicted and measured, two predictions, or two real runs.

The reference is the first measured run, or the first run if none was measured. A relative error is
`(value - reference) / reference`; it is undefined where either is, or where the reference is 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING

from pydantic import ValidationError

from kvasir_core.errors import ScenarioError
from kvasir_scenario.complaints import first_complaint
from kvasir_scenario.report_schema import Report, parse_report
from kvasir_scenario.run_dir import write_whole

if TYPE_CHECKING:
    import pandas as pd

REPORT_BYTES_MAX = 64 << 20
LATENCIES = ("ttft_s", "tpot_s", "e2e_s")
STATISTICS = ("p50", "p90", "p99")
TIMES = ("busy_s", "blocked_s", "starved_s")
OF_PLAN = ("row_width", "micro_batch_width", "boundary_bytes_max")
JUDGED = ("output_tokens_per_s", "requests_per_s", *(f"{name}.p50" for name in LATENCIES))
"""What `--max-error` looks at: rates and medians; tails on few requests are luck."""


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run directory and its report."""

    directory: Path
    report: Report

    @property
    def label(self) -> str:
        """Says where the numbers come from, so that no column mixes the two."""
        return f"{self.directory.name} ({self.report.mode})"

    def requests(self) -> "pd.DataFrame":
        """The run's requests by id.

        Raises:
            ScenarioError: The table is missing or damaged.
        """
        import pandas as pd

        path = self.directory / "requests.parquet"
        try:
            table = pd.read_parquet(path, columns=["request_id", *LATENCIES])
        except FileNotFoundError:
            raise ScenarioError(f"{path}: is missing; run the scenario again") from None
        except (OSError, ValueError) as error:  # Arrow's own are among them.
            reason = str(error).splitlines()[0][:200]
            raise ScenarioError(f"{path}: is no table of a run: {reason}; run again") from None
        return table.set_index("request_id")


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of every run; `errors` are relative to the reference, None where undefined."""

    name: str
    unit: str
    values: tuple[float | None, ...]
    errors: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, and which run they are relative to."""

    runs: tuple[ComparedRun, ...]
    reference: int
    rows: tuple[Row, ...]

    @property
    def worst(self) -> tuple[str, float] | None:
        """The judged figure with the largest absolute error, and that error."""
        errors = [
            (row.name, abs(error))
            for row in self.rows
            if row.name in JUDGED
            for error in row.errors
            if error is not None
        ]
        return max(errors, key=lambda pair: pair[1], default=None)

    @property
    def notes(self) -> list[str]:
        """What makes runs hard to compare: another plan, other layers, another load."""
        base = self.runs[self.reference]
        notes = []
        for run in self.runs:
            different = [
                f"{name} {value}, not {other}"
                for (name, value), (_, other) in zip(_terms(run), _terms(base), strict=True)
                if value != other
            ]
            if different:
                notes.append(f"{run.label} differs from {base.label}: {'; '.join(different)}")
        return notes


def read_run(directory: Path) -> ComparedRun:
    """A finished run.

    Raises:
        ScenarioError: The directory holds no readable report.
    """
    path = directory / "report.json"
    try:
        if not S_ISREG(path.stat().st_mode):
            raise ScenarioError(f"{path}: is no file; name the directory of a finished run")
        with path.open("rb") as file:
            text = file.read(REPORT_BYTES_MAX + 1)
    except OSError as error:
        raise ScenarioError(
            f"{directory}: no report.json to read ({error.strerror}); name the directory of a "
            "finished run"
        ) from None
    if len(text) > REPORT_BYTES_MAX:
        raise ScenarioError(f"{path}: more than {REPORT_BYTES_MAX:,} bytes; it is no report")
    if not text.strip():
        raise ScenarioError(f"{path}: is empty; run the scenario again")
    try:
        return ComparedRun(directory, parse_report(text.decode()))
    except UnicodeDecodeError as error:
        raise ScenarioError(
            f"{path}: is no report: byte {error.start} is no UTF-8 text; run the scenario again"
        ) from None
    except ValidationError as error:
        raise ScenarioError(
            f"{path}: is no report of this version: {first_complaint(error)}; run the scenario "
            "again to have it anew"
        ) from None


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    """Put the runs' figures beside each other."""
    measured = [index for index, run in enumerate(runs) if run.report.mode == "measured"]
    reference = measured[0] if measured else 0
    figures = [_figures(run.report) for run in runs]
    names = list(dict.fromkeys(name for figure in figures for name in figure))
    rows = []
    for name in names:
        values = tuple(figure.get(name, (None, ""))[0] for figure in figures)
        unit = next(figure[name][1] for figure in figures if name in figure)
        base = values[reference]
        errors = tuple(
            None if index == reference else relative(value, base)
            for index, value in enumerate(values)
        )
        rows.append(Row(name, unit, values, errors))
    return Comparison(tuple(runs), reference, tuple(rows))


def relative(value: float | None, base: float | None) -> float | None:
    """Relative error, None where it is undefined."""
    if value is None or base is None:
        return None
    if value == base:
        return 0.0
    return (value - base) / base if base else None


def _terms(run: ComparedRun) -> list[tuple[str, object]]:
    """What two runs should have in common; bytes of a boundary tell the type of numbers."""
    report = run.report
    terms: list[tuple[str, object]] = [(name, getattr(report.plan, name)) for name in OF_PLAN]
    terms.append(("layers", [list(stage.layers) for stage in report.stages]))
    terms.append(("requests offered", report.counts.offered))
    return terms


def _figures(report: Report) -> dict[str, tuple[float | None, str]]:
    """Every compared figure with its unit, in the report's order."""
    throughput = report.throughput
    figures: dict[str, tuple[float | None, str]] = {
        "output_tokens_per_s": (throughput.output_tokens_per_s, "tokens/s"),
        "requests_per_s": (throughput.requests_per_s, "requests/s"),
        "finished": (float(report.counts.finished), "requests"),
        "elapsed_s": (report.elapsed_s, "s"),
    }
    for latency in LATENCIES:
        for statistic in STATISTICS:
            value = getattr(getattr(report.latency, latency), statistic)
            figures[f"{latency}.{statistic}"] = (value, "s")
    for stage in report.stages:
        for time in TIMES:
            share = getattr(stage, time) / report.elapsed_s if report.elapsed_s else None
            figures[f"stage {stage.index} {time[:-2]}"] = (share, "of the time")
    for limit, count in report.binding_limits.model_dump().items():
        share = count / report.micro_batches if report.micro_batches else None
        figures[f"stopped by {limit}"] = (share, "per micro-batch")
    return figures


def comparison_document(comparison: Comparison) -> dict[str, object]:
    """For machines: JSON-able, no NaN."""
    worst = comparison.worst
    return {
        "runs": [
            {
                "directory": run.directory.name,
                "mode": run.report.mode,
                "verdict": run.report.verdict.kind,
                "stage": run.report.verdict.stage,
            }
            for run in comparison.runs
        ],
        "reference": comparison.reference,
        "notes": comparison.notes,
        "figures": {
            row.name: {"unit": row.unit, "values": row.values, "errors": row.errors}
            for row in comparison.rows
        },
        "worst": None if worst is None else {"figure": worst[0], "error": worst[1]},
    }


def draw_scatter(comparison: Comparison, path: Path) -> None:
    """Each request's TTFT, TPOT and end-to-end time in every run against the reference (PNG)."""
    from kvasir_scenario.plots import DPI, new_figure

    runs, reference = comparison.runs, comparison.runs[comparison.reference]
    base = reference.requests()
    figure = new_figure(11, 4)
    axes = [figure.add_subplot(1, len(LATENCIES), place + 1) for place in range(len(LATENCIES))]
    for place, latency in zip(axes, LATENCIES, strict=True):
        largest = 0.0
        for index, run in enumerate(runs):
            if index == comparison.reference:
                continue
            other = run.requests()[latency].rename("other")
            pairs = base[[latency]].join(other).dropna()
            x, y = pairs[latency], pairs["other"]
            place.plot(x, y, ".", markersize=4, alpha=0.6, label=run.label)
            largest = max([largest, *x, *y])
        place.plot([0, largest], [0, largest], color="black", linewidth=0.8, zorder=0)
        place.set_title(f"{latency[:-2].upper()}, s")
        place.set_xlabel(reference.label)
    axes[0].set_ylabel("the other runs")
    axes[0].legend(frameon=False, fontsize=8)
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=DPI, metadata={"Software": "Kvasir"})
    write_whole(path, picture.getvalue())
