"""A run's swarm put together: coordinator, hub, workers with owners who come and go, faults."""

from collections.abc import Generator
from random import Random
from typing import Any, TextIO

import numpy as np
import simpy

from kvasir_core import Nanos, Plan, nanos
from kvasir_core.swarm.events import WorkerAttached, WorkerDetached
from kvasir_core.swarm.words import Session, Slice, WorkerId
from kvasir_scenario.lengths import Sampler, draw_nanos, sampler_of
from kvasir_scenario.schema import Scenario
from kvasir_scenario.schema_experts import Experts
from kvasir_scenario.streams import Purpose, stream
from kvasir_sim.costs import CostModel
from kvasir_sim.pipeline import Clock
from kvasir_sim.swarm.calls import Carrier, Uplink
from kvasir_sim.swarm.coordinator_shell import CoordinatorShell
from kvasir_sim.swarm.cores import Cores
from kvasir_sim.swarm.hub_shell import HubShell
from kvasir_sim.swarm.laws import Watch
from kvasir_sim.swarm.local import StageWork, local_times
from kvasir_sim.swarm.network import Line, Weather
from kvasir_sim.swarm.numbers import (
    coordinator_policy,
    expert_numbers,
    experts_max_of,
    swarm_policy,
)
from kvasir_sim.swarm.routing import routing_of
from kvasir_sim.swarm.shell import SwarmShell
from kvasir_sim.swarm.worker import MarketTally, Worker

WORKERS_MAX = 10_000  # The hub's limit of nodes.


