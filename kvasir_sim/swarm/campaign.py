"""The fault campaign: many seeds, each with its own ring, swarm, load and faults.

Safety first: while a random subset of fault kinds strikes, no law may break. Then liveness: faults
stop, an honest core of workers is enough, load stays high, and the swarm must come to its target
and take over the experts within CONVERGE_S; when the load ends, every request has ended and expert
work returns to the stages. A seed decides everything, so a failing one fails again.
"""

import json
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from kvasir_core import NANOS_PER_SECOND, IllegalEvent, Nanos, nanos
from kvasir_core.errors import KvasirError
from kvasir_scenario.load import load_text
from kvasir_scenario.schema import Scenario
from kvasir_sim.arrivals import OpenLoop
from kvasir_sim.simulate import Simulation
from kvasir_sim.swarm.laws import LawBroken
from kvasir_sim.swarm.network import after
from kvasir_sim.swarm.run import SwarmRun

CONVERGE_S = 1200  # Backoffs of workers that failed before may last that long.
LOOK_S = 5
MORE_S = 30  # Load would go on so long after the last moment to converge.
HIGH_BUSY = 6  # Requests running under high load with all experts remote; the threshold is 3.
LAPS_PER_REQUEST = 11  # Mean: two for the prompt, nine tokens.
PASS_S, PASS_S_PER_LAYER = 0.05, 0.1  # Of a stage.
LIARS = (
    "nan", "zeros", "swapped_rows", "stale", "scaled", "noise", "turncoat", "sometimes",
)  # fmt: skip
MINUTES_MAX = 24 * 60
SEEDS_MAX = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedResult:
    """One seed's run.

    Attributes:
        seed: Reproduces it.
        simulated_s: Virtual time.
        faults: How often each kind struck; `liar_HONESTY` counts workers that lie.
        decisions: Orders of ring, coordinator and hub.
        violation: What broke, or None.
    """

    seed: int
    simulated_s: float
    faults: dict[str, int]
    decisions: int
    violation: str | None


def run_seed(seed: int, minutes: float) -> SeedResult:
    """Simulate one seed: `minutes` with faults, then until it has converged and is idle."""
    scenario = draw_scenario(seed, minutes)
    simulation = Simulation(scenario, None)
    swarm = simulation.swarm
    assert swarm is not None
    liveness = _Liveness(simulation, swarm, nanos(minutes * 60))
    violation = None
    try:
        simulation.run()
        liveness.finish()
    except (AssertionError, IllegalEvent, KvasirError, LookupError, TypeError, ValueError) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        violation = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    faults = Counter(swarm.faults.injected)
    faults += simulation.ring_faults.injected
    for kind in swarm.swarm.experts.workers:
        if kind.honesty != "honest":
            faults[f"liar_{kind.honesty}"] += kind.count
    hub = swarm.swarm.hub
    return SeedResult(
        seed=seed,
        simulated_s=swarm.swarm.env.now / NANOS_PER_SECOND,
        faults=dict(sorted(faults.items())),
        decisions=swarm.swarm.coordinator.decisions + (hub.decisions if hub else 0),
        violation=violation,
    )


class _Liveness:
    """Heals, then looks until the swarm has converged."""

    def __init__(self, simulation: Simulation, swarm: SwarmRun, heal_ns: Nanos) -> None:
        self._simulation = simulation
        self._run = swarm
        self._env = swarm.swarm.env
        self._remote_before = 0
        self._pairs_before = 0
        self._deadline = heal_ns + nanos(CONVERGE_S)
        self.converged_at: int | None = None
        after(self._env, heal_ns, self._heal)

    def _heal(self) -> None:
        self._run.faults.heal()
        self._simulation.ring_faults.is_healed = True
        after(self._env, nanos(LOOK_S), self._look)

    def _look(self) -> None:
        served = self._run.swarm.coordinator.served
        remote = served.remote_pairs - self._remote_before
        pairs = served.pairs - self._pairs_before
        self._remote_before, self._pairs_before = served.remote_pairs, served.pairs
        missing = self._missing(remote, pairs)
        if missing is None:
            self.converged_at = self._env.now
            self._end_load()
        elif self._env.now >= self._deadline:
            raise LawBroken(f"liveness: {CONVERGE_S} s after the faults ended, {missing}")
        else:
            after(self._env, nanos(LOOK_S), self._look)

    def _end_load(self) -> None:
        actor = self._simulation.actor
        assert isinstance(actor, OpenLoop)
        actor.stop()
        self._run.shell.see_whether_over()

    def _missing(self, remote: int, pairs: int) -> str | None:
        """What keeps it from having converged."""
        hub = self._run.swarm.hub
        assert hub is not None
        wanted = self._run.swarm.policy.base + self._run.swarm.policy.boost
        if hub.target != wanted:
            return f"the target is {hub.target} and should be {wanted}"
        for model in hub.hub.demand().models:
            for layer in model.layers:
                for run in layer.segments:
                    if run.replicas < wanted:
                        return f"experts {run.experts} of layer {layer.layer} have {run.replicas}"
        if not pairs or 2 * remote < pairs:
            return f"{remote} of {pairs} pairs come from workers"
        return None

    def finish(self) -> None:
        """The last request has ended: expert work must return to the stages in bounded time."""
        if self.converged_at is None:
            raise LawBroken("liveness: the load ended before the swarm converged")
        swarm, policy = self._run.swarm, self._run.swarm.policy
        quiet = policy.decision_period_ns * (policy.down_readings + 2) + policy.engaged_min_ns
        self._env.run(until=self._env.now + quiet)
        if swarm.coordinator.is_engaged:
            raise LawBroken(f"D4: still engaged {quiet} ns after the last request")


