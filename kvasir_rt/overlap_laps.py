"""What laps tell where stages overlap and micro-batches overtake each other: stretches of time.

A stage that holds several micro-batches at once has no start and end of its own for each. It
tells its time from one departure to the next: one `Stretch`, numbered, so that the bridge can put
them in order whatever the order in which laps return. Between two departures a stage is
empty-handed at most once, before `held_from`; from there to `sent` it is busy, blocked by experts
or blocked by credit, and the three sum to that time exactly.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvasir_core.plan import Plan
from kvasir_core.units import Nanos
from kvasir_core.window import overlapped
from kvasir_rt.frames import SPENT, STAMPS
from kvasir_rt.laps import Flight, LapMeter

Interval = tuple[int, str, int, int, int]  # Stage; busy, experts or credit; start, stop, composed.


class Stretch(NamedTuple):
    """One stage's time up to a departure, as it travels: `SPENT` integers.

    Attributes:
        number: Departures of this stage in this epoch, from 0.
        held_from: Since when it has had something in hand; the previous departure, if it had then.
        composed: When what ended its starvation was composed, on the bridge's clock.
        busy_ns: Of the time from `held_from` to this departure.
        experts_ns: In which everything held waited, and something of it for experts.
        computed_ns: What the departing micro-batch itself took of the processor.
        parked_ns: How long that waited for experts.
    """

    number: int
    held_from: int
    composed: int
    busy_ns: int
    experts_ns: int
    computed_ns: int
    parked_ns: int


class Departure(NamedTuple):
    """A stretch with its end."""

    stretch: Stretch
    sent: int


class OverlapLapMeter(LapMeter):
    """A `LapMeter` that is fed stretches.

    Args:
        plan: Of the ring.
        overlap: Most micro-batches in a stage's hands.
    """

    def __init__(self, plan: Plan, overlap: int) -> None:
        super().__init__(plan)
        self._overlap = overlap
        self._next = [0] * plan.stages  # Whose turn it is, by number.
        self._early: list[dict[int, Departure]] = [{} for _ in range(plan.stages)]

    def take(
        self, lap: Flight, returned: int, stamps: list[int], stretches: Sequence[Stretch]
    ) -> list[Interval]:
        """Account one lap, in order of return.

        Args:
            lap: The micro-batch and when it was composed and submitted.
            returned: When its result was here.
            stamps: Four per stage, on the bridge's clock.
            stretches: One per stage, `held_from` on the bridge's clock.

        Returns:
            Times that are known now, for a recorder: of each stage in order.
        """
        batch, composed, submitted = lap
        self.bindings[batch.binding] += 1
        self.spans += len(batch.requests)
        self.laps_ns.append(returned - composed)
        self._note_work(submitted, returned, stamps, stretches)
        intervals: list[Interval] = []
        for stage, stretch in enumerate(stretches):
            meter, early = self.meters[stage], self._early[stage]
            meter.micro_batches += 1
            meter.rows += batch.row_count
            early[stretch.number] = Departure(stretch, stamps[STAMPS * stage + 3])
            while (departure := early.pop(self._next[stage], None)) is not None:
                self._next[stage] += 1
                self._spend(stage, departure, intervals)
        self.causes.drain_before(min(meter.accounted_until for meter in self.meters))
        return intervals

    def begin_epoch(self) -> list[Interval]:
        """Departures are counted anew; those that waited for one that is lost are accounted now."""
        intervals: list[Interval] = []
        for stage, early in enumerate(self._early):
            for number in sorted(early):
                self._spend(stage, early[number], intervals)
            early.clear()
            self._next[stage] = 0
        return intervals

    def flush(self) -> None:
        """Nothing waits for it here."""

    def _spend(self, stage: int, departure: Departure, intervals: list[Interval]) -> None:
        """Clocks of other hosts are known to half a round trip: nothing may begin too early."""
        stretch, sent = departure
        meter = self.meters[stage]
        at = max(stretch.held_from, meter.accounted_until)
        until = max(sent, at)
        for state, length in (
            ("busy", stretch.busy_ns),
            ("experts", stretch.experts_ns),
            ("credit", until - at),
        ):
            stop = min(until, at + length)
            meter.spend(state, Nanos(at), Nanos(stop), Nanos(stretch.composed), self.causes)
            intervals.append((stage, state, at, stop, stretch.composed))
            at = stop

    def _note_work(
        self, submitted: int, returned: int, stamps: list[int], stretches: Sequence[Stretch]
    ) -> None:
        """For the window: `kvasir_core.window.overlapped` tells holds from time on the way."""
        sums, stages = self._sums, self._stages
        work = 0
        arrivals = [*stamps[STAMPS::STAMPS], returned]
        for stage, stretch in enumerate(stretches):
            hold, parked = overlapped(stretch.computed_ns, stretch.parked_ns, self._overlap)
            link = max(0, arrivals[stage] - stamps[STAMPS * stage + 3]) + parked
            sums[stage] += hold
            sums[stages + stage] += link
            work += hold + link
        sums[2 * stages] += max(0, stamps[0] - submitted)
        self._work.append(work)


def stretches_of(spent: Sequence[int], shifts: Sequence[int], zero: int) -> list[Stretch]:
    """What travelled, on the engine's clock.

    Args:
        spent: `SPENT` integers per stage.
        shifts: What to take off each stage's clock.
        zero: What to take off the bridge's.
    """
    found = []
    for stage, shift in enumerate(shifts):
        stretch = Stretch(*spent[SPENT * stage : SPENT * (stage + 1)])
        found.append(
            stretch._replace(held_from=stretch.held_from - shift, composed=stretch.composed - zero)
        )
    return found
