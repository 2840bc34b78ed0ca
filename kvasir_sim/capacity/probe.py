"""Does a load hold? One seed, one load, and as long a run as it takes to tell.

A load holds when the run reached a steady state, its queue did not grow (verdict `overloaded`, see
`kvasir_core.verdict`), and every limit is kept. A run whose arrivals last less than `RESIDENCES`
times what a request stays has no steady state: requests still pile up inside the ring, and nothing
waits outside yet. Such a run, or one with too few samples for a percentile, is repeated with twice
as many requests, up to `LENGTH_MAX` times; what cannot be told then does not hold. Near the edge a
short run is no proof either, for a queue that one burst filled early does not seem to grow: where
half of the micro-batches leave somebody behind, the run must have `SURE_REQUESTS` requests.
"""

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from kvasir_core.verdict import VerdictKind
from kvasir_sim.capacity.knob import Knob
from kvasir_sim.capacity.limits import Limit
from kvasir_sim.sweep.points import Changes

RESIDENCES = 4.0  # Arrivals last this many stays in the system.
LENGTH_MAX = 16
SURE_REQUESTS = 1000  # The verdict calls 3 % of the arrivals growth: 30 are no accident.
PRESSED_SHARE = 0.5  # As `kvasir_core.verdict` has it.
GROWS = "the queue grows"
UNSETTLED = "no steady state"

Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one load came to.

    Attributes:
        holds: Whether it is carried.
        why: What failed, if it does not hold.
        is_sure: A longer run would not say otherwise.
        row: Figures of the last run.
        error: The scenario cannot be run at all, whatever the load.
    """

    holds: bool
    why: tuple[str, ...] = ()
    is_sure: bool = True
    row: Row
    error: str | None = None


def probe(
    knob: Knob, limits: Sequence[Limit], extra: Changes, load: float, seed: int
) -> Generator[Changes, Row, Outcome]:
    """Ask for runs until the load's fate is clear."""
    length = 1
    while True:
        changes = (*extra, *knob.changes(load, length, seed))
        outcome = judge((yield changes), limits)
        is_last = length >= LENGTH_MAX or not knob.can_extend
        if outcome.is_sure or is_last:
            return outcome
        offered = outcome.row["offered"] // length
        length *= 2
        while outcome.holds and length * offered < SURE_REQUESTS and length < LENGTH_MAX:
            length *= 2  # At once: what is between would not be sure either.


def judge(row: Row, limits: Sequence[Limit]) -> Outcome:
    """What a run says; a limit that is passed early would be passed in a longer run too."""
    if row.get("error") is not None:
        return Outcome(holds=False, why=(row["error"],), row=row, error=row["error"])
    if row["verdict"] == VerdictKind.OVERLOADED.value:
        return Outcome(holds=False, why=(GROWS,), row=row)
    few = row["few_samples"].split()
    passed = [limit for limit in limits if limit.name not in few and _is_passed(row, limit)]
    if passed:
        why = tuple(f"{limit.name} > {limit.most_s:g} s" for limit in passed)
        return Outcome(holds=False, why=why, row=row)
    if any(limit.name in few for limit in limits) or not _is_settled(row):
        return Outcome(holds=False, why=(UNSETTLED,), is_sure=False, row=row)
    is_pressed = (row["nothing_waiting_share"] or 0.0) < PRESSED_SHARE
    is_sure = not is_pressed or row["offered"] >= SURE_REQUESTS
    return Outcome(holds=True, is_sure=is_sure, row=row)


def _is_passed(row: Row, limit: Limit) -> bool:
    value = row[limit.figure]
    return value is None or value > limit.most_s


def _is_settled(row: Row) -> bool:
    span_s = row["trace_span_s"] if row["trace_span_s"] is not None else row["elapsed_s"]
    stay_s = row["residence_mean_s"]
    return stay_s is not None and span_s >= RESIDENCES * stay_s and math.isfinite(span_s)
