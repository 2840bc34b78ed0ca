"""A sweep from its points to its table: what is known is kept, the rest is run and journaled."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvasir_core.errors import ScenarioError
from kvasir_sim.sweep.evaluate import Reply, Task
from kvasir_sim.sweep.figures import FIGURES
from kvasir_sim.sweep.journal import Journal, journal_path
from kvasir_sim.sweep.points import Point, Sweep
from kvasir_sim.sweep.pool import LOST, Pool, run_all
from kvasir_sim.sweep.table import KINDS, axis_cell, columns_of, read_table, write_table

Progress = Callable[[int], None]
"""Called with the number of points that are done."""

NOTHING: dict[str, Any] = {figure.name: None for figure in FIGURES}


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What came of a sweep.

    Attributes:
        points: All of them.
        known: Found in the journal or in an earlier result, and not run again.
        failed: Points that are refused or broke.
        simulate_s: CPU time of the simulations run now.
        other_s: CPU time the workers spent around them.
    """

    points: list[Point]
    known: int = 0
    failed: list[tuple[Point, str]] = field(default_factory=list)
    simulate_s: float = 0.0
    other_s: float = 0.0


class Stopped(Exception):
    """The user stopped the sweep.

    Attributes:
        done: Points that are safe in the journal.
    """

    def __init__(self, done: int) -> None:
        super().__init__(f"{done} points are done")
        self.done = done


def check_out(out: Path) -> None:
    """The result's name says its kind, and its folder can be made.

    Raises:
        ScenarioError: It does not, or it cannot.
    """
    if out.suffix not in KINDS:
        raise ScenarioError(f"--out {out}: the name must end in {' or '.join(KINDS)}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ScenarioError(f"--out {out}: its folder cannot be made: {error.strerror}") from None
    if out.exists() and not out.is_file():
        raise ScenarioError(f"--out {out}: is there and is no file; name a new one")


class Run:
    """One sweep on its way into one file.

    Raises:
        ScenarioError: The file, or its journal, belongs to something else.
    """

    def __init__(self, sweep: Sweep, out: Path) -> None:
        check_out(out)
        self._sweep = sweep
        self._out = out
        self._points = list(sweep.points())
        keys = {point.key for point in self._points}
        earlier = read_table(out) if out.exists() else {}
        _refuse_others(out, set(earlier) - keys, len(earlier))
        self._journal = Journal(journal_path(out))
        with_journal = self._journal.keys()
        _refuse_others(self._journal.path, with_journal - keys, len(with_journal))
        for key, row in earlier.items():
            if key not in with_journal and not str(row.get("error") or "").startswith(LOST):
                self._journal.add(key, row)
        self.outcome = Outcome(points=self._points, known=len(self._journal.keys()))
        for point in self._points:
            if point.error is not None:
                self._journal.add(point.key, {**NOTHING, "error": point.error})
        self._done = self._journal.keys()
        self._is_finished = False

    @property
    def total(self) -> int:
        return len(self._points)

    @property
    def missing(self) -> int:
        """Points that must be simulated."""
        return len(self._points) - len(self._done)

    def close(self) -> None:
        """Give the journal back; what is in it stays."""
        if not self._is_finished:
            self._journal.close()

    def work(self, pool: Pool, progress: Progress | None = None) -> None:
        """Run what is missing.

        Raises:
            Stopped: By the user.
        """
        try:
            for reply in run_all(pool, self._tasks(), self.missing):
                self._take(reply)
                if progress is not None:
                    progress(len(self._done))
        except KeyboardInterrupt:
            raise Stopped(len(self._done)) from None

    def finish(self) -> Outcome:
        """Write the table and remove the journal."""
        columns = columns_of(self._sweep.columns())
        write_table(self._out, columns, self._rows([kind for _, kind in columns]))
        self._journal.remove()
        self._is_finished = True
        return self.outcome

    def _tasks(self) -> Iterator[Task]:
        for number, point in enumerate(self._points):
            if point.key not in self._done:
                yield Task(number, self._sweep.changes(point))

    def _take(self, reply: Reply) -> None:
        point = self._points[reply.number]
        row = {**NOTHING, **reply.figures, "error": reply.error}
        self._journal.add(point.key, row, is_lost=reply.is_lost)
        self._done.add(point.key)
        self.outcome.simulate_s += reply.simulate_s
        self.outcome.other_s += reply.other_s

    def _rows(self, kinds: list[str]) -> Iterator[list[Any]]:
        """In the sweep's order; failures are noted on the way."""
        for point in self._points:
            row = self._journal.row(point.key)
            if row["error"] is not None:
                self.outcome.failed.append((point, row["error"]))
            axes = zip(point.axes, kinds[1:], strict=False)
            yield [
                point.key,
                *(axis_cell(value, kind) for value, kind in axes),
                point.seed,
                *(row[figure.name] for figure in FIGURES),
                row["error"],
            ]


def _refuse_others(path: Path, others: set[str], count: int) -> None:
    if others:
        raise ScenarioError(
            f"{path}: has {len(others)} of {count} points that this sweep does not have (another "
            "grid, another scenario, or another version); name another --out, or delete it"
        )
