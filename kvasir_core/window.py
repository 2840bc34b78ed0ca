"""How many micro-batches keep every stage busy."""

from kvasir_core.events import StageTimesMeasured

TOLERANCE = 50  # A fiftieth of a hold: rounding of equal times must not cost a window place.


def window_for(times: StageTimesMeasured) -> int:
    """ceil((sum of holds + sum of links + head turnaround + jitter) / longest hold), at least 1.

    It is not the number of stages: time on links and unequal holds both count. More than this adds
    queueing and weight reads, and no throughput.
    """
    longest = max(times.holds)
    if longest <= 0:
        return len(times.holds)
    lap = sum(times.holds) + sum(times.links) + times.turnaround + times.jitter
    return max(1, -(-(lap - longest // TOLERANCE) // longest))
