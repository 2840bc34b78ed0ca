"""Test doubles: a tail that emits what a script says, and a tokenizer of whole pieces.

`ScriptedEngine` drives the real `kvasir_core.Ring` (so admission, limits, refusals and counts are
real) on a thread of its own; only the stages are missing: a micro-batch's laps end in the ring's
order, and each output row gets the script's next token. `hold()` stops the laps, `let_laps(n)`
allows some, `run()` all.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir_core.causes import Cause
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
from kvasir_core.events import (
    LapEnded,
    ReleaseEnded,
    RequestArrived,
    RequestCancelled,
    RingEvent,
    TimePassed,
)
from kvasir_core.microbatch import FinishReason, MicroBatch
from kvasir_core.plan import Plan, split_evenly
from kvasir_core.ring import Ring
from kvasir_core.units import Nanos, RequestId
from kvasir_rt.bridge.queue_clock import QueueClock
from kvasir_rt.laps import StageTimes
from kvasir_rt.snapshot import RingSnapshot, StageSnapshot
from kvasir_rt.submission import EndEvent, Submission, TokenEvent
from kvasir_rt.wire import ExpertCounts

Script = Callable[[Submission], Sequence[int]]

BYTES = 256
EOS = BYTES  # Ids below are bytes; then the end token; then pieces.


def small_plan(**changes: object) -> Plan:
    numbers: dict[str, object] = {
        "layers": split_evenly(2, 2),
        "row_width": 64,
        "micro_batch_width": 8,
        "window": 2,
        "window_max": 2,
        "running_max": 4,
        "context": 512,
        "kv_tokens": (100_000, 100_000),
    }
    return Plan(**(numbers | changes))  # type: ignore[arg-type]


class PieceTokenizer:
    """Ids 0-255 are bytes, `EOS` ends, and each given piece of bytes is one id after that."""

    def __init__(self, pieces: Sequence[str | bytes] = (), *, bos: int | None = None) -> None:
        self.pieces = [p.encode() if isinstance(p, str) else p for p in pieces]
        self.bos = bos
        self.eos_ids = frozenset({EOS})
        self.token_bytes_max = max([1, *map(len, self.pieces)])
        self.vocabulary = EOS + 1 + len(self.pieces)

    @property
    def piece_ids(self) -> list[int]:
        return [EOS + 1 + index for index in range(len(self.pieces))]

    def encode(self, text: str, *, add_bos: bool, parse_special: bool) -> list[int]:
        del parse_special
        start = [self.bos] if add_bos and self.bos is not None else []
        return [*start, *text.encode()]

    def decode_bytes(self, token: int) -> bytes:
        if token < BYTES:
            return bytes([token])
        return b"" if token == EOS else self.pieces[token - EOS - 1]

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = "".join(f"<{m['role']}>{m['content']}\n" for m in messages)
        return self.encode(text, add_bos=True, parse_special=False)


@dataclass
class Live:
    submission: Submission
    script: deque[int]
    sent: int = 0


@dataclass
class Gate:
    """How many laps may end; None is any number."""

    laps: int | None = None
    condition: threading.Condition = field(default_factory=threading.Condition)


class ScriptedEngine:
    """The engine's interface over the real core and a scripted tail.

    Args:
        script: The tokens a submission gets; after the last one it ends with `EOS`.
        lap_s: How long each lap takes.
    """

    def __init__(self, script: Script, *, plan: Plan | None = None, lap_s: float = 0.0) -> None:
        self.plan = plan or small_plan()
        self.ring = Ring(self.plan)
        self.cancelled: list[tuple[int, FinishReason]] = []
        self.submitted: list[Submission] = []
        self.laps = 0
        self.experts: tuple[ExpertCounts, ...] = ()  # What the stages' coordinators say.
        self.recorder: QueueClock | None = None
        self._script = script
        self._lap_s = lap_s
        self._live: dict[RequestId, Live] = {}
        self._inbox: deque[RingEvent] = deque()
        self._flying: deque[MicroBatch | Release] = deque()
        self._is_closed = False
        self._zero = time.monotonic_ns()
        self._gate = Gate()
        self._thread = threading.Thread(target=self._turn, name="scripted engine")
        self._thread.start()

    def submit(self, submission: Submission) -> None:
        request = RequestId(submission.request_id)
        with self._gate.condition:
            self.submitted.append(submission)
            if self.recorder is not None:
                self.recorder.offered(request, time.monotonic_ns(), len(submission.prompt_ids))
            self._live[request] = Live(submission, deque(self._script(submission)))
            self._inbox.append(
                RequestArrived(request, len(submission.prompt_ids), submission.output_tokens_max)
            )
            self._gate.condition.notify_all()

    def cancel(self, request_id: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        with self._gate.condition:
            self.cancelled.append((request_id, reason))
            self._inbox.append(RequestCancelled(RequestId(request_id), reason))
            self._gate.condition.notify_all()

    def snapshot(self) -> RingSnapshot:
        """Real counts of the core; stages that did nothing."""
        with self._gate.condition:
            elapsed = time.monotonic_ns() - self._zero
            return RingSnapshot(
                plan=self.plan,
                now_ns=elapsed,
                is_ready=True,
                down_why="",
                statistics=self.ring.statistics(),
                binding_limits={},
                laps=self.laps,
                spans=0,
                lap_ns_p50=None,
                lap_ns_p95=None,
                tokens=0,
                engine_cpu_ns=0,
                traffic={},
                stages=tuple(self._idle_stage(index, elapsed) for index in range(2)),
            )

    def _idle_stage(self, index: int, elapsed_ns: int) -> StageSnapshot:
        starved = dict.fromkeys(Cause, 0) | {Cause.NO_DEMAND: elapsed_ns}
        return StageSnapshot(
            index=index,
            layers=self.plan.layers[index],
            state="wired",
            pid=None,
            host="here",
            device="none",
            restarts=0,
            resident_bytes=0,
            holding=None,
            times=StageTimes(elapsed_ns, 0, 0, 0, starved, 0, 0),
            traffic={},
            experts=self.experts[index] if self.experts else None,
        )

    def hold(self) -> None:
        with self._gate.condition:
            self._gate.laps = 0

    def let_laps(self, count: int) -> None:
        with self._gate.condition:
            self._gate.laps = (self._gate.laps or 0) + count
            self._gate.condition.notify_all()

    def run(self) -> None:
        with self._gate.condition:
            self._gate.laps = None
            self._gate.condition.notify_all()

    def fail_all(self, detail: str) -> None:
        """As when the ring has given up: every live request fails."""
        with self._gate.condition:
            for request in list(self._live):
                self._inbox.append(RequestCancelled(request, FinishReason.FAILED))
            self._detail = detail
            self._gate.condition.notify_all()

    def close(self, drain_s: float = 0.0) -> None:
        del drain_s
        with self._gate.condition:
            self._is_closed = True
            self._gate.condition.notify_all()
        self._thread.join(10)
        assert not self._thread.is_alive()

    _detail = ""

    def _turn(self) -> None:
        while True:
            with self._gate.condition:
                self._gate.condition.wait_for(self._has_work, timeout=self._until_wakeup_s())
                if self._is_closed:
                    return
                if self._inbox:
                    event = self._inbox.popleft()
                elif self._may_land():
                    if isinstance(self._flying[0], MicroBatch) and self._gate.laps is not None:
                        self._gate.laps -= 1
                    event = self._landed(self._flying.popleft())
                else:
                    event = TimePassed()
                self._handle(event)
            if isinstance(event, LapEnded) and self._lap_s:
                time.sleep(self._lap_s)

    def _has_work(self) -> bool:
        return self._is_closed or bool(self._inbox) or self._may_land()

    def _may_land(self) -> bool:
        if not self._flying:
            return False
        return isinstance(self._flying[0], Release) or self._gate.laps != 0

    def _until_wakeup_s(self) -> float | None:
        wakeup = self.ring.next_wakeup()
        return None if wakeup is None else max(0.0, (wakeup - time.monotonic_ns()) / 1e9)

    def _landed(self, flying: MicroBatch | Release) -> RingEvent:
        if isinstance(flying, Release):
            return ReleaseEnded(flying.requests, flying.epoch)
        self.laps += 1
        self._tokens: dict[RequestId, int] = {}
        stopped = []
        for request in flying.outputs:
            live = self._live.get(request)
            if live is None:
                continue
            token = live.script.popleft() if live.script else EOS
            self._tokens[request] = token
            if token in live.submission.stop_ids:
                stopped.append(request)
        return LapEnded(flying.id, flying.epoch, tuple(stopped))

    def _handle(self, event: RingEvent) -> None:
        if isinstance(event, RequestCancelled) and event.request not in self._live:
            return  # It has ended meanwhile.
        for decision in self.ring.handle(event, Nanos(time.monotonic_ns())):
            self._obey(decision)

    def _obey(self, decision: RingDecision) -> None:
        match decision:
            case Launch(micro_batch):
                self._flying.append(micro_batch)
                if self.recorder is not None:
                    self.recorder.lap(micro_batch, self.ring.now, self.ring.now, (), [])
            case Release():
                self._flying.append(decision)
            case Deliver(_, requests):
                for request in requests:
                    self._deliver(request)
            case Finish(request, reason):
                self._end(request, reason, self._detail)
            case Refuse(request, why):
                self._end(request, FinishReason.REFUSED, why)
            case Preempt() | BeginEpoch():
                raise AssertionError(f"not expected of a scripted ring: {decision}")

    def _deliver(self, request: RequestId) -> None:
        live = self._live[request]
        token = self._tokens[request]
        top = tuple((token + other, -0.5 - other) for other in range(2))
        live.submission.on_event(TokenEvent(request, token, -0.5, top, live.sent))
        live.sent += 1

    def _end(self, request: RequestId, reason: FinishReason, detail: str) -> None:
        live = self._live.pop(request)
        live.submission.on_event(EndEvent(request, reason, detail))
