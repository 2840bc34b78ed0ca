"""The ring's head: which rows enter the ring, when, and what comes of what returns.

Theory of operation. Requests wait in order of arrival. Whenever a window place is free the packer
composes a micro-batch from requests whose next rows can be computed now, and the ring *launches*
it; its membership is frozen and every stage replays it. When its lap ends the output rows become
tokens, and those requests are ready again. Prompt chunks follow each other without waiting; a
decode waits for its token. Ended or preempted requests are *released* by a message that travels
behind the micro-batches in the ring, and only its return frees their KV blocks here.

Invariants, the cheap ones asserted after every event, all of them by `check`:
  1. A live request is in one place: waiting, or running; running ones are ready or in flight.
  2. Blocks: free + held by running + held by releasing = total.
  3. Spans and rows of a micro-batch never exceed the plan's widths, open ones never the window.
  4. Offered = waiting + running + ended, by every reason.
All events go through `handle`: validate first, change after. Absent by design: clocks, chance, I/O,
token values, stage speeds; those belong to the shells.
"""

from bisect import insort
from collections.abc import Callable
from typing import Any

from kvasir_core.causes import Cause, CauseClock
from kvasir_core.decisions import (
    BeginEpoch,
    Deliver,
    Finish,
    Launch,
    Preempt,
    Refuse,
    Release,
    RingDecision,
)
from kvasir_core.errors import IllegalEvent, PlanError
from kvasir_core.events import (
    LapEnded,
    ReleaseEnded,
    RequestArrived,
    RequestCancelled,
    RingEvent,
    StageLost,
    StageReady,
    StageTimesMeasured,
    TimePassed,
)
from kvasir_core.microbatch import FinishReason, MicroBatch
from kvasir_core.packers import PACKERS, is_lone
from kvasir_core.plan import Plan
from kvasir_core.queues import Composition, Predict, Queues, by_order, is_running
from kvasir_core.request import Request
from kvasir_core.statistics import RingStatistics, Tally
from kvasir_core.units import Epoch, MicroBatchId, Nanos, RequestId, make
from kvasir_core.window import window_for

Orders = list[RingDecision]

WAIT_HOLDS = 4  # A cohort waits for a quarter of the longest hold at most: fast rings wait less.

# On the hot path: before Python 3.12 an enum's member is ten times as slow to reach as a name.
NO_DEMAND, DEPENDENCY, CAPACITY = Cause.NO_DEMAND, Cause.DEPENDENCY, Cause.CAPACITY


