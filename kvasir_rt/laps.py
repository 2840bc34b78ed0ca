"""What laps tell: each stage's three times, and the times the window is computed from."""

from collections import Counter, deque
from dataclasses import dataclass
from operator import le
from statistics import pstdev
from typing import NamedTuple

from kvasir_core.causes import Cause, CauseClock
from kvasir_core.events import StageTimesMeasured
from kvasir_core.meter import StageMeter
from kvasir_core.microbatch import BindingLimit, MicroBatch
from kvasir_core.plan import Plan
from kvasir_core.units import Nanos

STAMPS = 4  # Per stage: received, start, end, sent.
REPORT_LAPS = 32  # The window follows a change of load within so many laps.
LAPS_KEPT = 512


@dataclass(frozen=True, slots=True)
class StageTimes:
    """One stage's time since the engine's zero, in nanoseconds; the three kinds sum to elapsed."""

    elapsed_ns: int
    busy_ns: int
    blocked_by_credit_ns: int
    blocked_by_experts_ns: int
    starved_by_ns: dict[Cause, int]
    micro_batches: int
    rows: int


class Flight(NamedTuple):
    """A micro-batch in the ring: when it was composed, and when the head had a slot for it."""

    micro_batch: MicroBatch
    composed: int
    submitted: int


class LapMeter:
    """Fed each returned micro-batch with its stamps, already on the engine's clock."""

    def __init__(self, plan: Plan) -> None:
        self._stages = plan.stages
        self.meters = [StageMeter() for _ in range(plan.stages)]
        self.causes = CauseClock()  # A copy of the ring's, so that a recorder may drain that one.
        self.bindings: Counter[BindingLimit] = Counter()
        self.spans = 0  # Of all laps together.
        self.laps_ns: deque[int] = deque(maxlen=LAPS_KEPT)
        self._laps: list[tuple[Flight, int, list[int]]] = []  # Since the last flush.
        self._last_sent = [0] * plan.stages
        self._sums = [0] * (2 * plan.stages + 1)  # Holds, links, turnaround.
        self._work: list[int] = []  # Per lap since the last report: holds and links, no waiting.

    def add(self, lap: Flight, returned: int, stamps: list[int]) -> None:
        """Account one lap. Laps come in the head's order.

        Args:
            lap: The micro-batch and when it was composed and submitted.
            returned: When its result was here.
            stamps: Four per stage; brought into order in place.
        """
        self._keep_order(stamps, lap.composed)
        self._laps.append((lap, returned, stamps))
        if len(self._laps) + len(self._work) >= REPORT_LAPS:
            self.flush()

    def _keep_order(self, stamps: list[int], composed: int) -> None:
        """Clocks of other hosts are known to half a round trip: never let one run backwards."""
        last, starts = self._last_sent, stamps[1::STAMPS]
        if composed <= stamps[0] and stamps == sorted(stamps) and all(map(le, last, starts)):
            self._last_sent = stamps[STAMPS - 1 :: STAMPS]  # So it is on one host.
            return
        for stage in range(self._stages):
            at = STAMPS * stage
            floor = last[stage]
            stamps[at] = max(stamps[at], composed)
            for index in range(at + 1, at + STAMPS):
                floor = stamps[index] = max(stamps[index], floor)
            last[stage] = floor

    def _sum(self, submitted: int, returned: int, stamps: list[int]) -> None:
        sums, stages = self._sums, self._stages
        work = 0
        arrivals = [*stamps[STAMPS::STAMPS], returned]
        for stage in range(stages):
            _, start, end, sent = stamps[STAMPS * stage : STAMPS * stage + STAMPS]
            link = max(0, arrivals[stage] - sent)
            sums[stage] += end - start
            sums[stages + stage] += link
            work += end - start + link
        sums[2 * stages] += max(0, stamps[0] - submitted)
        self._work.append(work)

    def flush(self) -> None:
        """Bring the meters up to date: all laps since the last time in one go is cheaper."""
        laps, self._laps = self._laps, []
        if not laps:
            return
        composed: list[int] = []
        times: list[int] = []
        rows = 0
        for (batch, composed_at, submitted), returned, stamps in laps:
            self.bindings[batch.binding] += 1
            self.spans += len(batch.requests)
            rows += batch.row_count
            self.laps_ns.append(returned - composed_at)
            self._sum(submitted, returned, stamps)
            composed.append(composed_at)
            times += stamps
        width = STAMPS * self._stages
        for stage, meter in enumerate(self.meters):
            started, ended, sent = (
                times[STAMPS * stage + part :: width] for part in range(1, STAMPS)
            )
            meter.add(started, ended, sent, composed, self.causes)
            meter.micro_batches += len(laps)
            meter.rows += rows
        self.causes.drain_before(min(meter.accounted_until for meter in self.meters))

    def measured(self) -> StageTimesMeasured | None:
        """Means since the last report, once there are enough laps; they start anew."""
        if len(self._work) < REPORT_LAPS:
            return None
        means = [Nanos(total // len(self._work)) for total in self._sums]
        stages, jitter = self._stages, round(pstdev(self._work))
        self._sums = [0] * len(self._sums)
        self._work = []
        return StageTimesMeasured(
            holds=tuple(means[:stages]),
            links=tuple(means[stages : 2 * stages]),
            turnaround=means[2 * stages],
            jitter=Nanos(jitter),
        )

    def times(self, now: Nanos, *, is_ring_empty: bool) -> tuple[StageTimes, ...]:
        """Each stage's three times, up to the last micro-batch it is known to have sent.

        With an empty ring, up to now: nobody holds anything. Otherwise what a stage did since is
        accounted when the next result is back.
        """
        self.flush()
        if is_ring_empty:
            for stage, meter in enumerate(self.meters):
                meter.close(now, self.causes)
                self._last_sent[stage] = max(self._last_sent[stage], now)
            self.causes.drain_before(now)
        return tuple(
            StageTimes(
                elapsed_ns=meter.elapsed_ns,
                busy_ns=meter.busy_ns,
                blocked_by_credit_ns=meter.blocked_by_credit_ns,
                blocked_by_experts_ns=meter.blocked_by_experts_ns,
                starved_by_ns=dict(meter.starved_by_ns),
                micro_batches=meter.micro_batches,
                rows=meter.rows,
            )
            for meter in self.meters
        )
