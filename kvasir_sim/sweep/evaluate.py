"""One point, evaluated: what a worker process does, on this machine or in a cluster.

Tasks and replies are JSON texts, the same everywhere, so that it cannot matter who ran a point.
"""

import json
import time
from dataclasses import asdict, dataclass
from typing import Any

from kvasir_core.errors import KvasirError
from kvasir_sim.simulate import simulate
from kvasir_sim.sweep.figures import figures_of
from kvasir_sim.sweep.points import Changes, Source, point_scenario

SAID_MAX = 300  # Characters of an error that is ours; enough to find it.


@dataclass(frozen=True, slots=True)
class Task:
    """A run that is wanted; `number` is the asker's own."""

    number: int
    changes: Changes

    def to_json(self) -> str:
        return json.dumps([self.number, self.changes], allow_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What became of a task.

    Attributes:
        number: The task's.
        figures: By name; empty if it failed.
        error: Why it failed.
        is_lost: Nobody could say: the process that ran it died. It may work another time.
        simulate_s: CPU time of the simulation.
        other_s: CPU time of everything around it, here.
    """

    number: int
    figures: dict[str, Any]
    error: str | None = None
    is_lost: bool = False
    simulate_s: float = 0.0
    other_s: float = 0.0

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes) -> "Reply":
        return cls(**json.loads(text))


class Evaluator:
    """Evaluates points of one scenario, which it reads once."""

    def __init__(self, source_json: str) -> None:
        self._base = Source(**json.loads(source_json)).load()

    def evaluate(self, task_json: str | bytes) -> str:
        """Run a task; whatever goes wrong is told in the reply."""
        start = time.process_time()
        number, changes = json.loads(task_json)
        figures: dict[str, Any] = {}
        error = None
        simulate_s = 0.0
        try:
            scenario = point_scenario(self._base, changes)
            begin = time.process_time()
            report = simulate(scenario)
            simulate_s = time.process_time() - begin
            figures = figures_of(report)
        except KvasirError as problem:
            error = str(problem)
        except (Exception, MemoryError) as problem:  # noqa: BLE001 - One bad point must not end all.
            said = " ".join(str(problem).split())[:SAID_MAX]
            error = f"internal error: {type(problem).__name__}: {said}"
        other_s = time.process_time() - start - simulate_s
        return Reply(
            number=number, figures=figures, error=error, simulate_s=simulate_s, other_s=other_s
        ).to_json()
