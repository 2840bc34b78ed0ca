"""How many workers serve, and have claimed, each expert of a layer; as runs of equal counts."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Run(NamedTuple):
    """A maximal range of experts with equal counts."""

    begin: int
    end: int
    replicas: int
    claimed: int


class LayerSupply:
    """Counts per expert of one layer; runs are derived when asked for, and kept until a change."""

    __slots__ = ("_least", "_runs", "claimed", "replicas")

    def __init__(self, experts: int) -> None:
        self.replicas = [0] * experts
        self.claimed = [0] * experts
        self._runs: tuple[Run, ...] | None = None
        self._least: tuple[int, int] | None = None  # Without and with claims.

    def add_replicas(self, begin: int, end: int, step: int) -> None:
        for expert in range(begin, end):
            self.replicas[expert] += step
        self._runs = self._least = None
        assert self.replicas[begin] >= 0

    def add_claims(self, begin: int, end: int, step: int) -> None:
        for expert in range(begin, end):
            self.claimed[expert] += step
        self._runs = self._least = None
        assert self.claimed[begin] >= 0

    @property
    def runs(self) -> tuple[Run, ...]:
        if self._runs is None:
            self._runs = tuple(_runs_of(list(zip(self.replicas, self.claimed, strict=True))))
        return self._runs

    def least(self, *, claims: bool) -> int:
        """The smallest supply of any expert, claims counted or not."""
        if self._least is None:
            both = min([run.replicas + run.claimed for run in self.runs])
            self._least = min(self.replicas), both
        return self._least[claims]


def runs_outside(runs: Iterable[Run], ranges: Sequence[tuple[int, int]]) -> list[Run]:
    """What is left of the runs outside some ranges (ascending, disjoint)."""
    left = []
    for run in runs:
        begin = run.begin
        for low, high in ranges:
            if low >= run.end:
                break
            if begin < low:
                left.append(run._replace(begin=begin, end=low))
            begin = max(begin, high)
        if begin < run.end:
            left.append(run._replace(begin=begin))
    return left


def _runs_of(counts: Sequence[tuple[int, int]]) -> Iterable[Run]:
    begin = 0
    for expert in range(1, len(counts) + 1):
        if expert == len(counts) or counts[expert] != counts[begin]:
            yield Run(begin, expert, *counts[begin])
            begin = expert
