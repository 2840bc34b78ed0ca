"""What workers answer, as numbers: each kind of lie is told on a small random result.

The coordinator sees what it would see of real tensors: the shape, the norm ratio, and, when it
recomputes, the relative L2 error of the worst row. A right answer differs from ours by rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from kvasir_core.swarm import TOLERANCES
from kvasir_scenario.schema_experts import WorkerClass
from kvasir_scenario.tables import Floats

ROWS_MAX = 8  # Of a result that stands for all: the worst row decides, and 8 rows have one.
WIDTH = 32
ROUNDING = TOLERANCES["f16"] / 8  # Typical error of a right answer; no draw reaches the tolerance.
SCALE = 1.02
NOISE = 0.02

Lie = Callable[[Floats, Floats, np.random.Generator], Floats]
"""(right result, the result before, chance) -> what is sent."""


def _swapped(right: Floats, _before: Floats, _rng: np.random.Generator) -> Floats:
    """The first two rows change places; a single row cannot."""
    return right[[1, 0, *range(2, len(right))]] if len(right) > 1 else right


def _noisy(right: Floats, _before: Floats, rng: np.random.Generator) -> Floats:
    noise = rng.standard_normal(right.shape)
    size = np.linalg.norm(right, axis=1, keepdims=True) / np.linalg.norm(
        noise, axis=1, keepdims=True
    )
    noisy: Floats = right + NOISE * size * noise
    return noisy


LIES: dict[str, Lie] = {
    "nan": lambda right, _before, _rng: np.full_like(right, np.nan),
    "zeros": lambda right, _before, _rng: np.zeros_like(right),
    "swapped_rows": _swapped,
    "stale": lambda right, before, _rng: np.resize(before, right.shape),
    "scaled": lambda right, _before, _rng: SCALE * right,
    "noise": _noisy,
    "turncoat": lambda right, _before, _rng: -right,
    "sometimes": lambda right, _before, _rng: -right,
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What is known of one answer; `error` only if somebody recomputes it."""

    norm_ratio: float
    error: float

    @property
    def is_right(self) -> bool:
        return self.error < ROUNDING * 8


class Conscience:
    """One worker's way of answering."""

    def __init__(self, kind: WorkerClass, chance: Random) -> None:
        self._kind = kind
        self._chance = chance
        self._rng: np.random.Generator | None = None  # Made for the first lie.
        self._before: Floats | None = None
        self.answers = 0

    @property
    def is_honest(self) -> bool:
        return self._kind.honesty == "honest"

    def answer(self, rows: int) -> Answer:
        """The next answer, over so many rows."""
        self.answers += 1
        if self._lies_now():
            return self._lie(rows)
        return Answer(norm_ratio=1.0, error=ROUNDING * (0.5 + 0.5 * self._chance.random()))

    def _lies_now(self) -> bool:
        match self._kind.honesty:
            case "honest":
                return False
            case "turncoat":
                return self.answers > self._kind.honest_answers
            case "sometimes":
                return self._chance.random() < self._kind.wrong_share
            case "nan" | "zeros" | "swapped_rows" | "stale" | "scaled" | "noise":
                return True

    def _lie(self, rows: int) -> Answer:
        if self._rng is None:
            self._rng = np.random.default_rng(self._chance.getrandbits(64))
            self._before = self._rng.standard_normal((ROWS_MAX, WIDTH))
        assert self._before is not None
        right = self._rng.standard_normal((min(rows, ROWS_MAX), WIDTH))
        sent = LIES[self._kind.honesty](right, self._before, self._rng)
        self._before = right
        norms = np.linalg.norm(right, axis=1)
        return Answer(
            norm_ratio=float((np.linalg.norm(sent, axis=1) / norms).max()),
            error=float((np.linalg.norm(sent - right, axis=1) / norms).max()),
        )
