"""What a run was like, in one word with its evidence.

Busy share alone cannot tell: on a measured 4-stage ring it stays between 70 and 79 % from 23 % to
230 % of capacity, because a ring that is nearly empty computes small micro-batches all the time. So
the verdict asks, in this order of precedence, and the first *yes* is the kind:

  1. idle          no micro-batch was ever composed.
  2. overloaded    the waiting queue grew while requests arrived: results depend on the horizon.
  3. kv_bound      KV stopped every fourth micro-batch, or was full and threw requests out.
  4. link_bound    a link was busy most of the time and busier than every stage, or kept its sender
                   waiting for credit while its receiver waited for work.
  5. bottlenecked  one stage worked most of the time (or under pressure), far more than the rest.
  6. idle          no stage worked more than 1 % of the time: there was hardly a request.
  7. starved       stages were empty-handed for half of the time, or 95 % of micro-batches left
                   nobody behind while the stages had time to spare.
  8. saturated     widths or caps left somebody behind in half of the micro-batches, or all full.
  9. balanced      the rest: work for most of the time, and nobody left behind for long.

*Work* is busy plus waiting for experts: the stage's own time, without what a full neighbour costs.
All limits are shares, so a verdict does not depend on the scale of a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from kvasir_core.causes import Cause
from kvasir_core.microbatch import BindingLimit

GROWTH_SHARE = 0.03  # Of the arrivals, so many stayed behind; a stable queue is noise around 0.
GROWTH_REQUESTS = 1.0  # Less than one request is no growth, whatever its share.
GROWTH_RATIO = 1.25  # Later mean over earlier mean; overload gives 3, a steady queue gives 1.
OCCUPIED_SHARE = 0.8  # An overloaded ring's queue is hardly ever empty in the later half.
KV_BOUND_SHARE = 0.25  # Of the micro-batches, KV stopped so many; below it is a detail.
KV_PREEMPTED_SHARE = 0.05  # Evictions per finished request: one in twenty computed twice.
KV_FULL_SHARE = 0.9  # Below this peak evictions come from lost stages, not from a lack of KV.
LINK_BUSY_SHARE = 0.8  # A FIFO busier than this queues for longer than it transfers.
LINK_BLOCKED_SHARE = 0.2  # The sender waits for credit so much of the time,
LINK_STARVED_SHARE = 0.1  # while the receiver waits for work: the time is spent between them.
BOTTLENECK_WORK = 0.8  # A stage that works so much of the time leads by itself.
BOTTLENECK_WORK_PRESSED = 0.5  # Under pressure a slow stage can lead with bubbles.
BOTTLENECK_REST = 0.85  # The other stages' mean work over the slowest one's; equal stages give 1.
IDLE_WORK = 0.01  # Nearly nothing ran,
IDLE_NO_DEMAND = 0.9  # and the head had nothing to run.
STARVED_SHARE = 0.5  # Empty-handed for half of the time, mean over stages.
STARVED_UNPRESSED = 0.95  # Nobody else to take; measured: 66 % of capacity, and 90 % at 82 %.
STARVED_SPARE = 0.15  # Time to spare; a ring with less of it is fed, whoever else is ready.
PRESSED_SHARE = 0.5  # Every second micro-batch left somebody behind.
FULL_SHARE = 0.9  # Micro-batches at their widths on average.
SHOWN_SHARE = 0.001  # Less is not worth a word of evidence.

PRESSING = (
    BindingLimit.ROW_WIDTH,
    BindingLimit.MICRO_BATCH_WIDTH,
    BindingLimit.RUNNING_CAP,
    BindingLimit.KV,
)  # These leave somebody behind. The cohort cap spreads decodes evenly at any load.


class VerdictKind(StrEnum):
    """The names of `report.json`."""

    IDLE = "idle"
    STARVED = "starved"
    BALANCED = "balanced"
    BOTTLENECKED = "bottlenecked"
    KV_BOUND = "kv_bound"
    LINK_BOUND = "link_bound"
    SATURATED = "saturated"
    OVERLOADED = "overloaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """One stage's time in nanoseconds; the parts sum to the run's elapsed time."""

    busy_ns: int
    blocked_by_credit_ns: int = 0
    blocked_by_experts_ns: int = 0
    starved_by_ns: Mapping[Cause, int]

    @property
    def work_ns(self) -> int:
        return self.busy_ns + self.blocked_by_experts_ns

    @property
    def starved_ns(self) -> int:
        return sum(self.starved_by_ns.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFacts:
    """The waiting queue (arrived, not yet composed) between the first and the last arrival.

    Attributes:
        arrivals: Requests that arrived in that span.
        grown: Fitted growth over the span, in requests (least squares).
        earlier_mean: Mean length in the span's first half.
        later_mean: Mean length in its second half.
        occupied_share: Share of the second half in which somebody waited.
        length_max: Longest queue seen.
    """

    arrivals: int = 0
    grown: float = 0.0
    earlier_mean: float = 0.0
    later_mean: float = 0.0
    occupied_share: float = 0.0
    length_max: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """All that a verdict is derived from.

    Attributes:
        elapsed_ns: From 0 to the end of the run.
        stages: Per stage, its times.
        binding: Per limit, how many of the composed micro-batches it stopped; they sum to all.
        spans_mean: Mean spans of a micro-batch.
        micro_batch_width: Most spans of one.
        rows_mean: Mean rows of a micro-batch.
        row_width: Most rows of one.
        queue: The waiting queue while requests arrived.
        offered: Requests offered.
        finished: Requests that finished.
        waiting: Requests waiting at the end.
        running: Requests admitted and unfinished at the end.
        link_busy_shares: Per hop, share of the time in which bytes were on it.
        kv_blocks_peak: Most KV blocks in use.
        kv_blocks_total: KV blocks there are.
        preemptions: Evictions because KV ran out, or a stage was lost.
    """

    elapsed_ns: int
    stages: tuple[StageTimes, ...]
    binding: Mapping[BindingLimit, int]
    spans_mean: float
    micro_batch_width: int
    rows_mean: float
    row_width: int
    queue: QueueFacts
    offered: int
    finished: int
    waiting: int
    running: int
    link_busy_shares: tuple[float, ...] = ()
    kv_blocks_peak: int
    kv_blocks_total: int
    preemptions: int

    @property
    def micro_batches(self) -> int:
        return sum(self.binding.values())

    def bound_by(self, *limits: BindingLimit) -> float:
        """Share of the micro-batches that one of these limits stopped."""
        return sum(self.binding.get(limit, 0) for limit in limits) / self.micro_batches

    @property
    def works(self) -> tuple[float, ...]:
        """Per stage, the share of the time it worked."""
        return tuple(stage.work_ns / self.elapsed_ns for stage in self.stages)

    @property
    def starved_mean(self) -> float:
        """Share of the time a stage was empty-handed, mean over stages."""
        return sum(stage.starved_ns for stage in self.stages) / (self.elapsed_ns * len(self.stages))

    @property
    def is_pressed(self) -> bool:
        """Whether somebody was left behind by every second micro-batch."""
        return self.bound_by(*PRESSING) >= PRESSED_SHARE

    @property
    def is_full(self) -> bool:
        """Whether micro-batches were at one of their widths on average; a width of 1 always is."""
        return (
            self.micro_batch_width > 1 and self.spans_mean >= FULL_SHARE * self.micro_batch_width
        ) or (self.row_width > 1 and self.rows_mean >= FULL_SHARE * self.row_width)

    @property
    def is_kv_bound(self) -> bool:
        is_full = self.kv_blocks_peak >= KV_FULL_SHARE * self.kv_blocks_total
        is_evicting = is_full and self.preemptions > KV_PREEMPTED_SHARE * self.finished
        return is_evicting or self.bound_by(BindingLimit.KV) >= KV_BOUND_SHARE


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run was like.

    Attributes:
        kind: One of eight.
        stage: The stage that holds the others back, if one does.
        evidence: Sentences with the numbers, the most important first.
    """

    kind: VerdictKind
    stage: int | None
    evidence: tuple[str, ...]