class Ring:
    """The scheduler of one ring. See the module's essay; `handle` is the only way to change it."""

    def __init__(self, plan: Plan, *, predict: Predict | None = None) -> None:
        """Start an empty ring at time 0.

        Args:
            plan: The ring's fixed numbers.
            predict: Longest stage hold (ns) of a micro-batch, for `cohort`'s chunk; never falling
                with rows.

        Raises:
            PlanError: The plan names an unknown packer.
        """
        if plan.packer not in PACKERS:
            raise PlanError(f"packer is {plan.packer!r}; it must be one of {sorted(PACKERS)}")
        self.plan = plan
        self._kv_blocks = plan.kv_blocks
        self.now = Nanos(0)
        self.epoch = Epoch(0)
        self.causes = CauseClock()
        self._packer = PACKERS[plan.packer]
        self._queues = Queues(
            plan=plan,
            window=1 if plan.packer == "drained" else plan.window,
            predict=predict,
            blocks_free=plan.kv_blocks,
            flies_one_chunk=plan.packer == "sarathi",
        )
        self._requests: dict[RequestId, Request] = {}  # Live ones.
        self._open: dict[MicroBatchId, tuple[MicroBatch, list[Request]]] = {}
        self._lost: list[int] = []
        self._may_wait = plan.packer == "cohort" and plan.cohort_wait_ns > 0
        self._wait_ns = plan.cohort_wait_ns
        self._wait_until: Nanos | None = None  # A lone cohort fills until then.
        self._tally = Tally()
        self._handlers: dict[type, Callable[[Any], Orders]] = {
            LapEnded: self._lap_ended,
            RequestArrived: self._request_arrived,
            ReleaseEnded: self._release_ended,
            RequestCancelled: self._request_cancelled,
            StageTimesMeasured: self._stage_times_measured,
            StageLost: self._stage_lost,
            StageReady: self._stage_ready,
            TimePassed: lambda _: [],
        }

    def handle(self, event: RingEvent, now: Nanos) -> Orders:
        """Take in one event; return the orders the shell must carry out, in that order.

        Args:
            event: What happened.
            now: When, in nanoseconds of the shell's monotonic clock; never before the last event.

        Raises:
            IllegalEvent: It cannot have happened now. The state is unchanged.
        """
        passed = now - self.now
        if passed < 0:
            raise IllegalEvent(f"{event} at {now} ns is before the last event at {self.now} ns")
        in_system = len(self._requests)
        orders = self._handlers[type(event)](event)
        self._tally.in_system_ns += in_system * passed
        self.now = now
        queues = self._queues
        if queues.decodes or queues.prompts or queues.waiting:
            self._launch(orders)
        else:
            self._wait_until = None
        self._note_cause()
        plan, running = self.plan, queues.running
        assert 0 <= queues.blocks_free <= self._kv_blocks
        assert 0 <= queues.live_decodes <= running <= plan.running_max
        assert running + len(queues.waiting) == len(self._requests)
        assert len(self._open) == queues.open_count <= plan.window_max
        return orders

    def next_wakeup(self) -> Nanos | None:
        """When to send `TimePassed` at the latest, or None."""
        return self._wait_until

    @property
    def is_idle(self) -> bool:
        """No request is live and every block is free."""
        return not self._requests and self._queues.blocks_free == self.plan.kv_blocks

    def is_live(self, request: RequestId) -> bool:
        """Whether the request waits or runs."""
        return request in self._requests

    @property
    def open(self) -> list[MicroBatch]:
        """Micro-batches in the ring, in the head's order."""
        return [batch for batch, _ in self._open.values()]

    def _request_arrived(self, event: RequestArrived) -> Orders:
        id_, prompt, output_max, cached = event
        self._require(id_ not in self._requests and id_ not in self._queues.releasing, event)
        self._require(0 <= cached < prompt and output_max >= 1, event)
        order = self._tally.offered
        self._tally.offered += 1
        length_max = prompt + output_max
        why = self.plan.why_never(length_max)
        if why:
            self._tally.ended[FinishReason.REFUSED] += 1
            return [Refuse(id_, why)]
        request = Request(
            id=id_, order=order, length=prompt, length_max=length_max, target=prompt,
            scheduled=cached, returned=cached,
        )  # fmt: skip
        self._requests[id_] = request
        self._queues.waiting.append(request)
        return []

    def _lap_ended(self, event: LapEnded) -> Orders:
        id_, epoch, stopped = event
        if epoch < self.epoch:
            return []  # A late frame of an epoch that is over.
        flight = self._open.get(id_)
        if flight is None or epoch != self.epoch:
            raise self._illegal(event)
        batch, members = flight
        decodes = batch.decodes
        tokens = members  # Who gets one, if still live.
        if decodes < len(members):
            for start, request in zip(batch.starts[decodes:], members[decodes:], strict=True):
                # Chunks of one prompt never overtake each other, however stages overlap.
                self._require(start == request.returned or not request.is_live, event)
        if stopped:
            self._require(set(stopped) <= set(batch.outputs), event)
        del self._open[id_]
        queues = self._queues
        queues.open_count -= 1
        if decodes < len(members):
            chunks = zip(members[decodes:], batch.rows[decodes:], strict=True)
            tokens = members[:decodes]
            tokens += [request for request, rows in chunks if self._chunk_returned(request, rows)]
        ended: list[tuple[Request, FinishReason]] = []
        is_whole = tokens is members  # Everyone in it gets a token.
        ready = queues.decodes
        for request in tokens:
            request.in_flight = 0
            if not request.is_live:
                is_whole = False
                continue  # It ended meanwhile: the token is late.
            request.length = length = request.length + 1
            if stopped and request.id in stopped:
                ended.append((request, FinishReason.STOP))
            elif length == request.length_max:
                ended.append((request, FinishReason.LENGTH))
            else:
                ready.append(request)
        delivered = batch.requests
        if not is_whole:
            delivered = tuple([request.id for request in tokens if request.is_live])
        orders: Orders = [make(Deliver, (id_, delivered))] if delivered else []
        if ended:
            self._end(ended, orders)
        return orders

    def _chunk_returned(self, request: Request, rows: int) -> bool:
        """Account a prompt chunk; True if it ended the prompt, so that its last row is a token."""
        request.in_flight -= 1
        if not request.is_live:
            return False
        request.returned += rows
        if request.returned == request.target:
            self._queues.live_decodes += 1
            return True
        if self._queues.flies_one_chunk:
            self._queues.prompts.append(request)
        return False

    def _release_ended(self, event: ReleaseEnded) -> Orders:
        if event.epoch < self.epoch:
            return []
        self._require(event.epoch == self.epoch, event)
        self._require(len(set(event.requests)) == len(event.requests), event)
        for id_ in event.requests:
            request = self._queues.releasing.get(id_)
            self._require(request is not None and not request.in_flight, event)
        for id_ in event.requests:
            self._queues.released(id_)
        return []

    def _request_cancelled(self, event: RequestCancelled) -> Orders:
        request = self._requests.get(event.request)
        self._require(request is not None, event)
        self._require(event.reason not in {FinishReason.LENGTH, FinishReason.REFUSED}, event)
        assert request is not None
        orders: Orders = []
        if request.is_running:
            self._queues.unlist(request)
            self._end([(request, event.reason)], orders)
        else:
            self._queues.waiting.remove(request)
            self._forget(request, event.reason)
            orders.append(Finish(request.id, event.reason))
        return orders

    def _stage_times_measured(self, event: StageTimesMeasured) -> Orders:
        self._require(len(event.holds) == len(event.links) == self.plan.stages, event)
        self._require(min(*event.holds, *event.links, event.turnaround, event.jitter) >= 0, event)
        if self.plan.window_auto and self.plan.packer != "drained":
            self._queues.window = min(
                window_for(event, self._queues.fillable), self.plan.window_max
            )
        self._wait_ns = min(self.plan.cohort_wait_ns, max(event.holds) // WAIT_HOLDS)
        return []

    def _stage_lost(self, event: StageLost) -> Orders:
        """Every stage drops all KV: what the lost one held must be recomputed through all."""
        self._require(0 <= event.stage < self.plan.stages, event)
        queues = self._queues
        if event.stage not in self._lost:
            insort(self._lost, event.stage)
        self.epoch = Epoch(self.epoch + 1)
        self._open.clear()
        orders: Orders = [BeginEpoch(self.epoch, tuple(self._lost))]
        for request, rows_lost in queues.drop_all(self._requests.values()):
            orders.append(self._preempted(request, rows_lost))
        return orders

    def _stage_ready(self, event: StageReady) -> Orders:
        self._require(event.stage in self._lost, event)
        self._lost.remove(event.stage)
        return []

    def _end(self, ended: list[tuple[Request, FinishReason]], orders: Orders) -> None:
        """End running requests that are in no ready list; their KV goes with one release."""
        for request, reason in ended:
            self._queues.stop_running(request)
            self._forget(request, reason)
            orders.append(Finish(request.id, reason))
        orders.append(Release(tuple(request.id for request, _ in ended), self.epoch))

    def _forget(self, request: Request, reason: FinishReason) -> None:
        request.is_live = False
        del self._requests[request.id]
        self._tally.ended[reason] += 1

    def _preempted(self, request: Request, rows_lost: int) -> Preempt:
        self._tally.preemptions += 1
        self._tally.rows_recomputed += rows_lost
        return Preempt(request.id, rows_lost)

    def _relieve_kv(self, orders: Orders) -> bool:
        """The longest-ready decode lacks a block: the youngest gives its own, unless one is coming.

        Progress is certain: the oldest running request is never the victim while another runs, and
        alone it fits (checked when it arrived). A victim in flight is taken when its lap ends.
        """
        queues = self._queues
        if queues.releasing or queues.growable(1):
            return False
        victim = max(filter(is_running, self._requests.values()), key=by_order)
        if victim.in_flight:
            return False
        orders.append(self._preempted(victim, queues.preempt(victim)))
        orders.append(Release((victim.id,), self.epoch))
        return True

    def _launch(self, orders: Orders) -> None:
        """Compose micro-batches while a window place is free and the packer finds rows."""
        queues, packer, tally = self._queues, self._packer, self._tally
        while queues.open_count < queues.window and not self._lost:
            composition = packer(queues)
            decodes, chunks, _, is_short = composition
            if decodes or chunks:
                if self._may_wait and self._should_wait(composition):
                    return
                id_ = MicroBatchId(tally.micro_batches)
                tally.micro_batches += 1
                self._open[id_] = flight = queues.take(composition, id_, self.epoch)
                orders.append(make(Launch, (flight[0],)))
            # The victim may have stood before decodes that have room.
            is_relieved = is_short and self._relieve_kv(orders)
            if not (decodes or chunks or is_relieved):
                break
            if not (queues.decodes or queues.prompts or queues.waiting):
                break
        self._wait_until = None

    def _should_wait(self, composition: Composition) -> bool:
        if not is_lone(self._queues, composition):
            return False
        if self._wait_until is None:
            self._wait_until = Nanos(self.now + self._wait_ns)
        return self.now < self._wait_until

    def _note_cause(self) -> None:
        """Why the head cannot compose another micro-batch now; a starved stage inherits it."""
        queues = self._queues
        if queues.decodes or queues.prompts or queues.waiting:
            cause = CAPACITY if self._wait_until is None else DEPENDENCY
            if cause is CAPACITY and queues.open_count >= queues.window:
                self._tally.window_stalls += 1
        elif queues.running:
            cause = DEPENDENCY
            self._tally.dependency_stalls += 1
        else:
            cause = NO_DEMAND
        if cause is not self.causes.cause:
            self.causes.switch(cause, self.now)

    @property
    def load(self) -> tuple[int, int, int]:
        """Requests waiting, requests running, KV blocks in use: cheap enough for every lap."""
        queues = self._queues
        return len(queues.waiting), queues.running, self._kv_blocks - queues.blocks_free

    def statistics(self) -> RingStatistics:
        """Counts at the time of the last event."""
        return self._tally.statistics(self.now, self.epoch, self._queues, tuple(self._lost))

    def check(self) -> None:
        """Assert every invariant in full; O(live requests)."""
        flying = [r for _, members in self._open.values() for r in members if r.is_live]
        self._queues.check(list(self._requests.values()), flying)
        ended = sum(self._tally.ended.values())
        assert self._tally.offered == len(self._queues.waiting) + self._queues.running + ended

    def _require(self, legal: bool, event: RingEvent) -> None:
        if not legal:
            raise self._illegal(event)

    def _illegal(self, event: RingEvent) -> IllegalEvent:
        return IllegalEvent(f"{event} cannot happen after {self.now} ns in epoch {self.epoch}")
