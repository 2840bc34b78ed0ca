"""The ring now: what `/api/ring` says, and what the last seconds were like.

Counts only grow, so a stretch of time is the difference of two snapshots. Its verdict is the one
that reports give, from the same core.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any

from kvasir_core.causes import Cause
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_core.verdict import QueueFacts, RunFacts, StageTimes, judge
from kvasir_rt.bridge.ring_view import binding_counts, ring_view, seconds
from kvasir_rt.snapshot import RingSnapshot, StageSnapshot

SPAN_NS = 10 * NANOS_PER_SECOND  # Long enough for a verdict, short enough to be called now.
SNAPSHOTS_MAX = 64
Json = dict[str, Any]


class LiveView:
    """Remembers the snapshots of the last seconds."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._past: deque[RingSnapshot] = deque(maxlen=SNAPSHOTS_MAX)

    def take(self, now: RingSnapshot) -> Json:
        """The page's next message."""
        past = self._past
        if past and now.now_ns - past[-1].now_ns > SPAN_NS:
            past.clear()  # Nobody looked meanwhile.
        past.append(now)
        while len(past) > 2 and now.now_ns - past[1].now_ns >= SPAN_NS:
            past.popleft()
        return {**ring_view(self._model, now), "live": _stretch(list(past))}


def _stretch(past: Sequence[RingSnapshot]) -> Json | None:
    """The time between the first and the last of these; None for a single one."""
    first, last = past[0], past[-1]
    elapsed_ns = last.now_ns - first.now_ns
    if elapsed_ns <= 0:
        return None
    span = seconds(elapsed_ns)
    times = [
        _stage_times(before, after) for before, after in zip(first.stages, last.stages, strict=True)
    ]
    before = binding_counts(first)
    verdict = None if last.down_why else judge(_facts(past, elapsed_ns, times))
    return {
        "span_s": span,
        "verdict": None
        if verdict is None
        else {"kind": verdict.kind, "stage": verdict.stage, "evidence": list(verdict.evidence)},
        "output_tokens_per_s": (last.tokens - first.tokens) / span,
        "micro_batches_per_s": (last.laps - first.laps) / span,
        "binding_limits": {
            limit: count - before[limit] for limit, count in binding_counts(last).items()
        },
        "stages": [
            _shares(each, (new.times.rows - old.times.rows) / span)
            for each, old, new in zip(times, first.stages, last.stages, strict=True)
        ],
    }


def _shares(times: StageTimes, rows_per_s: float) -> Json:
    """A stage's time in shares that sum to 1; what a micro-batch in hand takes is told after it."""
    blocked_ns = times.blocked_by_credit_ns + times.blocked_by_experts_ns
    known_ns = max(1, times.busy_ns + blocked_ns + times.starved_ns)
    return {
        "busy": times.busy_ns / known_ns,
        "blocked": blocked_ns / known_ns,
        "starved": times.starved_ns / known_ns,
        "starved_by": {
            str(cause): time_ns / known_ns for cause, time_ns in times.starved_by_ns.items()
        },
        "rows_per_s": rows_per_s,
    }


def _stage_times(before: StageSnapshot, after: StageSnapshot) -> StageTimes:
    """What a stage did between two snapshots; its meters never run backwards."""
    old, new = before.times, after.times
    return StageTimes(
        busy_ns=new.busy_ns - old.busy_ns,
        blocked_by_credit_ns=new.blocked_by_credit_ns - old.blocked_by_credit_ns,
        blocked_by_experts_ns=new.blocked_by_experts_ns - old.blocked_by_experts_ns,
        starved_by_ns={
            cause: new.starved_by_ns[cause] - old.starved_by_ns[cause] for cause in Cause
        },
    )


def _facts(past: Sequence[RingSnapshot], elapsed_ns: int, times: Sequence[StageTimes]) -> RunFacts:
    first, last = past[0], past[-1]
    old, new = first.statistics, last.statistics
    binding = {
        limit: last.binding_limits.get(limit, 0) - first.binding_limits.get(limit, 0)
        for limit in last.binding_limits
    }
    laps = max(1, sum(binding.values()))
    head_rows = last.stages[0].times.rows - first.stages[0].times.rows
    return RunFacts(
        elapsed_ns=elapsed_ns,
        stages=tuple(times),
        binding=binding,
        spans_mean=(last.spans - first.spans) / laps,
        micro_batch_width=last.plan.micro_batch_width,
        rows_mean=head_rows / laps,
        row_width=last.plan.row_width,
        queue=_queue([each.statistics.waiting for each in past], new.offered - old.offered),
        offered=new.offered - old.offered + old.waiting + old.running,
        finished=new.finished - old.finished,
        waiting=new.waiting,
        running=new.running,
        kv_blocks_peak=max(each.statistics.kv_blocks_in_use for each in past),
        kv_blocks_total=new.kv_blocks_total,
        preemptions=new.preemptions - old.preemptions,
    )


def _queue(waiting: Sequence[int], arrivals: int) -> QueueFacts:
    """The queue's course, from its length at evenly spaced moments."""
    half = len(waiting) // 2
    if half < 2:
        return QueueFacts(arrivals=arrivals, length_max=max(waiting))
    steps = len(waiting) - 1
    middle, mean = steps / 2, sum(waiting) / len(waiting)
    slope = sum((at - middle) * (found - mean) for at, found in enumerate(waiting)) / sum(
        (at - middle) ** 2 for at in range(len(waiting))
    )
    earlier, later = waiting[:half], waiting[half:]
    return QueueFacts(
        arrivals=arrivals,
        grown=slope * steps,
        earlier_mean=sum(earlier) / len(earlier),
        later_mean=sum(later) / len(later),
        occupied_share=sum(found > 0 for found in later) / len(later),
        length_max=max(waiting),
    )
