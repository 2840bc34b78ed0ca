"""The engine: one thread that drives `kvasir_core.Ring` with real stages.

What stages and the bridge report becomes events; what the ring decides becomes messages and tokens.
It holds each live request's history (prompt and tokens given), so it can tell the head the token
ids of any row, and replay a request from position 0 after a stage was lost.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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
from kvasir_core.queues import Predict
from kvasir_core.ring import Ring
from kvasir_core.units import MicroBatchId, Nanos, RequestId
from kvasir_rt import wire
from kvasir_rt.crew import Loss
from kvasir_rt.laps import STAMPS, Flight, LapMeter
from kvasir_rt.live import Live, lap_of
from kvasir_rt.recording import RingRecorder
from kvasir_rt.ring_errors import RingDown, WireError
from kvasir_rt.snapshot import RingSnapshot, stage_snapshots
from kvasir_rt.submission import EndEvent, EngineEvent, Submission, TokenEvent
from kvasir_rt.switchboard import LineOptions, Switchboard

TURN_MS_MAX = 100  # Watchdogs are looked at so often, whatever else happens.
SNAPSHOT_WAIT_S = 2.0
STALL_NS = 30_000_000_000  # Micro-batches are open and nobody has one: frames were lost.
ID_MAX = 1 << 31

log = logging.getLogger("kvasir.ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """An engine's fixed facts.

    Attributes:
        lines: Plan, stages and how they reach each other.
        predict: Longest stage hold, for the packer.
        events: Where to write the event log; None writes none.
        vocabulary: Token ids are below it.
    """

    lines: LineOptions
    predict: Predict | None = None
    events: Path | None = None
    vocabulary: int = ID_MAX


class Engine:
    """Thread-safe from outside: `submit`, `cancel`, `snapshot`, `close`."""

    def __init__(self, options: EngineOptions) -> None:
        """Bind the ring's sockets; `start` spawns stages.

        Raises:
            JoinError: An address is taken.
        """
        self._options = options
        self.plan = options.lines.crew.plan
        self.ring = Ring(self.plan, predict=options.predict)
        self.meter = LapMeter(self.plan)
        self.recorder: RingRecorder | None = None  # Set before `start`.
        self._lines = Switchboard(options.lines)
        self._zero = time.monotonic_ns()
        self._inbox: deque[Callable[[], None]] = deque()
        self._live: dict[RequestId, Live] = {}
        self._open: dict[MicroBatchId, Flight] = {}
        self._losing: set[int] = set()  # Lost and not reported ready yet.
        self._rows: dict[RequestId, wire.ResultRow] = {}  # Of the lap that is being taken in.
        self._pending: tuple[Flight, list[int]] | None = None
        self._down_why = ""
        self._detail = ""  # Of the request that is being ended.
        self._closing_ns: int | None = None
        self._is_over = threading.Event()
        self._is_up = threading.Event()
        self._tokens = 0
        self._cpu_seen_ns = 0
        self._over_lock = threading.Lock()
        self._laps = 0
        self._quiet_since: int | None = None
        self._log: TextIO | None = None
        self._progress: Callable[[str], None] | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------------ from any thread

    @property
    def endpoint(self) -> str:
        """Where stages from elsewhere join."""
        return self._lines.endpoint

    def start(self, progress: Callable[[str], None] | None = None) -> None:
        """Spawn the stages, wait for those that join, and return when a lap could be made.

        Args:
            progress: Called with a sentence whenever a stage has got further (engine thread).

        Raises:
            RingDown: A stage did not start; everything is stopped again.
        """
        self._progress = progress
        self._thread.start()
        while not self._is_up.wait(0.2) and not self._is_over.is_set():
            pass
        if self._down_why:
            self._thread.join()
            raise RingDown(self._down_why)

    def submit(self, submission: Submission) -> None:
        """Queue a request. Its events come on the engine's thread, the last is an `EndEvent`.

        Raises:
            ValueError: A token id is outside the vocabulary, or there is none.
        """
        if not submission.prompt_ids or submission.output_tokens_max < 1:
            raise ValueError("a request needs a prompt token and at least one output token")
        least, most = min(submission.prompt_ids), max(submission.prompt_ids)
        if least < 0 or most >= self._options.vocabulary:
            raise ValueError(
                f"token ids are from 0 to {self._options.vocabulary - 1}; there is "
                f"{least if least < 0 else most}"
            )
        self._call(lambda: self._arrive(submission))

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a request early; one that has ended already stays as it is."""
        self._call(lambda: self._cancel(RequestId(request_id), reason))

    def snapshot(self) -> RingSnapshot:
        """A consistent view. Waits for the engine's thread, mostly well under a millisecond.

        Raises:
            RingDown: The engine's thread has not answered in time, or is over.
        """
        if threading.current_thread() is self._thread or self._is_over.is_set():
            return self._snapshot()
        answers: deque[RingSnapshot] = deque()
        is_done = threading.Event()

        def answer() -> None:
            answers.append(self._snapshot())
            is_done.set()

        self._call(answer)
        deadline = time.monotonic() + SNAPSHOT_WAIT_S
        while not is_done.wait(0.05):
            if self._is_over.is_set():
                return self._snapshot()
            if time.monotonic() > deadline:
                raise RingDown(f"the engine did not answer within {SNAPSHOT_WAIT_S:g} s")
        return answers[0]

    def close(self, drain_s: float = 0.0) -> None:
        """Take no new requests, let live ones end for so long, cancel the rest, stop all stages."""
        if not self._thread.is_alive():
            if not self._is_over.is_set():  # Never started.
                self._closing_ns = 0
                self._is_over.set()
                self._empty_inbox()
                self._lines.close()
            return
        deadline = time.monotonic_ns() + int(drain_s * 1e9)
        self._call(lambda: self._begin_close(deadline))
        self._thread.join()

    def _call(self, action: Callable[[], None]) -> None:
        self._inbox.append(action)
        if self._is_over.is_set():
            self._empty_inbox()
        else:
            with contextlib.suppress(OSError):  # It has just ended; then `_run` empties the inbox.
                self._lines.wake()

    def _empty_inbox(self) -> None:
        """After the end: whoever comes late is answered all the same."""
        with self._over_lock:
            while self._inbox:
                self._inbox.popleft()()

    # ------------------------------------------------------------------ the thread

    def _now(self) -> Nanos:
        return Nanos(time.monotonic_ns() - self._zero)

    def _run(self) -> None:
        try:
            if self._options.events is not None:
                self._log = self._options.events.open("w", encoding="utf-8")
            self._lines.begin_epoch(self.ring.epoch)
            while not self._may_end():
                self._turn()
        except KvasirError as error:
            self._go_down(str(error))
        except Exception as error:
            log.exception("the engine failed")
            self._go_down(f"the engine failed: {type(error).__name__}: {error}")
        finally:
            self._is_over.set()
            self._empty_inbox()
            self._lines.close(self._down_why)
            if self._log is not None:
                self._log.close()

    def _may_end(self) -> bool:
        if self._closing_ns is None:
            return False
        if time.monotonic_ns() >= self._closing_ns:
            for request in list(self._live):
                self._cancel(request, FinishReason.CANCELLED)
        return not self._live and not self._inbox

    def _turn(self) -> None:
        turn = self._lines.turn(self._wait_ms())
        while self._inbox:
            self._inbox.popleft()()
        for result, body in turn.results:
            self._take_result(result, body)
        for release in turn.releases:
            if release.epoch == self.ring.epoch:
                self._tell(ReleaseEnded(release.requests, release.epoch))
        for loss in turn.losses:
            self._lose(loss)
        if turn.became_wired:
            self._become_ready()
        wakeup = self.ring.next_wakeup()
        if wakeup is not None and self._now() >= wakeup:
            self._tell(TimePassed())
        self._watch_for_stall()

    def _wait_ms(self) -> int:
        if self._inbox:
            return 0
        wakeup = self.ring.next_wakeup()
        if wakeup is None:
            return TURN_MS_MAX
        return min(TURN_MS_MAX, max(0, -((self._now() - wakeup) // 1_000_000)))

    # ------------------------------------------------------------------ requests

    def _arrive(self, submission: Submission) -> None:
        request = RequestId(submission.request_id)
        is_closing = self._closing_ns is not None
        refusal = self._down_why or ("the server is shutting down" if is_closing else "")
        if refusal or request in self._live:
            why = refusal or f"request id {request} is in use"
            self._emit(submission, EndEvent(request, FinishReason.FAILED, why))
            return
        self._live[request] = Live(submission, list(submission.prompt_ids))
        prompt = len(submission.prompt_ids)
        if self.recorder is not None:
            self.recorder.offered(request, self._now(), prompt)
        self._tell(RequestArrived(request, prompt, submission.output_tokens_max))

    def _cancel(self, request: RequestId, reason: FinishReason, detail: str = "") -> None:
        if request in self._live:
            self._detail = detail
            self._tell(RequestCancelled(request, reason))
            self._detail = ""

    def _end(self, request: RequestId, reason: FinishReason, detail: str = "") -> None:
        live = self._live.pop(request)
        self._emit(live.submission, EndEvent(request, reason, detail))

    def _emit(self, submission: Submission, event: EngineEvent) -> None:
        try:
            submission.on_event(event)
        except Exception:
            log.exception("a client's event callback failed")
            request = RequestId(submission.request_id)
            if request in self._live:
                self._inbox.append(lambda: self._cancel(request, FinishReason.FAILED))

    # ------------------------------------------------------------------ events and decisions

    def _tell(self, event: RingEvent) -> list[RingDecision]:
        now = self._now()
        decisions = self.ring.handle(event, now)
        self.meter.causes.switch(self.ring.causes.cause, now)
        if self._log is not None:
            print(eventlog.encode(event, now), file=self._log)
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
                for request in requests:
                    self._deliver(request)
            case Launch(batch):
                self._open[batch.id] = Flight(batch, now, now)
                self._lines.submit(lap_of(batch, self._live))
                self._note_submitted()
            case Finish(request, reason):
                if recorder is not None:
                    recorder.finished(request, now, reason)
                self._end(request, reason, self._detail or self._down_why)
            case Release(requests, epoch):
                if not self._down_why:
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
                self._lines.begin_epoch(epoch)

    def _deliver(self, request: RequestId) -> None:
        live, row = self._live[request], self._rows[request]
        assert row.token is not None
        live.history.append(row.token)
        event = TokenEvent(request, row.token, row.logprob, row.top, live.tokens)
        live.tokens += 1
        self._tokens += 1
        self._emit(live.submission, event)

    def _note_submitted(self) -> None:
        for id_, at in self._lines.take_submitted():
            flight = self._open.get(MicroBatchId(id_))
            if flight is not None:
                submitted = max(at - self._zero, flight.composed)
                self._open[flight.micro_batch.id] = flight._replace(submitted=submitted)

    # ------------------------------------------------------------------ laps

    def _take_result(self, result: wire.Result, body: memoryview) -> None:
        self._note_submitted()
        if result.epoch != self.ring.epoch:
            return  # An earlier result of this round has ended the epoch.
        flight = self._open.pop(MicroBatchId(result.id), None)
        try:
            if flight is None:
                raise WireError(f"a result came for micro-batch {result.id}, which is not open")
            outputs = flight.micro_batch.outputs
            rows = wire.unpack_rows(body, len(outputs))
        except WireError as error:
            self._lose(Loss(self.plan.stages - 1, str(error), is_dead=True))
            return
        self._rows = dict(zip(outputs, rows, strict=True))
        for request, row in self._rows.items():
            if row.token is None:  # Before the lap ends, so that no token is counted.
                self._cancel(request, FinishReason.FAILED, "the model's logits are not finite")
        stopped = tuple(
            request
            for request, row in self._rows.items()
            if (live := self._live.get(request)) and row.token in live.submission.stop_ids
        )
        self._laps += 1
        self._quiet_since = None
        self._pending = (flight, self._stamps_here(result.stamps, flight.micro_batch.row_count))
        self._tell(LapEnded(flight.micro_batch.id, result.epoch, stopped))
        if self.plan.window_auto:
            measured = self.meter.measured()
            if measured is not None:
                self._tell(measured)

    def _record_lap(self, delivered: tuple[RequestId, ...], now: Nanos) -> None:
        """Account the lap whose end was just told; its time is when the core heard of it."""
        if self._pending is None:
            return
        (flight, stamps), self._pending = self._pending, None
        self.meter.add(flight, now, stamps)
        recorder = self.recorder
        if recorder is None:
            self.ring.causes.drain_before(now)
            return
        recorder.lap(flight.micro_batch, flight.composed, now, delivered, stamps)
        state = self.ring.statistics()
        recorder.sample(now, state.waiting, state.running, state.kv_blocks_in_use)

    def _stamps_here(self, stamps: tuple[int, ...], rows: int) -> list[int]:
        """Stamps on the engine's clock: each stage's offset and our zero taken off."""
        here: list[int] = []
        for member in self._lines.crew.members:
            shift = member.clock_offset_ns + self._zero
            at = STAMPS * member.stage
            here += [stamp - shift for stamp in stamps[at : at + STAMPS]]
            member.holds.append((here[at + 2] - here[at + 1], rows))
        return here

    # ------------------------------------------------------------------ losses

    def _lose(self, loss: Loss) -> None:
        why = self._lines.lose(loss)
        log.warning("stage %d lost: %s", loss.stage, why)
        self._losing.add(loss.stage)
        self._tell(StageLost(loss.stage))

    def _become_ready(self) -> None:
        if not self._is_up.is_set():
            if not self.ring.now:  # Time begins when the ring can serve.
                self._zero = time.monotonic_ns()
            self._is_up.set()
        for stage in sorted(self._losing):
            self._tell(StageReady(stage))
        self._losing.clear()

    def _watch_for_stall(self) -> None:
        """Last resort: the ring is wired, micro-batches are open, and no stage has one."""
        members = self._lines.crew.members
        is_quiet = bool(self._open) and not self._losing and self._is_up.is_set()
        if not is_quiet or any(m.beat is None or m.beat.holding is not None for m in members):
            self._quiet_since = None
            return
        now = time.monotonic_ns()
        self._quiet_since = self._quiet_since or now
        if now - self._quiet_since > STALL_NS:
            self._quiet_since = None
            self._lose(Loss(0, f"{len(self._open)} micro-batches got lost on the way", False))

    def _go_down(self, why: str) -> None:
        """End everything that lives, with the reason."""
        self._down_why = why
        log.error("the ring is down: %s", why)
        for request in list(self._live):
            try:
                self._tell(RequestCancelled(request, FinishReason.FAILED))
            except KvasirError:
                log.exception("request %d could not be ended in order", request)
                self._end(request, FinishReason.FAILED, why)

    def _begin_close(self, deadline_ns: int) -> None:
        self._closing_ns = deadline_ns

    # ------------------------------------------------------------------ views

    def _cpu_ns(self) -> int:
        if threading.current_thread() is self._thread:
            self._cpu_seen_ns = time.thread_time_ns()
        return self._cpu_seen_ns

    def _snapshot(self) -> RingSnapshot:
        now = self._now()
        laps = sorted(self.meter.laps_ns)
        is_empty = not self._open and self._is_up.is_set()
        times = self.meter.times(now, is_ring_empty=is_empty)
        return RingSnapshot(
            plan=self.plan,
            now_ns=now,
            is_ready=self._is_up.is_set() and not self._losing and not self._down_why,
            down_why=self._down_why,
            statistics=self.ring.statistics(),
            binding_limits=dict(self.meter.bindings),
            laps=self._laps,
            lap_ns_p50=laps[len(laps) // 2] if laps else None,
            lap_ns_p95=laps[len(laps) * 95 // 100] if laps else None,
            tokens=self._tokens,
            engine_cpu_ns=self._cpu_ns(),
            traffic=dict(self._lines.traffic.bytes),
            stages=stage_snapshots(self._lines.crew, times),
        )