def draw_scenario(seed: int, minutes: float) -> Scenario:
    """The seed's ring, swarm, load and faults."""
    chance = Random(seed)  # noqa: S311 - a simulation, not a secret.
    layers = chance.randrange(2, 7)
    experts = chance.choice((8, 16, 32))
    size = chance.choice((4, 8, 16))
    # Each core worker holds a third of the cards, so nine of them make the target of three.
    held = -(-layers * -(-experts // size) // 3) * size
    lan: dict[str, Any] = {
        "name": "core", "count": 12, "per_expert_s": 0.002, "download_bytes_per_s": 1e8,
        "link": {"latency_s": 0.0005}, "experts_max": held, "arrival_s": {"uniform": [0, 60]},
    }  # fmt: skip
    home = {
        **lan, "name": "home", "count": chance.randrange(1, 6), "lost_share": 0.01,
        "link": {"latency_s": 0.01}, "jitter_s": 0.002, "download_bytes_per_s": 1e7,
        "sessions": {"on_s": {"uniform": [30, 600]}, "off_s": {"uniform": [5, 300]}},
        "keeps_slices": chance.random() < 0.5,
    }  # fmt: skip
    liars = [
        {**lan, "name": honesty, "count": chance.randrange(1, 3), "honesty": honesty}
        for honesty in LIARS
        if chance.random() < 0.25
    ]
    lap_s = PASS_S * 2 + PASS_S_PER_LAYER * layers
    high_per_s = HIGH_BUSY / (LAPS_PER_REQUEST * lap_s)
    document = {
        "name": "campaign",
        "model": {
            "layers": layers, "context": 512, "hidden": 256, "experts": experts,
            "experts_used": 2, "expert_ffn": 256,
        },
        "ring": {
            "stages": chance.choice((2, 2, 3)) if layers > 2 else 2, "row_width": 32,
            "micro_batch_width": 8, "window": chance.choice(("auto", 2, 6)),
            "running_max": 16, "kv_tokens": 4096,
        },
        "costs": {
            "kind": "fixed", "pass_s": PASS_S, "pass_s_per_layer": PASS_S_PER_LAYER,
            "per_token_s": 0.001,
        },
        "workload": _load(chance, minutes, high_per_s),
        "experts": {
            "overlap": chance.choice((1, 2, 4)),
            "local": {"per_expert_s": 0.02},
            "routing": {"kind": chance.choice(("uniform", "zipf"))},
            "coordinator": {"saturation_threshold": 3},
            "hub": {"slice_experts_max": size, "warm_rejoin": chance.random() < 0.8},
            "workers": [lan, home, *liars],
        },
        "faults": _faults(chance),
        "run": {"seed": seed},
    }  # fmt: skip
    return load_text(json.dumps(document), label=f"seed {seed}")


def _load(chance: Random, minutes: float, high_per_s: float) -> dict[str, Any]:
    """Up and down while faults strike; then high for long enough to converge."""
    phases, left = [], minutes * 60
    while left > 0:
        lasts = min(left, chance.uniform(20, 240))
        phases.append({"rate_per_s": chance.choice((0.0, 0.05, 0.3, 0.6)), "for_s": lasts})
        left -= lasts
    phases.append({"rate_per_s": high_per_s, "for_s": CONVERGE_S + MORE_S})
    return {
        "kind": "poisson", "rate_per_s": {"phases": phases},
        "duration_s": minutes * 60 + CONVERGE_S + MORE_S, "prompt_tokens": {"uniform": [8, 64]},
        "output_tokens": {"uniform": [2, 16]},
        "cancels": {"share": 0.05, "after_s": {"uniform": [0, 30]}},
    }  # fmt: skip


def _faults(chance: Random) -> list[dict[str, Any]]:
    """A random subset of the kinds, each at its own rate."""
    lasts = {"uniform": [1, 60]}
    long = {"uniform": [5, 240]}
    kinds: tuple[Callable[[], dict[str, Any]], ...] = (
        lambda: {"kind": "stage_lost", "stage": "any", "for_s": {"uniform": [1, 20]}},
        lambda: {"kind": "stage_slow", "stage": "any", "factor": 3, "for_s": lasts},
        lambda: {"kind": "link_slow", "hop": "any", "add_s": 0.2, "for_s": lasts},
        lambda: {"kind": "link_stop", "hop": "any", "for_s": {"uniform": [1, 10]}},
        lambda: {"kind": "worker_lost", "for_s": long},
        lambda: {"kind": "worker_lost", "share": chance.uniform(0.1, 1), "for_s": long},
        lambda: {"kind": "worker_stalled", "share": chance.uniform(0.1, 1), "for_s": lasts},
        lambda: {"kind": "worker_slow", "share": 0.5, "factor": 20, "for_s": lasts},
        lambda: {"kind": "hub_lost", "for_s": long},
        lambda: {"kind": "hub_paused", "for_s": long},
        lambda: {"kind": "relay_lost", "for_s": lasts},
        lambda: {"kind": "poll_hangs", "for_s": long},
        lambda: {
            "kind": "messages_lost", "lost_share": chance.uniform(0, 0.6),
            "doubled_share": chance.uniform(0, 0.6), "delay_s": chance.choice((0, 0.5, 5)),
            "for_s": long,
        },
        lambda: {"kind": "clock_jump", "where": "hub", "by_s": chance.uniform(-7200, 7200)},
        lambda: {"kind": "clock_jump", "where": "worker", "by_s": chance.uniform(-7200, 7200)},
    )  # fmt: skip
    return [
        {**kind(), "rate_per_h": chance.choice((6, 20, 60))}
        for kind in kinds
        if chance.random() < 0.4
    ]