def judge(facts: RunFacts) -> Verdict:
    """Name the run's condition by the precedence at the top of this module."""
    if not facts.micro_batches or not facts.elapsed_ns:
        why = f"no micro-batch was composed; {facts.offered} requests were offered"
        return Verdict(VerdictKind.IDLE, None, (why,))
    kind, reasons = _kind(facts)
    slowest = max(range(len(facts.stages)), key=facts.works.__getitem__)
    leads = kind is VerdictKind.BOTTLENECKED or (
        kind is VerdictKind.OVERLOADED and _is_led(facts, slowest)
    )
    evidence = [*reasons, *_common(facts)]
    if facts.preemptions and kind is not VerdictKind.KV_BOUND:
        evidence.append(f"{facts.preemptions} requests lost their KV and were recomputed")
    unfinished = facts.waiting + facts.running
    if unfinished and kind is not VerdictKind.OVERLOADED:
        evidence.append(f"{unfinished} of {facts.offered} requests were unfinished at the end")
    return Verdict(kind, slowest if leads else None, tuple(evidence))


def _kind(facts: RunFacts) -> tuple[VerdictKind, list[str]]:
    works = facts.works
    slowest = max(range(len(works)), key=works.__getitem__)
    if _is_growing(facts.queue):
        return VerdictKind.OVERLOADED, _overload(facts, slowest)
    if facts.is_kv_bound:
        return VerdictKind.KV_BOUND, [_kv(facts)]
    link = _link(facts)
    if link is not None:
        return VerdictKind.LINK_BOUND, [link]
    if _is_led(facts, slowest):
        return VerdictKind.BOTTLENECKED, [_lead(works, slowest)]
    return _kind_by_demand(facts)


