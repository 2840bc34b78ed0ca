"""The ring's driver: what stages report becomes events, what the core decides becomes messages.

It holds each live request's history (prompt and tokens given), so it can tell the head the token
ids of any row, and replay a request from position 0 after a stage was lost. One thread, the
engine's, uses it.
"""

import contextlib
import logging
import threading
import time
from operator import sub
from pathlib import Path
from typing import TextIO

from kvasir_core import eventlog
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
from kvasir_core.errors import KvasirError
from kvasir_core.events import (
    LapEnded,
    ReleaseEnded,
    RequestArrived,
    RequestCancelled,
    RingEvent,
    StageLost,
    StageReady,
    TimePassed,
)
from kvasir_core.microbatch import FinishReason
from kvasir_core.ring import Ring
from kvasir_core.statistics import RingStatistics
from kvasir_core.units import MicroBatchId, Nanos, RequestId
from kvasir_rt import frames, wire
from kvasir_rt.laps import STAMPS, Flight, LapMeter
from kvasir_rt.live import Live, lap_of
from kvasir_rt.member import Loss
from kvasir_rt.overlap_laps import Interval, OverlapLapMeter, stretches_of
from kvasir_rt.recording import RingRecorder
from kvasir_rt.ring_errors import WireError
from kvasir_rt.submission import EndEvent, EngineEvent, Submission, TokenEvent
from kvasir_rt.switchboard import Switchboard, Turn
from kvasir_scenario.run_dir import named_output

HOLDS_FIRST = 8
HOLD_SAMPLING = 7  # Later holds: prime, so that every place of the window has its turn.
STALL_NS = 30_000_000_000  # Micro-batches are open and nobody has one: frames were lost.

log = logging.getLogger("kvasir.ring")


