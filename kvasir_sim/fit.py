"""Fits a cost model's constants by least squares of the relative error.

The models are maxima of linear bounds, so they are linear in their constants once it is known
which bound rules at each point. The fit alternates: sort the points by ruling bound with the
constants at hand, solve the linear least-squares problem, and repeat until no point changes
sides. Each table is fitted on its smallest three quarters and judged on the largest quarter,
which the fit does not see; "largest" is by the work a point asks for, never by its measured time.

`python -m kvasir_sim.fit` prints the table of residuals; `kvasir_sim.fit_tables` has the models.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvasir_core.errors import ScenarioError

Column = npt.NDArray[np.float64]
Term = tuple[int, Column]
"""Index of a constant, and the seconds that one of it adds at each point."""

ROUNDS_MAX = 100  # The regimes settle in about ten.
SEEN_SHARE = 0.75


@dataclass(frozen=True, slots=True)
class Model:
    """What is always added, plus the largest of several bounds; each is a sum of terms."""

    always: tuple[Term, ...]
    bounds: tuple[tuple[str, tuple[Term, ...]], ...]

    def ruling(self, constants: Column) -> npt.NDArray[np.int64]:
        """Per point, the index of the largest bound."""
        found: npt.NDArray[np.int64] = np.argmax(self._sums(constants), axis=0)
        return found

    def seconds(self, constants: Column) -> Column:
        largest: Column = np.max(self._sums(constants), axis=0)
        return largest + _sum(self.always, constants)

    def _sums(self, constants: Column) -> Column:
        return np.stack([_sum(terms, constants) for _, terms in self.bounds])

    def design(self, ruling: npt.NDArray[np.int64], constants: int) -> Column:
        """The linear problem's matrix when each point obeys its ruling bound."""
        matrix = np.zeros((len(ruling), constants))
        for k, column in self.always:
            matrix[:, k] += column
        for bound, (_, terms) in enumerate(self.bounds):
            for k, column in terms:
                matrix[:, k] += np.where(ruling == bound, column, 0.0)
        return matrix

    def at(self, points: npt.NDArray[np.int64]) -> "Model":
        """The same model on some of the points."""
        return Model(
            tuple((k, column[points]) for k, column in self.always),
            tuple(
                (name, tuple((k, column[points]) for k, column in terms))
                for name, terms in self.bounds
            ),
        )


def _sum(terms: tuple[Term, ...], constants: Column) -> Column:
    total: Column = np.zeros(1)
    for k, column in terms:
        total = total + constants[k] * column
    return total


@dataclass(frozen=True, slots=True)
class Table:
    """One measured table and the model that is to explain it.

    Attributes:
        group: matrix, experts, attention, other or link; decides which error is acceptable.
        constants: Names; the first guess of each is `start`.
        size: By which the largest quarter is chosen.
    """

    name: str
    group: str
    model: Model
    measured_s: Column
    size: Column
    constants: tuple[str, ...]
    start: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Residual:
    """How a fitted model does on its table.

    Attributes:
        constants: Name and fitted value.
        seen, unseen: Median absolute relative error on the fitted part and on the largest quarter.
        unseen_p90: The 90th percentile there.
        bias: Median signed relative error there.
        bounds: Which bound rules what share of the points.
    """

    table: str
    group: str
    points: int
    constants: tuple[tuple[str, float], ...]
    seen: float
    unseen: float
    unseen_p90: float
    bias: float
    bounds: tuple[tuple[str, float], ...]

    def value(self, name: str) -> float:
        return dict(self.constants)[name]


def solve(model: Model, measured_s: Column, start: Sequence[float]) -> Column:
    """Constants of least relative error, from a first guess; none becomes negative."""
    constants = np.asarray(start, dtype=np.float64)
    ruling = model.ruling(constants)
    for _ in range(ROUNDS_MAX):
        constants = least_squares(
            model.design(ruling, len(constants)) / measured_s[:, None], constants
        )
        again = model.ruling(constants)
        if np.array_equal(again, ruling):
            break
        ruling = again
    return constants


def least_squares(design: Column, constants: Column) -> Column:
    """Solves design @ x = 1 for x >= 0; a constant that no point determines keeps its value.

    A constant that comes out negative is set to zero and the rest solved again, the most negative
    (in its share of the sum) first.
    """
    scale = np.abs(design).max(axis=0)
    result = np.where(scale > 0, 0.0, constants)
    used = np.flatnonzero(scale > 0)
    while len(used):
        found, *_ = np.linalg.lstsq(design[:, used] / scale[used], np.ones(len(design)), rcond=None)
        if found.min() >= 0:
            result[used] = found / scale[used]
            break
        used = np.delete(used, int(np.argmin(found)))
    return result


def judge(table: Table) -> Residual:
    """Fits the three smallest quarters by size and judges on the largest."""
    order = np.argsort(table.size, kind="stable")
    cut = int(len(order) * SEEN_SHARE)
    seen, unseen = order[:cut], order[cut:]
    constants = solve(table.model.at(seen), table.measured_s[seen], table.start)
    error = table.model.seconds(constants) / table.measured_s - 1.0
    ruling = table.model.ruling(constants)
    return Residual(
        table=table.name,
        group=table.group,
        points=len(order),
        constants=tuple(zip(table.constants, constants.tolist(), strict=True)),
        seen=float(np.median(np.abs(error[seen]))),
        unseen=float(np.median(np.abs(error[unseen]))),
        unseen_p90=float(np.quantile(np.abs(error[unseen]), 0.9)),
        bias=float(np.median(error[unseen])),
        bounds=tuple(
            (name, float(np.mean(ruling == bound)))
            for bound, (name, _) in enumerate(table.model.bounds)
        ),
    )


def residual_table(residuals: Sequence[Residual]) -> str:
    """The residuals as a Markdown table."""
    lines = [
        "| table | points | constants | rules | seen | largest quarter | its p90 | bias |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for residual in residuals:
        constants = ", ".join(f"{name} {value:.3g}" for name, value in residual.constants)
        bounds = ", ".join(f"{name} {share:.0%}" for name, share in residual.bounds if share)
        lines.append(
            f"| {residual.table} | {residual.points} | {constants} | {bounds} | "
            f"{residual.seen:.1%} | {residual.unseen:.1%} | {residual.unseen_p90:.1%} | "
            f"{residual.bias:+.1%} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Prints the residuals of all tables below a directory of traces."""
    from kvasir_scenario.data_paths import data_directory
    from kvasir_sim.fit_tables import all_tables, efficiency_from

    try:
        folder = Path(arguments[0]) if arguments else data_directory(Path.cwd()) / "traces"
        tables = all_tables(folder)
    except ScenarioError as error:
        print(f"kvasir_sim.fit: {error}", file=sys.stderr)
        return 2
    residuals = [judge(table) for table in tables]
    print(residual_table(residuals))
    print("\nefficiencies (costs.efficiency.FITTED holds them rounded):")
    for name, value in asdict(efficiency_from(residuals)).items():
        print(f"  {name} = {value:.3g}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
