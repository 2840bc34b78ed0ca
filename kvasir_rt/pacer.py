"""A scenario's clients in real time: they arrive, leave, think, and stages are killed on time.

One heap of due times, worked off by the caller's thread; the engine's thread reports ends.
"""

import heapq
import logging
import os
import signal
import threading
from collections.abc import Callable
from math import prod

import numpy as np

from kvasir_core.microbatch import FinishReason
from kvasir_core.units import NANOS_PER_SECOND, nanos
from kvasir_rt.engine import Engine
from kvasir_rt.sampling import SamplingParams
from kvasir_rt.submission import EndEvent, EngineEvent, Submission
from kvasir_scenario.lengths import draw_nanos, sampler_of
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_faults import StageLost, StageSlow
from kvasir_scenario.streams import Purpose
from kvasir_scenario.workload import NEVER_NS, ClosedLoop, Requests

PROMPT_IDS_KEY = 1000  # Of the streams that draw prompts; far above every `Purpose`.
SECONDS_PER_HOUR = 3600

log = logging.getLogger("kvasir.scenario")

Action = Callable[[], None]


class Pacer:
    """Offers a workload to an engine.

    Args:
        engine: Started, at its time 0.
        scenario: For seed and faults.
        workload: What `build_workload` made of it.
        vocabulary: Prompts are drawn from ids below it.
        speed: Arrivals, thinking and cancels come so many times as fast; deadlines do not.
    """

    def __init__(
        self,
        engine: Engine,
        scenario: Scenario,
        workload: Requests | ClosedLoop,
        *,
        vocabulary: int,
        speed: float = 1.0,
    ) -> None:
        self.ended = 0
        self._engine = engine
        self._seed = scenario.run.seed
        self._vocabulary = vocabulary
        self._speed = speed
        self._changed = threading.Condition()
        self._due: list[tuple[int, int, Action]] = []
        self._sequence = 0
        self._live: set[int] = set()
        self._to_come = 0  # Arrivals that are in the heap.
        self._sent = 0
        self._slowed: dict[int, list[float]] = {}  # Factors at work, by stage.
        self._loop: ClosedLoop | None = None
        if isinstance(workload, ClosedLoop):
            self._loop = workload
            for _ in range(workload.users):
                self._plan_send(0)
        else:
            self._plan_all(workload)
        for index, fault in enumerate(scenario.faults):
            if isinstance(fault, StageLost | StageSlow):
                self._plan_fault(fault, index)

    def run(self, until_ns: int | None, say: Callable[[int], None]) -> None:
        """Offer everything; return when the last request has ended, or at `until_ns`.

        Args:
            until_ns: Engine time; None has no end.
            say: Told now and then how many requests have ended.
        """
        while True:
            with self._changed:
                while not self._is_due():
                    if not self._live and not self._to_come:
                        return
                    if until_ns is not None and self._now() >= until_ns:
                        return
                    self._changed.wait(self._wait_s(until_ns))
                    say(self.ended)
                if until_ns is not None and self._due[0][0] > until_ns:
                    continue
                _, _, action = heapq.heappop(self._due)
            action()

    # ------------------------------------------------------------------ time

    def _now(self) -> int:
        return self._engine.driver.now()

    def _is_due(self) -> bool:
        return bool(self._due) and self._due[0][0] <= self._now()

    def _wait_s(self, until_ns: int | None) -> float:
        next_ns = min([self._due[0][0]] if self._due else [], default=self._now() + 200_000_000)
        if until_ns is not None:
            next_ns = min(next_ns, until_ns)
        return min(0.2, max(0, next_ns - self._now()) / NANOS_PER_SECOND)

    def _at(self, due_ns: int, action: Action) -> None:
        with self._changed:
            self._sequence += 1
            heapq.heappush(self._due, (due_ns, self._sequence, action))
            self._changed.notify()

    def _scaled(self, duration_ns: int) -> int:
        return round(duration_ns / self._speed)

    # ------------------------------------------------------------------ open loop

    def _plan_all(self, requests: Requests) -> None:
        cancels = requests.cancel_ns
        for index in range(len(requests)):
            request = int(requests.request_id[index])
            arrival = int(requests.arrival_ns[index])
            leaves = None
            if cancels is not None and int(cancels[index]) != NEVER_NS:
                leaves = int(cancels[index]) - arrival
            prompt = int(requests.prompt_tokens[index])
            output = int(requests.output_tokens[index])
            self._plan_arrival(
                self._scaled(arrival), request, (prompt, output), leaves, requests.deadline_ns
            )

    def _plan_arrival(
        self,
        due_ns: int,
        request: int,
        lengths: tuple[int, int],
        leaves_ns: int | None,
        deadline_ns: int | None,
    ) -> None:
        self._to_come += 1

        def arrive() -> None:
            with self._changed:
                self._to_come -= 1
            self._send(request, lengths, leaves_ns, deadline_ns)

        self._at(due_ns, arrive)

    def _send(
        self,
        request: int,
        lengths: tuple[int, int],
        leaves_ns: int | None,
        deadline_ns: int | None,
    ) -> None:
        with self._changed:
            self._live.add(request)
        now = self._now()
        if leaves_ns is not None:
            self._at(now + self._scaled(leaves_ns), lambda: self._leave(request, "cancelled"))
        if deadline_ns is not None:
            self._at(now + deadline_ns, lambda: self._leave(request, "deadline"))
        prompt, output = lengths
        self._engine.submit(
            Submission(
                request_id=request,
                prompt_ids=self._prompt(request, prompt),
                output_tokens_max=output,
                sampling=SamplingParams(),
                stop_ids=frozenset(),  # Outputs are as long as the workload says.
                on_event=self._take,
            )
        )

    def _leave(self, request: int, reason: str) -> None:
        with self._changed:
            is_live = request in self._live
        if is_live:
            self._engine.cancel(request, FinishReason(reason))

    def _prompt(self, request: int, length: int) -> list[int]:
        """Token ids that depend on the seed and the request alone."""
        sequence = np.random.SeedSequence(self._seed, spawn_key=(PROMPT_IDS_KEY, request))
        chance = np.random.Generator(np.random.PCG64(sequence))
        return [int(token) for token in chance.integers(0, self._vocabulary, length)]

    # ------------------------------------------------------------------ closed loop

    def _plan_send(self, due_ns: int) -> None:
        self._to_come += 1
        self._at(due_ns, self._send_next)

    def _send_next(self) -> None:
        loop = self._loop
        assert loop is not None
        with self._changed:
            self._to_come -= 1
            is_over = loop.requests is not None and self._sent >= loop.requests
            if loop.duration_ns is not None and self._now() >= self._scaled(loop.duration_ns):
                is_over = True
            if is_over:
                return
            request = self._sent
            self._sent += 1
        self._send(request, loop.next_lengths(), loop.next_cancel_ns(), loop.deadline_ns)

    # ------------------------------------------------------------------ what comes back

    def _take(self, event: EngineEvent) -> None:
        """Called on the engine's thread."""
        if not isinstance(event, EndEvent):
            return
        if event.detail:
            log.warning("request %d %s: %s", event.request_id, event.reason, event.detail)
        with self._changed:
            self._live.discard(event.request_id)
            self.ended += 1
            if self._loop is not None:
                self._plan_send(self._now() + self._scaled(self._loop.next_think_ns()))
            self._changed.notify()

    # ------------------------------------------------------------------ faults

    def _plan_fault(self, fault: StageLost | StageSlow, index: int) -> None:
        sequence = np.random.SeedSequence(self._seed, spawn_key=(int(Purpose.FAULTS), index))
        chance = np.random.Generator(np.random.PCG64(sequence))
        if fault.at_s is not None:
            self._at(self._scaled(nanos(fault.at_s)), lambda: self._strike(fault, chance))
            return
        assert fault.rate_per_h is not None
        mean_ns = SECONDS_PER_HOUR * NANOS_PER_SECOND / fault.rate_per_h

        def strike() -> None:
            self._strike(fault, chance)
            self._at(self._now() + self._scaled(round(chance.exponential(mean_ns))), strike)

        self._at(self._scaled(round(chance.exponential(mean_ns))), strike)

    def _strike(self, fault: StageLost | StageSlow, chance: np.random.Generator) -> None:
        stages = self._engine.snapshot().stages
        stage = int(chance.integers(len(stages))) if fault.stage == "any" else fault.stage
        pid = stages[stage].pid
        if isinstance(fault, StageSlow):
            self._slow_down(
                stage, fault, int(draw_nanos(sampler_of(fault.for_s, is_whole=False), chance, 1)[0])
            )
        elif pid is not None:
            log.warning("killing stage %d (process %d), as the scenario says", stage, pid)
            os.kill(pid, signal.SIGKILL)

    def _slow_down(self, stage: int, fault: StageSlow, for_ns: int) -> None:
        """Slowdowns of one stage multiply, as they do in the simulator."""
        slowed = self._slowed.setdefault(stage, [])
        slowed.append(fault.factor)
        self._engine.slow(stage, prod(slowed))

        def heal() -> None:
            slowed.remove(fault.factor)
            self._engine.slow(stage, prod(slowed))

        self._at(self._now() + self._scaled(for_ns), heal)
