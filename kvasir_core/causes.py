"""Why the head had nothing to submit, as a step function of time.

After every event the head has composed all it may, so there is always one reason why it could not
compose another micro-batch. A stage that is starved before its next micro-batch was composed is
starved for the head's reason at that time; after the composition it waits for its upstream.
"""

from collections.abc import Sequence
from enum import StrEnum

from kvasir_core.units import Nanos


class Cause(StrEnum):
    """Why a stage is empty-handed."""

    NO_DEMAND = "no_demand"  # No request is live.
    DEPENDENCY = "dependency"  # Every live request waits for its own token.
    CAPACITY = "capacity"  # Requests wait, but KV, window, running cap or a lost stage forbids.
    UPSTREAM = "upstream"  # The micro-batch is composed and on its way.


NEVER = Nanos(1 << 62)  # Later than any time (146 years).


class CauseClock:
    """The head's cause over time; `switch` appends, `drain_before` forgets what is accounted."""

    __slots__ = ("cause", "causes", "times")

    def __init__(self, now: Nanos = Nanos(0)) -> None:
        self.cause = Cause.NO_DEMAND
        self.times: list[int] = [now]
        self.causes: list[Cause] = [Cause.NO_DEMAND]

    def switch(self, cause: Cause, now: Nanos) -> None:
        """The head's reason is `cause` from `now` on."""
        if cause is not self.cause:
            self.cause = cause
            if self.times[-1] == now:  # The earlier reason held for no time at all.
                self.causes[-1] = cause
            else:
                self.times.append(now)
                self.causes.append(cause)

    def drain_before(self, time: Nanos) -> None:
        """Forget changes that ended at or before `time`; no gap may begin earlier from now on."""
        keep = 0
        while keep + 1 < len(self.times) and self.times[keep + 1] <= time:
            keep += 1
        del self.times[:keep], self.causes[:keep]

    def split(self, gaps: Sequence[tuple[int, int]], into: dict[Cause, int]) -> None:
        """Add the length of each gap `(start, stop)` to the causes that held during it.

        Gaps must be in order of time and begin no earlier than what was drained.
        """
        times, causes, at = self.times, self.causes, 0
        last = len(times) - 1
        for start, stop in gaps:
            while at < last and times[at + 1] <= start:
                at += 1
            here, position = start, at
            while position < last and times[position + 1] < stop:
                into[causes[position]] += times[position + 1] - here
                here = times[position + 1]
                position += 1
            into[causes[position]] += stop - here
