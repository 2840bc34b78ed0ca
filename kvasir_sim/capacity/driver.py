"""Searches side by side on one pool: each asks for one run at a time, and no run is done twice."""

import json
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from kvasir_sim.sweep.evaluate import Task
from kvasir_sim.sweep.points import Changes
from kvasir_sim.sweep.pool import Pool

Found = TypeVar("Found")
Row = dict[str, Any]
Progress = Callable[[int, int, str], None]
"""Called with the runs so far, how many there will probably be, and what they are for."""

TOLD = ("rate_per_s", "rate_scale", "users", "requests", "seed")  # Of a run that begins.


class Driver:
    """Runs what searches ask for.

    Attributes:
        runs: Simulations so far.
    """

    def __init__(self, pool: Pool, progress: Progress | None = None) -> None:
        self.runs = 0
        self._expected = 0
        self._doing = self._trying = ""
        self._pool = pool
        self._progress = progress
        self._rows: dict[str, Row] = {}

    def expect(self, doing: str, runs: int, later: int = 0) -> None:
        """Say what comes next and how many runs it usually takes, then and after it."""
        self._doing, self._expected = doing, self.runs + runs + later
        self._tell()

    def _tell(self) -> None:
        if self._progress is not None:
            doing = self._doing + self._trying
            self._progress(self.runs, max(self._expected, self.runs + 1), doing)

    def drive(self, searches: Sequence[Generator[Changes, Row, Found]]) -> list[Found]:
        """Advance all of them until each has found what it sought."""
        found: dict[int, Found] = {}
        waiting: dict[str, list[int]] = {}
        asked: deque[tuple[str, Changes]] = deque()

        def advance(place: int, row: Row | None) -> None:
            search = searches[place]
            try:
                changes = next(search) if row is None else search.send(row)
                while (key := json.dumps(changes)) in self._rows:
                    changes = search.send(self._rows[key])
            except StopIteration as stop:
                found[place] = stop.value
                return
            if key not in waiting:
                asked.append((key, changes))
            waiting.setdefault(key, []).append(place)

        for place in range(len(searches)):
            advance(place, None)
        keys: dict[int, str] = {}
        while waiting:
            while asked and self._pool.has_room(1):
                key, changes = asked.popleft()
                keys[self.runs + len(keys)] = key
                self._pool.submit(Task(self.runs + len(keys) - 1, changes))
                self._trying = _words(changes)
                self._tell()
            reply = self._pool.receive()
            key = keys.pop(reply.number)
            self.runs += 1
            self._rows[key] = {**reply.figures, "error": reply.error}
            self._tell()
            for place in waiting.pop(key):
                advance(place, self._rows[key])
        return [found[place] for place in range(len(searches))]


def _words(changes: Changes) -> str:
    """The load and the seed of a run, for people."""
    last = [(key.rpartition(".")[2], value) for key, value in changes]
    told = [
        f"{name.replace('_', ' ')} {value:.4g}"
        for name, value in last
        if name in TOLD and isinstance(value, int | float)
    ]
    return f" ({', '.join(told)})" if told else ""
