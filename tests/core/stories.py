"""Words for stories: a ring, and a list of (event, the decisions it must bring).

A story's expected micro-batches are written span by span, so that the columns of `MicroBatch` are
computed here a second time and compared with the core's.
"""

from collections.abc import Sequence

from kvasir_core import (
    BeginEpoch,
    BindingLimit,
    Deliver,
    Epoch,
    Finish,
    FinishReason,
    LapEnded,
    Launch,
    MicroBatch,
    MicroBatchId,
    Nanos,
    Plan,
    Preempt,
    Release,
    ReleaseEnded,
    RequestArrived,
    RequestCancelled,
    RequestId,
    Ring,
    RingDecision,
    RingEvent,
    Span,
    StageLost,
    StageReady,
    StageTimesMeasured,
)
from kvasir_core.queues import Predict

Step = tuple[RingEvent, list[RingDecision]]


def plan_of(
    packer: str = "cohort",
    *,
    stages: int = 2,
    row_width: int = 4,
    micro_batch_width: int = 4,
    window: int = 1,
    window_max: int | None = None,
    window_auto: bool = False,
    running_max: int = 64,
    context: int = 64,
    kv_tokens: int | Sequence[int] = 4096,
    kv_block: int = 4,
    chunked_prefill: bool = True,
    prefill_rows_max: int | None = None,
    cohort_wait_ns: int = 0,
) -> Plan:
    """A small plan: widths of 4, KV that does not bind, no wait for a lone cohort."""
    if isinstance(kv_tokens, int):
        kv_tokens = (kv_tokens,) * stages
    return Plan(
        layers=tuple((k, k + 1) for k in range(stages)),
        row_width=row_width,
        micro_batch_width=micro_batch_width,
        window=window,
        window_max=window if window_max is None else window_max,
        window_auto=window_auto,
        running_max=running_max,
        context=context,
        kv_tokens=tuple(kv_tokens),
        kv_block=kv_block,
        packer=packer,
        chunked_prefill=chunked_prefill,
        prefill_rows_max=prefill_rows_max,
        cohort_wait_ns=cohort_wait_ns,
    )


def ring_of(plan: Plan, *before: RingEvent, predict: Predict | None = None) -> Ring:
    """A ring after some events whose decisions the story does not look at."""
    ring = Ring(plan, predict=predict)
    for event in before:
        tell(ring, event)
    return ring


def tell(ring: Ring, event: RingEvent, after_ns: int = 1) -> list[RingDecision]:
    """One event, a nanosecond after the last; the full check after it."""
    orders = ring.handle(event, Nanos(ring.now + after_ns))
    ring.check()
    return orders


def check(ring: Ring, *story: Step) -> None:
    """Play the story."""
    for number, (event, expected) in enumerate(story):
        assert tell(ring, event) == expected, f"step {number}: {event}"


def arrived(request: int, prompt: int = 1, output: int = 2, cached: int = 0) -> RingEvent:
    return RequestArrived(RequestId(request), prompt, output, cached)


def arrivals(requests: Sequence[int], prompt: int = 1, output: int = 2) -> list[RingEvent]:
    return [arrived(request, prompt, output) for request in requests]


def lap(micro_batch: int, *stopped: int, epoch: int = 0) -> RingEvent:
    return LapEnded(MicroBatchId(micro_batch), Epoch(epoch), ids(stopped))


def released(*requests: int, epoch: int = 0) -> RingEvent:
    return ReleaseEnded(ids(requests), Epoch(epoch))


def cancelled(request: int, reason: FinishReason = FinishReason.CANCELLED) -> RingEvent:
    return RequestCancelled(RequestId(request), reason)


def lost(stage: int) -> RingEvent:
    return StageLost(stage)


def ready(stage: int) -> RingEvent:
    return StageReady(stage)


def measured(
    holds: Sequence[int], links: Sequence[int], turnaround: int = 0, jitter: int = 0
) -> RingEvent:
    return StageTimesMeasured(
        tuple(map(Nanos, holds)), tuple(map(Nanos, links)), Nanos(turnaround), Nanos(jitter)
    )


def dec(request: int, position: int) -> Span:
    """A decode: the row at `position` goes in, the token after it comes out."""
    return Span(RequestId(request), position, 1, is_decode=True, has_output=True)


def chunk(request: int, start: int, stop: int) -> Span:
    """Prompt rows `[start, stop)` with more to come."""
    return Span(RequestId(request), start, stop - start, is_decode=False, has_output=False)


def last(request: int, start: int, stop: int) -> Span:
    """Prompt rows `[start, stop)` that end the prompt."""
    return chunk(request, start, stop)._replace(has_output=True)


def launch(
    number: int,
    *spans: Span,
    why: BindingLimit = BindingLimit.NOTHING_WAITING,
    epoch: int = 0,
) -> RingDecision:
    """The order to submit exactly these spans."""
    decodes = [span for span in spans if span.is_decode]
    return Launch(
        MicroBatch(
            id=MicroBatchId(number),
            epoch=Epoch(epoch),
            requests=tuple(span.request for span in spans),
            starts=tuple(span.start for span in spans),
            rows=tuple(span.rows for span in spans),
            decodes=len(decodes),
            completing=tuple(
                k for k, span in enumerate(spans) if span.has_output and not span.is_decode
            ),
            row_count=sum(span.rows for span in spans),
            decode_context=sum(span.start + 1 for span in decodes),
            binding=why,
        )
    )


def deliver(micro_batch: int, *requests: int) -> RingDecision:
    return Deliver(MicroBatchId(micro_batch), ids(requests))


def finish(request: int, reason: FinishReason = FinishReason.LENGTH) -> RingDecision:
    return Finish(RequestId(request), reason)


def release(*requests: int, epoch: int = 0) -> RingDecision:
    return Release(ids(requests), Epoch(epoch))


def preempt(request: int, rows_lost: int) -> RingDecision:
    return Preempt(RequestId(request), rows_lost)


def begin_epoch(epoch: int, *stages: int) -> RingDecision:
    return BeginEpoch(Epoch(epoch), stages)


def ids(requests: Sequence[int]) -> tuple[RequestId, ...]:
    return tuple(map(RequestId, requests))


def launches(orders: Sequence[RingDecision]) -> list[MicroBatch]:
    """The micro-batches among some orders."""
    return [order.micro_batch for order in orders if isinstance(order, Launch)]
