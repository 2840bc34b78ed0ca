"""What an outsider knows of a ring: who waits, runs, flies and holds what, and what must follow.

`NaiveState` follows the same events as the core and says which orders an event must bring. It keeps
no sums: every figure is counted anew, so that an increment forgotten in the core shows.
"""

import math
from dataclasses import dataclass, field

from kvasir_core import (
    BeginEpoch,
    Deliver,
    Epoch,
    Finish,
    FinishReason,
    LapEnded,
    MicroBatch,
    MicroBatchId,
    Nanos,
    Plan,
    Preempt,
    Refuse,
    Release,
    ReleaseEnded,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RingDecision,
    RingEvent,
    StageLost,
    StageReady,
    StageTimesMeasured,
)
from kvasir_core.window import window_for


@dataclass(eq=False, kw_only=True)
class NaiveRequest:
    id: RequestId
    order: int
    prompt: int
    output_max: int
    cached: int
    arrived_ns: int
    given: int = 0
    is_running: bool = False
    target: int = 0  # Rows of the prefill of this life.
    composed: int = 0  # Rows of this life that were launched,
    back: int = 0  # and prompt rows of it whose laps are back.
    blocks: int = 0
    ended_ns: int | None = None

    @property
    def is_decode(self) -> bool:
        return self.is_running and self.back == self.target