class Swarm:
    """Everything beside the ring. `start` it when the ring's shell exists."""

    def __init__(
        self,
        env: Clock,
        scenario: Scenario,
        experts: Experts,
        plan: Plan,
        costs: CostModel,
        logs: tuple[TextIO, TextIO] | None = None,
    ) -> None:
        """`logs`: where the coordinator's and the hub's events go."""
        self.env = env
        self.scenario = scenario
        self.experts = experts
        self.numbers = expert_numbers(scenario, experts, plan)
        self.policy = swarm_policy(scenario, experts)
        rng = stream(scenario.run.seed, Purpose.WORKERS)
        self.routing = routing_of(
            scenario, experts.routing, self.numbers.experts, self.numbers.top_k, rng
        )
        layers = [len(own) for own in self.numbers.layers_of]
        self.work = StageWork(local_times(experts.local, costs), layers, self.routing)
        self.weather = Weather(_chance(rng))
        self.watch = Watch(env, coordinator_policy(self.policy, experts), self.numbers.layers)
        self.tally = MarketTally()
        self.workers: dict[WorkerId, Worker] = {}
        self.polls_hang = False  # By a fault.
        self._shell: SwarmShell | None = None
        self._slots_all = plan.running_max
        self._faults_of: dict[WorkerId, int] = {}  # That keep a worker offline now.
        self._is_wanted: dict[WorkerId, bool] = {}  # By its owner.
        call_s = experts.coordinator.call_s
        uplink = experts.coordinator.uplink_bytes_per_s
        self.cores = None if experts.cores is None else Cores(env, experts.cores)
        self.carrier = Carrier(
            env, self.routing, self.numbers.row_bytes, [Uplink(uplink) for _ in plan.layers],
            self.weather, self.policy.call_deadline_ns, self.cores,
        )  # fmt: skip
        self.coordinator = CoordinatorShell(
            env, coordinator_policy(self.policy, experts), _chance(rng), self.numbers,
            self.routing, self.work, self.carrier, self.workers, self.slots, self.watch,
            call_ns=nanos(call_s), log=None if logs is None else logs[0],
        )  # fmt: skip
        self.hub = self._new_hub(_chance(rng), None if logs is None else logs[1])
        self._enlist(rng)

    def start(self, shell: SwarmShell) -> None:
        """The ring's shell is there: owners begin to come, polls begin."""
        self._shell = shell
        self.coordinator.stages = shell.overlapping.overlapping
        self.coordinator.start(self.hub)

    def slots(self) -> tuple[int, int] | None:
        """As `GET /slots` of the bridge: requests running, of all there may be."""
        if self.polls_hang or self._shell is None:
            return None
        return self._shell.ring.load[1], self._slots_all

    @property
    def load(self) -> tuple[int, int]:
        """Requests waiting and running now."""
        return (0, 0) if self._shell is None else self._shell.ring.load[:2]

    def keep_offline(self, worker: Worker, *, begins: bool) -> None:
        """A fault takes a worker down, or lets it up again."""
        self._faults_of[worker.id] += 1 if begins else -1
        if begins:
            worker.crash()
        else:
            self._bring_up(worker)

    def _new_hub(self, chance: Random, log: TextIO | None) -> HubShell | None:
        section = self.experts.hub
        if section is None:
            return None
        line = Line(self.env, self.weather, nanos(section.latency_s), 0.0)
        return HubShell(
            self.env, self.policy, chance, self.numbers, line, self.slots, self.watch, log
        )

    def _enlist(self, rng: np.random.Generator) -> None:
        count = sum(kind.count for kind in self.experts.workers)
        if count > WORKERS_MAX:
            raise self.scenario.error(
                "experts.workers", f"{count} workers in all; at most {WORKERS_MAX}"
            )
        for index, kind in enumerate(self.experts.workers):
            experts_max = experts_max_of(self.scenario, index, kind, self.numbers)
            arrivals = draw_nanos(sampler_of(kind.arrival_s, is_whole=False), rng, kind.count)
            for number, arrival_ns in enumerate(arrivals.tolist()):
                id_ = WorkerId(f"{kind.name}-{number:0{len(str(kind.count - 1))}d}")
                worker = Worker(
                    self.env, id_, kind, experts_max, self.numbers, _chance(rng), self.tally,
                    self.weather,
                )  # fmt: skip
                worker.on_closed = self._closed
                worker.on_gone = self._bring_up  # Its owner may want it again by now.
                self.workers[id_] = worker
                self._faults_of[id_] = 0
                self._is_wanted[id_] = False
                owner_rng = np.random.default_rng(rng.integers(1 << 63))
                self.env.process(self._own(worker, arrival_ns, owner_rng))
        if self.hub is None:
            self._deal()

    def _own(
        self, worker: Worker, arrival_ns: int, rng: np.random.Generator
    ) -> Generator[simpy.Event, Any, None]:
        """Its owner: comes once, or in sessions."""
        sessions = worker.kind.sessions
        yield self.env.timeout(arrival_ns)
        if sessions is None:
            self._want(worker, is_wanted=True)
            return
        on, off = (sampler_of(spec, is_whole=False) for spec in (sessions.on_s, sessions.off_s))
        while True:
            self._want(worker, is_wanted=True)
            yield self.env.timeout(_draw(on, rng))
            self._want(worker, is_wanted=False)
            yield self.env.timeout(_draw(off, rng))

    def _want(self, worker: Worker, *, is_wanted: bool) -> None:
        self._is_wanted[worker.id] = is_wanted
        if is_wanted:
            self._bring_up(worker)
        else:
            worker.leave()

    def _bring_up(self, worker: Worker) -> None:
        if self._faults_of[worker.id] or not self._is_wanted[worker.id] or worker.is_online:
            return
        worker.start(self.hub)
        if self.hub is None:
            worker.hold(self._dealt[worker.id])
            worker.session = Session(worker.session + 1)
            worker.is_connected = True
            self.coordinator.may_remote = True
            self.coordinator.tell(WorkerAttached(worker.id, worker.session, self._dealt[worker.id]))

    def _closed(self, worker: Worker) -> None:
        self.carrier.close_all(worker)
        if self.hub is None and worker.session:
            self.coordinator.tell(WorkerDetached(worker.id, worker.session))

    def _deal(self) -> None:
        """Without a market: slices go round, so that replicas of each expert differ by one."""
        numbers = self.numbers
        size = min(self.policy.slice_experts_max, numbers.experts)
        room = {id_: worker.experts_max for id_, worker in self.workers.items()}
        dealt: dict[WorkerId, list[Slice]] = {id_: [] for id_ in self.workers}
        cards = [
            Slice(layer, begin, min(begin + size, numbers.experts))
            for layer in numbers.layers
            for begin in range(0, numbers.experts, size)
        ]
        queue = list(self.workers)
        while queue:
            is_dealt = False
            for card in cards:
                width = card.end - card.begin
                taker = next((i for i in queue if room[i] >= width and card not in dealt[i]), None)
                if taker is None:
                    continue
                dealt[taker].append(card)
                room[taker] -= width
                queue.remove(taker)
                queue.append(taker)
                is_dealt = True
            if not is_dealt:
                break
        self._dealt = {id_: tuple(sorted(slices)) for id_, slices in dealt.items()}


def _draw(sampler: Sampler, rng: np.random.Generator) -> Nanos:
    """A stay of at least a millisecond: no owner comes and goes at one moment for ever."""
    return Nanos(max(1_000_000, int(draw_nanos(sampler, rng, 1)[0])))


def _chance(rng: np.random.Generator) -> Random:
    return Random(int(rng.integers(1 << 63)))  # noqa: S311 - a simulation, not a secret.
