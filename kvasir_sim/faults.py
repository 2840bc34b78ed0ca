"""Faults of the ring, from the scenario: at given times, or at random with a seed of their own."""

from collections import Counter
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from kvasir_core import NANOS_PER_SECOND, StageLost, StageReady, nanos
from kvasir_scenario import schema_faults as kinds
from kvasir_scenario.lengths import draw_nanos, sampler_of
from kvasir_scenario.streams import Purpose
from kvasir_sim.shell import Shell

SECONDS_PER_HOUR = 3600
RingFault = kinds.StageLost | kinds.StageSlow | kinds.LinkSlow | kinds.LinkStop


class RingFaults:
    """Runs every ring fault of a scenario as a process until the run is over."""

    def __init__(self, shell: Shell, faults: tuple[Any, ...], seed: int) -> None:
        self._shell = shell
        self._down_until: dict[int, int] = {}
        self._slow: dict[tuple[str, int], list[float]] = {}
        self.injected: Counter[str] = Counter()  # By kind.
        self.is_healed = False  # Nothing strikes any more.
        for index, fault in enumerate(faults):
            if isinstance(fault, kinds.RING_FAULTS):
                key = (int(Purpose.FAULTS), index)
                sequence = np.random.SeedSequence(entropy=seed, spawn_key=key)
                chance = np.random.Generator(np.random.PCG64(sequence))
                if isinstance(fault, kinds.LinkSlow | kinds.LinkStop):
                    shell.pipeline.use_links()
                shell.env.process(self._recur(fault, chance))

    def _recur(
        self, fault: RingFault, chance: np.random.Generator
    ) -> Generator[simpy.Event, Any, None]:
        env = self._shell.env
        durations = sampler_of(fault.for_s, is_whole=False)
        if fault.at_s is not None:
            yield env.timeout(nanos(fault.at_s))
            self._strike(fault, int(draw_nanos(durations, chance, 1)[0]), chance)
            return
        assert fault.rate_per_h is not None
        mean_ns = SECONDS_PER_HOUR * NANOS_PER_SECOND / fault.rate_per_h
        while True:
            yield env.timeout(max(1, round(chance.exponential(mean_ns))))
            if self._shell.is_over() or self.is_healed:
                return
            self._strike(fault, int(draw_nanos(durations, chance, 1)[0]), chance)

    def _strike(self, fault: RingFault, for_ns: int, chance: np.random.Generator) -> None:
        if self._shell.is_over():
            return
        self.injected[fault.kind] += 1
        pipeline, env = self._shell.pipeline, self._shell.env
        place = fault.stage if isinstance(fault, kinds.StageLost | kinds.StageSlow) else fault.hop
        if place == "any":
            place = int(chance.integers(len(pipeline.stages)))
        match fault:
            case kinds.StageLost():
                self._lose_stage(place, for_ns)
            case kinds.StageSlow():
                env.process(self._slow_down("stage", place, fault.factor, 0, for_ns))
            case kinds.LinkSlow():
                extra = nanos(fault.add_s)
                env.process(self._slow_down("link", place, fault.factor, extra, for_ns))
            case kinds.LinkStop():
                link = pipeline.links[place]
                link.free_at = max(link.free_at, env.now + for_ns)

    def _lose_stage(self, stage: int, for_ns: int) -> None:
        """The stage dies; a second death while it is down makes the replacement start anew."""
        shell = self._shell
        until = shell.env.now + for_ns
        is_down = stage in self._down_until
        self._down_until[stage] = max(until, self._down_until.get(stage, 0))
        shell.tell(StageLost(stage))
        if not is_down:
            shell.env.process(self._replace(stage))

    def _replace(self, stage: int) -> Generator[simpy.Event, Any, None]:
        env = self._shell.env
        while env.now < self._down_until[stage]:
            yield env.timeout(self._down_until[stage] - env.now)
        del self._down_until[stage]
        self._shell.tell(StageReady(stage))

    def _slow_down(
        self, what: str, place: int, factor: float, delay_ns: int, for_ns: int
    ) -> Generator[simpy.Event, Any, None]:
        """Faults of one place multiply; when the last one ends the place is as fast as before."""
        pipeline = self._shell.pipeline
        target = pipeline.stages[place] if what == "stage" else pipeline.links[place]
        factors = self._slow.setdefault((what, place), [])
        factors.append(factor)
        target.slower = float(np.prod(factors))
        if what == "link":
            pipeline.links[place].delay_ns += delay_ns
        yield self._shell.env.timeout(for_ns)
        factors.remove(factor)
        target.slower = float(np.prod(factors))
        if what == "link":
            pipeline.links[place].delay_ns -= delay_ns