class Driver:
    """Drives `ring` over `lines`.

    Attributes:
        recorder: Told of everything, if set.
        live: Requests that have not ended.
        down_why: Why the ring serves no more; empty while it does.
        is_up: Set when all stages were wired for the first time.
    """

    def __init__(self, ring: Ring, lines: Switchboard) -> None:
        self.ring = ring
        self.recorder: RingRecorder | None = None
        self.log: TextIO | None = None
        overlap = lines.crew.options.overlap
        self.meter = OverlapLapMeter(ring.plan, overlap) if overlap else LapMeter(ring.plan)
        self.live: dict[RequestId, Live] = {}
        self.down_why = ""
        self.is_up = threading.Event()
        self.laps = 0
        self.tokens = 0
        self._lines = lines
        self._zero = time.monotonic_ns()
        self._open: dict[MicroBatchId, Flight] = {}
        self._losing: set[int] = set()  # Lost and not reported ready yet.
        self._rows: dict[RequestId, frames.ResultRow] = {}  # Of the lap that is being taken in.
        self._pending: tuple[Flight, list[int], tuple[int, ...]] | None = None
        self._detail = ""  # Of the request that is being ended.
        self._quiet_since: int | None = None
        self._lost_now: set[int] = set()  # In this round.
        self._deaf: list[RequestId] = []  # Their client's callback failed.

    def now(self) -> Nanos:
        """Time since the ring was first ready."""
        return Nanos(time.monotonic_ns() - self._zero)

    @property
    def is_ready(self) -> bool:
        return self.is_up.is_set() and not self._losing and not self.down_why

    @property
    def is_ring_empty(self) -> bool:
        """Whether no stage can hold anything."""
        return not self._open and self.is_up.is_set()

    def take_in(self, turn: Turn) -> None:
        """Everything that one round of polling brought, and what time has brought.

        Raises:
            RingDown: Too many stages were lost.
        """
        self._lost_now.clear()
        for result, body in turn.results:
            self._take_result(result, body)
        for release in turn.releases:
            if release.epoch == self.ring.epoch:
                self._tell(ReleaseEnded(release.requests, release.epoch))
        while self._deaf:
            self.cancel(self._deaf.pop(), FinishReason.FAILED)
        for loss in turn.losses:
            self._lose(loss)
        if turn.became_wired:
            self._become_ready()
        wakeup = self.ring.next_wakeup()
        if wakeup is not None and self.now() >= wakeup:
            self._tell(TimePassed())
        if turn.is_check_due:
            self._watch_for_stall()

    def stop_recording(self) -> tuple[Nanos, RingStatistics]:
        """Account everything up to now, let the recorder go, and say when that was."""
        self._tell(TimePassed())
        if self.recorder is not None:
            for flight in self._open.values():
                self.recorder.lost(flight.micro_batch, flight.composed, self.ring.now, [])
        self.recorder = None
        return self.ring.now, self.ring.statistics()

    # ------------------------------------------------------------------ requests

    def arrive(self, submission: Submission, why_closed: str = "") -> None:
        """A request came; it fails at once if the ring is down or closed for new ones."""
        request = RequestId(submission.request_id)
        refusal = self.down_why or why_closed
        if refusal or request in self.live:
            why = refusal or f"request id {request} is in use"
            self._emit(submission, EndEvent(request, FinishReason.FAILED, why))
            return
        self.live[request] = Live(submission, list(submission.prompt_ids))
        prompt = len(submission.prompt_ids)
        now = self.now()
        if self.recorder is not None:
            self.recorder.offered(request, now, prompt)
        self._tell(RequestArrived(request, prompt, submission.output_tokens_max), now)

    def cancel(self, request: RequestId, reason: FinishReason, detail: str = "") -> None:
        """End a request early; nothing happens if it has ended."""
        if request in self.live:
            self._detail = detail
            self._tell(RequestCancelled(request, reason))
            self._detail = ""

    def _end(self, request: RequestId, reason: FinishReason, detail: str = "") -> None:
        live = self.live.pop(request)
        self._emit(live.submission, EndEvent(request, reason, detail))

    def _emit(self, submission: Submission, event: EngineEvent) -> None:
        try:
            submission.on_event(event)
        except Exception:
            log.exception("a client's event callback failed")
            request = RequestId(submission.request_id)
            if request in self.live:
                self._deaf.append(request)

    # ------------------------------------------------------------------ events and decisions

    def _write_down(self, event: RingEvent, now: Nanos, log_file: TextIO) -> None:
        try:
            print(eventlog.encode(event, now), file=log_file)
        except OSError:
            self.log = None  # What follows cannot be written either, and is told all the same.
            with contextlib.suppress(OSError):
                log_file.close()
            with named_output(Path(log_file.name)):
                raise

    def _tell(self, event: RingEvent, now: Nanos | None = None) -> list[RingDecision]:
        now = self.now() if now is None else now
        decisions = self.ring.handle(event, now)
        self.meter.causes.switch(self.ring.causes.cause, now)
        if self.log is not None:
            self._write_down(event, now, self.log)
        delivered: tuple[RequestId, ...] = ()
        for decision in decisions:
            if isinstance(decision, Deliver):
                delivered = decision.requests
            self._obey(decision, now)
        self._record_lap(delivered, now)
        return decisions

    def _obey(self, decision: RingDecision, now: Nanos) -> None:
        recorder = self.recorder
        match decision:
            case Deliver(_, requests):
                self._deliver(requests)
            case Launch(batch):
                self._open[batch.id] = Flight(batch, now, now)
                self._lines.submit(lap_of(batch, self.live, composed=now + self._zero))
            case Finish(request, reason):
                if recorder is not None:
                    recorder.finished(request, now, reason)
                self._end(request, reason, self._detail or self.down_why)
            case Release(requests, epoch):
                if not self.down_why:
                    self._lines.submit(wire.Release(epoch, requests))
            case Refuse(request, why):
                if recorder is not None:
                    recorder.refused(request, now)
                self._end(request, FinishReason.REFUSED, why)
            case Preempt(request, _):
                if recorder is not None:
                    recorder.preempted(request)
            case BeginEpoch(epoch, _):
                if recorder is not None:
                    for flight in self._open.values():
                        recorder.lost(flight.micro_batch, flight.composed, now, [])
                self._open.clear()
                if isinstance(self.meter, OverlapLapMeter):
                    self._record_spent(self.meter.begin_epoch())
                self._lines.begin_epoch(epoch)

    def _deliver(self, requests: tuple[RequestId, ...]) -> None:
        for request in requests:
            live, row = self.live[request], self._rows[request]
            assert row.token is not None
            live.history.append(row.token)
            event = TokenEvent(request, row.token, row.logprob, row.top, live.tokens)
            live.tokens += 1
            self._emit(live.submission, event)
        self.tokens += len(requests)

    # ------------------------------------------------------------------ laps

    def _take_result(self, result: wire.Result, body: memoryview) -> None:
        if result.epoch != self.ring.epoch:
            return  # An earlier result of this round has ended the epoch.
        flight = self._open.pop(MicroBatchId(result.id), None)
        try:
            if flight is None:
                raise WireError(f"a result came for micro-batch {result.id}, which is not open")
            batch, composed, _ = flight
            outputs = batch.outputs
            rows = frames.unpack_rows(body, len(outputs))
            submitted = max(self._lines.take_submitted(batch.id) - self._zero, composed)
        except WireError as error:
            self._lose(Loss(self.ring.plan.stages - 1, str(error), is_dead=True))
            return
        self._rows = dict(zip(outputs, rows, strict=True))
        stopped: tuple[RequestId, ...] = ()
        for request, row in self._rows.items():
            if row.token is None:  # Before the lap ends, so that no token is counted.
                self.cancel(request, FinishReason.FAILED, "the model's logits are not finite")
            elif (live := self.live.get(request)) and row.token in live.submission.stop_ids:
                stopped = (*stopped, request)
        self.laps += 1
        self._quiet_since = None
        stamps = self._stamps_here(result.stamps, batch.row_count)
        self._pending = Flight(batch, composed, submitted), stamps, result.spent
        self._tell(LapEnded(batch.id, result.epoch, stopped))
        measured = self.meter.measured()
        if measured is not None and self.ring.plan.wants_stage_times:
            self._tell(measured)

    def _record_lap(self, delivered: tuple[RequestId, ...], now: Nanos) -> None:
        """Account the lap whose end was just told; its time is when the core heard of it."""
        if self._pending is None:
            return
        (flight, stamps, spent), self._pending = self._pending, None
        recorder = self.recorder
        if isinstance(self.meter, OverlapLapMeter):
            shifts = [member.clock_offset_ns + self._zero for member in self._lines.crew.members]
            stretches = stretches_of(spent, shifts, self._zero)
            self._record_spent(self.meter.take(flight, now, stamps, stretches))
        else:
            self.meter.add(flight, now, stamps)
        if recorder is None:
            self.ring.causes.drain_before(now)
            return
        recorder.lap(flight.micro_batch, flight.composed, now, delivered, stamps)
        state = self.ring.statistics()
        recorder.sample(now, state.waiting, state.running, state.kv_blocks_in_use)

    def _record_spent(self, intervals: list[Interval]) -> None:
        if self.recorder is not None:
            for interval in intervals:
                self.recorder.spent(*interval)

    def _stamps_here(self, stamps: tuple[int, ...], rows: int) -> list[int]:
        """Stamps on the engine's clock: each stage's offset and our zero taken off."""
        members = self._lines.crew.members
        if not self.laps % HOLD_SAMPLING or self.laps < HOLDS_FIRST:
            for member in members:
                at = STAMPS * member.stage
                member.holds.append((stamps[at + 2] - stamps[at + 1], rows))
        zero = self._zero
        if not any(member.clock_offset_ns for member in members):
            return [stamp - zero for stamp in stamps]
        shifts = [member.clock_offset_ns + zero for member in members for _ in range(STAMPS)]
        return list(map(sub, stamps, shifts))

    def _lose(self, loss: Loss) -> None:
        if loss.stage in self._lost_now:
            return  # Found in two ways at once; its successor must live.
        self._lost_now.add(loss.stage)
        why = self._lines.lose(loss)
        log.warning("stage %d lost: %s", loss.stage, why)
        self._losing.add(loss.stage)
        self._tell(StageLost(loss.stage))

    def _become_ready(self) -> None:
        if not self.is_up.is_set():
            if not self.ring.now:  # Time begins when the ring can serve.
                self._zero = time.monotonic_ns()
            self.is_up.set()
        for stage in sorted(self._losing):
            self._tell(StageReady(stage))
        self._losing.clear()

    def _watch_for_stall(self) -> None:
        """Last resort: the ring is wired, micro-batches are open, and no stage has one."""
        members = self._lines.crew.members
        is_quiet = bool(self._open) and not self._losing and self.is_up.is_set()
        if not is_quiet or any(m.beat is None or m.beat.holding is not None for m in members):
            self._quiet_since = None
            return
        now = time.monotonic_ns()
        self._quiet_since = self._quiet_since or now
        if now - self._quiet_since > STALL_NS:
            self._quiet_since = None
            self._lose(Loss(0, f"{len(self._open)} micro-batches got lost on the way", False))

    def go_down(self, why: str) -> None:
        """End everything that lives, with the reason."""
        self.down_why = why
        log.error("the ring is down: %s", why)
        for request in list(self.live):
            try:
                self._tell(RequestCancelled(request, FinishReason.FAILED))
            except KvasirError:
                log.exception("request %d could not be ended in order", request)
                self._end(request, FinishReason.FAILED, why)