def _kind_by_demand(facts: RunFacts) -> tuple[VerdictKind, list[str]]:
    """The kinds of a ring in which nothing stands out: how well is it fed?"""
    least, most = min(facts.works), max(facts.works)
    work = f"stages worked {least:.1%} to {most:.1%} of the time"
    no_demand = facts.stages[0].starved_by_ns.get(Cause.NO_DEMAND, 0) / facts.elapsed_ns
    if most <= IDLE_WORK and no_demand >= IDLE_NO_DEMAND:
        return VerdictKind.IDLE, [f"{work}; the head had no request for {no_demand:.1%} of it"]
    if facts.starved_mean >= STARVED_SHARE:
        return VerdictKind.STARVED, [_starvation(facts)]
    has_spare = facts.starved_mean >= STARVED_SPARE
    unpressed = 1 - facts.bound_by(*PRESSING)
    if unpressed >= STARVED_UNPRESSED and has_spare and not facts.is_full:
        reason = f"{unpressed:.1%} of micro-batches left because nobody else was ready to join"
        return VerdictKind.STARVED, [reason, _starvation(facts)]
    fill = (
        f"micro-batches carried {facts.spans_mean:.1f} of {facts.micro_batch_width} spans and "
        f"{facts.rows_mean:.1f} of {facts.row_width} rows on average"
    )
    if facts.is_pressed or facts.is_full:
        return VerdictKind.SATURATED, [f"{fill}, and the waiting queue did not grow", work]
    return VerdictKind.BALANCED, [work, fill]


def _is_growing(queue: QueueFacts) -> bool:
    return (
        queue.grown >= max(GROWTH_REQUESTS, GROWTH_SHARE * queue.arrivals)
        and queue.later_mean >= GROWTH_RATIO * queue.earlier_mean
        and queue.occupied_share >= OCCUPIED_SHARE
    )


def _is_led(facts: RunFacts, stage: int) -> bool:
    works = facts.works
    rest = (sum(works) - works[stage]) / max(1, len(works) - 1)
    least = BOTTLENECK_WORK_PRESSED if facts.is_pressed else BOTTLENECK_WORK
    return works[stage] >= least and rest <= BOTTLENECK_REST * works[stage]