@dataclass(eq=False)
class NaiveState:
    plan: Plan
    now: int = 0
    epoch: Epoch = Epoch(0)
    micro_batches: int = 0
    window: int = field(init=False)
    wait_ns: int = field(init=False)  # How long a lone cohort may wait.
    requests: dict[RequestId, NaiveRequest] = field(default_factory=dict)  # The last of each id.
    past: list[NaiveRequest] = field(default_factory=list)  # Every one that was not refused.
    waiting: list[NaiveRequest] = field(default_factory=list)
    prompts: list[NaiveRequest] = field(default_factory=list)
    decodes: list[NaiveRequest] = field(default_factory=list)
    open: dict[MicroBatchId, MicroBatch] = field(default_factory=dict)
    releases: list[Release] = field(default_factory=list)  # On their way round the ring.
    releasing: dict[RequestId, int] = field(default_factory=dict)  # Their blocks.
    lost: set[int] = field(default_factory=set)
    stage_rows: dict[RequestId, int] = field(default_factory=dict)  # What a stage's KV holds.
    ended: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    offered: int = 0
    preemptions: int = 0
    rows_lost: int = 0
    blocks_peak: int = 0

    def __post_init__(self) -> None:
        self.window = 1 if self.plan.packer == "drained" else self.plan.window
        self.wait_ns = self.plan.cohort_wait_ns

    # ------------------------------------------------------------------ what can be counted

    @property
    def running(self) -> list[NaiveRequest]:
        return [r for r in self.requests.values() if r.is_running]

    @property
    def live(self) -> list[NaiveRequest]:
        return [r for r in self.requests.values() if r.ended_ns is None]

    @property
    def live_decodes(self) -> int:
        return sum(r.is_decode for r in self.running)

    @property
    def has_ready(self) -> bool:
        """Rows wait for a micro-batch."""
        return bool(self.decodes or self.prompts or self.waiting)

    @property
    def blocks_in_use(self) -> int:
        return sum(r.blocks for r in self.running) + sum(self.releasing.values())

    @property
    def blocks_free(self) -> int:
        return self.plan.kv_blocks - self.blocks_in_use

    def blocks_for(self, rows: int) -> int:
        return (rows + self.plan.kv_block - 1) // self.plan.kv_block

    def fillable(self) -> int:
        """Micro-batches that all rows known now, or all decodes, make when they are full."""
        decodes = self.live_decodes
        rows = decodes + sum(r.target - r.composed for r in self.prompts)
        rows += sum(r.prompt + r.given - r.cached for r in self.waiting)
        width = min(self.plan.micro_batch_width, self.plan.row_width)
        return max(math.ceil(decodes / width), math.ceil(rows / self.plan.row_width))

    def is_in_flight(self, request: RequestId) -> bool:
        return any(request in batch.requests for batch in self.open.values())

    def is_short(self) -> bool:
        """The longest-ready decode needs a block and there is none."""
        if not self.decodes:
            return False
        needs = self.blocks_for(self.decodes[0].composed + 1) > self.decodes[0].blocks
        return needs and not self.blocks_free

    def could_be_admitted(self) -> bool:
        if not self.waiting:
            return False
        first, running = self.waiting[0], len(self.running)
        blocks = self.blocks_for(first.prompt + first.given)
        has_room = blocks + running <= self.blocks_free and running < self.plan.running_max
        return has_room and first.id not in self.releasing

    # ------------------------------------------------------------------ what an event must bring

    def expect(self, event: RingEvent, now: Nanos) -> list[RingDecision]:
        """Follow the event; the orders with which the core's answer must begin."""
        self.now = now
        match event:
            case RequestArrived():
                return self._arrive(event)
            case RequestCancelled(request, reason):
                return self._cancel(self.requests[request], reason)
            case LapEnded() if event.epoch == self.epoch:
                return self._lap(event)
            case ReleaseEnded(requests, epoch) if epoch == self.epoch:
                for request in requests:
                    del self.releasing[request]
            case StageLost(stage):
                return self._lose(stage)
            case StageReady(stage):
                self.lost.remove(stage)
            case StageTimesMeasured(holds):
                self.wait_ns = min(self.plan.cohort_wait_ns, max(holds) // 4)
                if self.plan.window_auto and self.plan.packer != "drained":
                    self.window = min(window_for(event, self.fillable()), self.plan.window_max)
            case _:
                pass
        return []

    def _arrive(self, event: RequestArrived) -> list[RingDecision]:
        id_, prompt, output, cached = event
        self.offered += 1
        positions = prompt + output
        if positions > self.plan.context:
            numbers = positions, self.plan.context
        elif self.blocks_for(positions) > self.plan.kv_blocks:
            numbers = self.blocks_for(positions), self.plan.kv_blocks
        else:
            request = NaiveRequest(
                id=id_, order=self.offered, prompt=prompt, output_max=output, cached=cached,
                arrived_ns=self.now,
            )  # fmt: skip
            self.requests[id_] = request
            self.past.append(request)
            self.waiting.append(request)
            return []
        self.ended[FinishReason.REFUSED] += 1
        why = self.plan.why_never(positions)
        assert all(str(number) in why for number in numbers)
        return [Refuse(id_, why)]

    def _cancel(self, request: NaiveRequest, reason: FinishReason) -> list[RingDecision]:
        for place in (self.waiting, self.prompts, self.decodes):
            if request in place:
                place.remove(request)
        return self._end([(request, reason)])

    def _lap(self, event: LapEnded) -> list[RingDecision]:
        batch = self.open.pop(event.micro_batch)
        tokens: list[NaiveRequest] = []
        for span in batch.spans:
            request = self.requests[span.request]
            if request.ended_ns is not None:
                continue
            if not span.is_decode:
                request.back += span.rows
                if self.plan.packer == "sarathi" and not span.has_output:
                    self.prompts.append(request)
            if span.has_output:
                # R15: its next token and no other, in whichever life it is.
                assert span.start + span.rows == request.prompt + request.given
                request.given += 1
                tokens.append(request)
        if not tokens:
            return []
        ended = []
        for request in tokens:
            if request.id in event.stopped:
                ended.append((request, FinishReason.STOP))
            elif request.given == request.output_max:
                ended.append((request, FinishReason.LENGTH))
            else:
                self.decodes.append(request)
        delivery = Deliver(batch.id, tuple(request.id for request in tokens))
        return [delivery, *(self._end(ended) if ended else [])]

    def _end(self, ended: list[tuple[NaiveRequest, FinishReason]]) -> list[RingDecision]:
        orders: list[RingDecision] = []
        had_kv = [request for request, _ in ended if request.is_running]
        for request, reason in ended:
            assert request.ended_ns is None, "a request ends once"
            request.ended_ns = self.now
            self.ended[reason] += 1
            orders.append(Finish(request.id, reason))
        return orders + (self._release(had_kv) if had_kv else [])

    def _release(self, requests: list[NaiveRequest]) -> list[RingDecision]:
        for request in requests:
            self.releasing[request.id] = request.blocks
            request.blocks = 0
            request.is_running = False
            self.stage_rows.pop(request.id)
        order = Release(tuple(request.id for request in requests), self.epoch)
        self.releases.append(order)
        return [order]

    def _lose(self, stage: int) -> list[RingDecision]:
        self.lost.add(stage)
        self.epoch = Epoch(self.epoch + 1)
        running = sorted(self.running, key=lambda request: request.order)
        orders: list[RingDecision] = [BeginEpoch(self.epoch, tuple(sorted(self.lost)))]
        orders += [self._back_to_waiting(request) for request in running]
        for request in running:
            request.blocks = 0
        self.waiting = running + self.waiting
        for request in self.waiting:
            request.cached = 0
        for place in (self.open, self.releases, self.releasing, self.stage_rows, self.prompts):
            place.clear()
        self.decodes.clear()
        return orders

    def _back_to_waiting(self, request: NaiveRequest) -> Preempt:
        order = Preempt(request.id, request.composed)
        self.preemptions += 1
        self.rows_lost += request.composed
        request.is_running = False
        request.target = request.composed = request.back = request.cached = 0
        return order
