"""The engine: one thread that polls the ring's lines and drives the core; the bridge's way in.

Whatever is asked from outside is queued and done on the engine's thread between two rounds of
polling, so that everything behind it is single-threaded.
"""

import contextlib
import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvasir_core.errors import KvasirError
from kvasir_core.microbatch import FinishReason
from kvasir_core.queues import Predict
from kvasir_core.ring import Ring
from kvasir_core.statistics import RingStatistics
from kvasir_core.units import Nanos, RequestId
from kvasir_rt.driver import Driver
from kvasir_rt.recording import RingRecorder
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.snapshot import RingSnapshot, stage_snapshots
from kvasir_rt.submission import Submission
from kvasir_rt.switchboard import LineOptions, Switchboard
from kvasir_scenario.run_dir import named_output

TURN_MS_MAX = 100  # Watchdogs are looked at so often, whatever else happens.
ANSWER_WAIT_S = 5.0
ID_MAX = 1 << 31

log = logging.getLogger("kvasir.ring")

AnswerT = TypeVar("AnswerT")


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
        self._lines = Switchboard(options.lines)
        self.driver = Driver(Ring(self.plan, predict=options.predict), self._lines)
        self._inbox: deque[Callable[[], None]] = deque()
        self._closing_ns: int | None = None
        self._is_over = threading.Event()
        self._cpu_seen_ns = 0
        self._over_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ------------------------------------------------------------------ from any thread

    @property
    def ring(self) -> Ring:
        """The core. Only the engine's thread may call it."""
        return self.driver.ring

    @property
    def recorder(self) -> RingRecorder | None:
        """Told of everything, on the engine's thread; to be set before `start`."""
        return self.driver.recorder

    @recorder.setter
    def recorder(self, recorder: RingRecorder | None) -> None:
        self.driver.recorder = recorder

    @property
    def endpoint(self) -> str:
        """Where stages from elsewhere join."""
        return self._lines.endpoint

    def start(self, progress: Callable[[str], object] | None = None) -> None:
        """Spawn the stages, wait for those that join, and return when a lap could be made.

        Args:
            progress: Called with a sentence whenever a stage has got further (engine thread).

        Raises:
            RingDown: A stage did not start; everything is stopped again.
        """
        if progress is not None:
            self._lines.crew.say = progress
        self._thread.start()
        while not self.driver.is_up.wait(0.2) and not self._is_over.is_set():
            pass
        if self.driver.down_why:
            self._thread.join()
            raise RingDown(self.driver.down_why)
        gc.freeze()  # What is loaded by now stays; the collector need not walk it in every lap.

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
        self._call(lambda: self.driver.cancel(RequestId(request_id), reason))

    def slow(self, stage: int, factor: float) -> None:
        """Have a stage hold micro-batches `factor` times as long as it needs, until told anew."""
        self._call(lambda: self._lines.crew.slow(stage, factor))

    def snapshot(self) -> RingSnapshot:
        """A consistent view. Waits for the engine's thread, mostly well under a millisecond.

        Raises:
            RingDown: The engine's thread has not answered in time.
        """
        return self._ask(self._snapshot)

    def stop_recording(self) -> tuple[Nanos, RingStatistics]:
        """End the record here: the recorder is told of all up to now and let go.

        Returns:
            When that was, and the ring's statistics then.

        Raises:
            RingDown: The engine's thread has not answered in time.
        """
        return self._ask(self.driver.stop_recording)

    def _ask(self, question: Callable[[], AnswerT]) -> AnswerT:
        """Have a question answered between two turns of the engine's thread."""
        if threading.current_thread() is self._thread or self._is_over.is_set():
            return question()
        answers: deque[AnswerT] = deque()
        is_done = threading.Event()

        def answer() -> None:
            answers.append(question())
            is_done.set()

        self._call(answer)
        if not is_done.wait(ANSWER_WAIT_S):
            raise RingDown(f"the engine did not answer within {ANSWER_WAIT_S:g} s")
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

    def _run(self) -> None:
        try:
            if self._options.events is not None:
                with named_output(self._options.events):  # By lines: a full disk is seen at once.
                    self.driver.log = self._options.events.open("w", 1, encoding="utf-8")
            self._lines.begin_epoch(self.driver.ring.epoch)
            while not self._may_end():
                self._turn()
        except KvasirError as error:
            self.driver.go_down(str(error))
        except Exception as error:
            log.exception("the engine failed")
            self.driver.go_down(f"the engine failed: {type(error).__name__}: {error}")
        finally:
            self._is_over.set()
            self._empty_inbox()
            self._lines.close(self.driver.down_why)
            if self.driver.log is not None:
                with contextlib.suppress(OSError):  # It has been told of: lines are written whole.
                    self.driver.log.close()
                self.driver.log = None

    def _may_end(self) -> bool:
        if self._closing_ns is None:
            return False
        if time.monotonic_ns() >= self._closing_ns:
            for request in list(self.driver.live):
                self.driver.cancel(request, FinishReason.CANCELLED)
        return not self.driver.live and not self._inbox

    def _turn(self) -> None:
        turn = self._lines.turn(self._wait_ms())
        while self._inbox:
            self._inbox.popleft()()
        self.driver.take_in(turn)

    def _wait_ms(self) -> int:
        if self._inbox:
            return 0
        wakeup = self.driver.ring.next_wakeup()
        if wakeup is None:
            return TURN_MS_MAX
        return min(TURN_MS_MAX, max(0, -((self.driver.now() - wakeup) // 1_000_000)))

    def _arrive(self, submission: Submission) -> None:
        is_closing = self._closing_ns is not None
        self.driver.arrive(submission, "the server is shutting down" if is_closing else "")

    def _begin_close(self, deadline_ns: int) -> None:
        self._closing_ns = deadline_ns

    # ------------------------------------------------------------------ views

    def _cpu_ns(self) -> int:
        if threading.current_thread() is self._thread:
            self._cpu_seen_ns = time.thread_time_ns()
        return self._cpu_seen_ns

    def _snapshot(self) -> RingSnapshot:
        driver = self.driver
        now = driver.now()
        laps = sorted(driver.meter.laps_ns)
        times = driver.meter.times(now, is_ring_empty=driver.is_ring_empty)
        return RingSnapshot(
            plan=self.plan,
            now_ns=now,
            is_ready=driver.is_ready,
            down_why=driver.down_why,
            statistics=driver.ring.statistics(),
            binding_limits=dict(driver.meter.bindings),
            laps=driver.laps,
            spans=driver.meter.spans,
            lap_ns_p50=laps[len(laps) // 2] if laps else None,
            lap_ns_p95=laps[len(laps) * 95 // 100] if laps else None,
            tokens=driver.tokens,
            engine_cpu_ns=self._cpu_ns(),
            traffic=dict(self._lines.traffic.bytes),
            stages=stage_snapshots(self._lines.crew, times),
        )