def _link(facts: RunFacts) -> str | None:
    """Why a link is the bound, if one is: by its bytes, or by its latency and credits."""
    shares = facts.link_busy_shares
    if shares:
        link = max(range(len(shares)), key=shares.__getitem__)
        most = max(facts.works)
        if shares[link] >= LINK_BUSY_SHARE and shares[link] > most:
            return (
                f"link {link} carried bytes for {shares[link]:.1%} of the time; "
                f"the busiest stage worked {most:.1%}"
            )
    for link, (sender, receiver) in enumerate(pairwise(facts.stages)):
        blocked = sender.blocked_by_credit_ns / facts.elapsed_ns
        starved = receiver.starved_by_ns.get(Cause.UPSTREAM, 0) / facts.elapsed_ns
        if blocked >= LINK_BLOCKED_SHARE and starved >= LINK_STARVED_SHARE:
            return (
                f"stage {link} waited {blocked:.1%} of the time for a credit over link {link}, "
                f"while stage {link + 1} waited {starved:.1%} for what was on its way"
            )
    return None


def _overload(facts: RunFacts, slowest: int) -> list[str]:
    queue = facts.queue
    growth = (
        f"the queue grew by {queue.grown:.1f} requests while {queue.arrivals} arrived (mean "
        f"{queue.earlier_mean:.2f} in the first half, {queue.later_mean:.2f} in the second, at "
        f"most {queue.length_max})"
    )
    left = (
        f"{facts.finished} of {facts.offered} requests finished; at the end {facts.waiting} waited "
        f"and {facts.running} ran"
    )
    when = "was still growing" if facts.waiting else "grew as long as requests arrived"
    reasons = [
        f"the waiting queue {when}: all results depend on the horizon, a longer run is worse",
        growth,
        left,
    ]
    link = _link(facts)
    if facts.is_kv_bound:
        reasons.append(f"what holds it back is KV: {_kv(facts)}")
    elif link is not None:
        reasons.append(f"what holds it back is a link: {link}")
    elif _is_led(facts, slowest):
        reasons.append(f"what holds it back is one stage: {_lead(facts.works, slowest)}")
    elif facts.starved_mean >= STARVED_SHARE:
        reasons.append(f"yet {_starvation(facts)}: look at the window and the links")
    return reasons


def _lead(works: tuple[float, ...], stage: int) -> str:
    rest = (sum(works) - works[stage]) / (len(works) - 1)
    return f"stage {stage} worked {works[stage]:.1%} of the time, the others {rest:.1%} on average"


def _kv(facts: RunFacts) -> str:
    return (
        f"KV stopped {facts.bound_by(BindingLimit.KV):.1%} of micro-batches, "
        f"{facts.kv_blocks_peak} of {facts.kv_blocks_total} blocks were in use at the peak, "
        f"and {facts.preemptions} preemptions were needed"
    )


def _starvation(facts: RunFacts) -> str:
    total = facts.elapsed_ns * len(facts.stages)
    causes = {
        cause: sum(stage.starved_by_ns.get(cause, 0) for stage in facts.stages) / total
        for cause in Cause
    }
    parts = ", ".join(
        f"{cause.value.replace('_', ' ')} {share:.1%}"
        for cause, share in causes.items()
        if share >= SHOWN_SHARE
    )
    return f"stages were empty-handed {facts.starved_mean:.1%} of the time ({parts})"


def _common(facts: RunFacts) -> list[str]:
    """What every verdict shows: the three limits that stopped most micro-batches."""
    top = sorted(facts.binding.items(), key=lambda item: (-item[1], item[0]))[:3]
    parts = ", ".join(
        f"{limit.value.replace('_', ' ')} {count / facts.micro_batches:.1%}"
        for limit, count in top
        if count >= SHOWN_SHARE * facts.micro_batches
    )
    return [f"micro-batches stopped filling because of: {parts}"]
