"""How many micro-batches keep every stage busy."""

from kvasir_core.events import StageTimesMeasured

TOLERANCE = 50  # A fiftieth of a hold: rounding of equal times must not cost a window place.
SMALL_GAP = 8  # Nor may an eighth, where one more micro-batch would only make all narrower.


def window_for(times: StageTimesMeasured, fillable: int) -> int:
    """ceil((sum of holds + sum of links + head turnaround + jitter) / longest hold), at least 1.

    It is not the number of stages: time on links and unequal holds both count. More than this adds
    queueing and weight reads, and no throughput. The same reads make places for the jitter of laps,
    or for a small gap, cost more than they bring while requests are too few to fill them: these are
    only given as far as `fillable` micro-batches go.

    Args:
        times: Measured.
        fillable: How many micro-batches the live requests fill.
    """
    longest = max(times.holds)
    if longest <= 0:
        return len(times.holds)
    lap = sum(times.holds) + sum(times.links) + times.turnaround
    least = -(-(lap - longest // SMALL_GAP) // longest)
    most = -(-(lap + times.jitter - longest // TOLERANCE) // longest)
    return max(1, least, min(most, fillable))


def overlapped(computed: int, parked: int, overlap: int) -> tuple[int, int]:
    """Hold and time on the way of a micro-batch at a stage that holds several at once.

    A stage that holds `overlap` at once lets one go every `max(computed, (computed + parked) /
    overlap)`: that is its hold, and the rest is time on the way. So a window made of these grows
    with the parked time as far as the overlap makes use of it, and no farther.

    Args:
        computed: What the stage computed for it.
        parked: How long it waited for experts.
        overlap: Most micro-batches in the stage's hands.

    Returns:
        Both in the unit of the arguments; their sum is that of `computed` and `parked`.
    """
    hold = max(computed, (computed + parked) // overlap)
    return hold, computed + parked - hold
