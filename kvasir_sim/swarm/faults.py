"""Faults of the swarm, from the scenario: at given times, or at random with a seed of their own."""

from collections import Counter
from collections.abc import Generator
from typing import Any

import numpy as np
import simpy

from kvasir_core import NANOS_PER_SECOND, nanos
from kvasir_scenario import schema_faults as kinds
from kvasir_scenario.lengths import draw_nanos, sampler_of
from kvasir_scenario.streams import Purpose
from kvasir_sim.swarm.swarm import Swarm
from kvasir_sim.swarm.worker import Worker

SECONDS_PER_HOUR = 3600
SwarmFault = (
    kinds.WorkerLost
    | kinds.WorkerStalled
    | kinds.WorkerSlow
    | kinds.HubLost
    | kinds.HubPaused
    | kinds.RelayLost
    | kinds.PollHangs
    | kinds.MessagesLost
    | kinds.ClockJump
)


class SwarmFaults:
    """Runs every swarm fault of a scenario as a process."""

    def __init__(self, swarm: Swarm, faults: tuple[Any, ...], seed: int) -> None:
        self._swarm = swarm
        self._env = swarm.env
        self._depth: Counter[str] = Counter()  # Faults of a kind that last now.
        self.injected: Counter[str] = Counter()
        self.is_healed = False  # Nothing strikes any more.
        for index, fault in enumerate(faults):
            if isinstance(fault, SwarmFault):
                key = (int(Purpose.FAULTS), index)
                sequence = np.random.SeedSequence(entropy=seed, spawn_key=key)
                chance = np.random.Generator(np.random.PCG64(sequence))
                swarm.env.process(self._recur(fault, chance))

    def heal(self) -> None:
        """No fault begins from now on; those under way end as they would."""
        self.is_healed = True

    def _recur(
        self, fault: SwarmFault, chance: np.random.Generator
    ) -> Generator[simpy.Event, Any, None]:
        if fault.at_s is not None:
            yield self._env.timeout(nanos(fault.at_s))
            self._strike(fault, chance)
            return
        assert fault.rate_per_h is not None
        mean_ns = SECONDS_PER_HOUR * NANOS_PER_SECOND / fault.rate_per_h
        while True:
            yield self._env.timeout(max(1, round(chance.exponential(mean_ns))))
            if self.is_healed:
                return
            self._strike(fault, chance)

    def _strike(self, fault: SwarmFault, chance: np.random.Generator) -> None:
        self.injected[fault.kind] += 1
        if isinstance(fault, kinds.ClockJump):
            self._jump(fault)
            return
        for_ns = int(draw_nanos(sampler_of(fault.for_s, is_whole=False), chance, 1)[0])
        match fault:
            case kinds.WorkerStalled():
                for worker in self._victims(fault, chance):
                    worker.stall(for_ns)
            case kinds.WorkerLost():
                for worker in self._victims(fault, chance):
                    self._env.process(self._keep_offline(worker, for_ns))
            case kinds.WorkerSlow():
                for worker in self._victims(fault, chance):
                    self._env.process(self._slow_down(worker, fault.factor, for_ns))
            case kinds.MessagesLost():
                self._env.process(self._storm(fault, for_ns))
            case kinds.HubLost() | kinds.HubPaused() | kinds.RelayLost() | kinds.PollHangs():
                self._env.process(self._stop(fault.kind, for_ns))

    def _victims(
        self,
        fault: kinds.WorkerLost | kinds.WorkerStalled | kinds.WorkerSlow,
        chance: np.random.Generator,
    ) -> list[Worker]:
        """Workers of the class that are online: one, or a share of them."""
        online = [
            worker
            for worker in self._swarm.workers.values()
            if worker.is_online and fault.workers in (None, worker.kind.name)
        ]
        if not online:
            return []
        count = 1 if fault.share is None else max(1, round(fault.share * len(online)))
        places = chance.permutation(len(online))[:count]
        return [online[place] for place in sorted(places.tolist())]

    def _keep_offline(self, worker: Worker, for_ns: int) -> Generator[simpy.Event, Any, None]:
        self._swarm.keep_offline(worker, begins=True)
        yield self._env.timeout(for_ns)
        self._swarm.keep_offline(worker, begins=False)

    def _slow_down(
        self, worker: Worker, factor: float, for_ns: int
    ) -> Generator[simpy.Event, Any, None]:
        worker.slower.append(factor)
        yield self._env.timeout(for_ns)
        worker.slower.remove(factor)

    def _storm(self, fault: kinds.MessagesLost, for_ns: int) -> Generator[simpy.Event, Any, None]:
        """Overlapping storms add up; losing everything stays below certainty."""
        weather = self._swarm.weather
        weather.lost_share += fault.lost_share
        weather.doubled_share += fault.doubled_share
        weather.delay_ns += nanos(fault.delay_s)
        yield self._env.timeout(for_ns)
        weather.lost_share = max(0.0, weather.lost_share - fault.lost_share)
        weather.doubled_share = max(0.0, weather.doubled_share - fault.doubled_share)
        weather.delay_ns -= nanos(fault.delay_s)

    def _stop(self, kind: str, for_ns: int) -> Generator[simpy.Event, Any, None]:
        """Something there is one of stops; the first of several that overlap stops it."""
        self._depth[kind] += 1
        if self._depth[kind] == 1:
            self._switch(kind, begins=True)
        yield self._env.timeout(for_ns)
        self._depth[kind] -= 1
        if not self._depth[kind]:
            self._switch(kind, begins=False)

    def _switch(self, kind: str, *, begins: bool) -> None:
        swarm, hub = self._swarm, self._swarm.hub
        if kind == "poll_hangs":
            swarm.polls_hang = begins
        elif hub is None:
            return  # Without a market there is neither hub nor relay.
        elif kind == "hub_lost":
            hub.crash() if begins else hub.restart()
        elif kind == "hub_paused":
            hub.pause() if begins else hub.go_on()
        else:
            assert kind == "relay_lost"
            hub.has_relay = not begins
            for worker in swarm.workers.values():
                if begins and worker.is_connected:
                    worker.disconnect()

    def _jump(self, fault: kinds.ClockJump) -> None:
        """A worker's clock is in no message: setting it changes nothing, and must not."""
        if fault.where == "hub" and self._swarm.hub is not None:
            self._swarm.hub.set_clock(nanos(fault.by_s))
