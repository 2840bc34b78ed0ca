"""The swarm's laws, watched from outside the core on every simulated run.

Each check keeps its own small account and knows nothing of the core's inside, so that a guard that
is missing there is seen here. What is broken raises `LawBroken`.
"""

from dataclasses import dataclass, field

from kvasir_core import Nanos, nanos
from kvasir_core.swarm import SwarmPolicy
from kvasir_core.swarm.decisions import Assign
from kvasir_core.swarm.statistics import Demand
from kvasir_core.swarm.words import Slice, WorkerId
from kvasir_sim.pipeline import Clock


class LawBroken(AssertionError):
    """A law of DESIGN.md does not hold; the message names it."""


@dataclass(slots=True)
class _Shown:
    """What one worker has shown the coordinator, by our own account."""

    right: set[Slice] = field(default_factory=set)  # Slices with an answer that was checked right.
    trial_from: int | None = None  # Its open trial's start.
    trial_failed_at: Nanos | None = None
    heard_at: Nanos = Nanos(0)


class Watch:
    """D2 and D4, exactly once, M1, M2, M7 and M10."""

    def __init__(self, env: Clock, policy: SwarmPolicy, layers: tuple[int, ...]) -> None:
        self._env = env
        self._policy = policy
        self._layers = frozenset(layers)
        self._shown: dict[WorkerId, _Shown] = {}
        self._high_at: int | None = None  # Last good self-poll at or above the threshold.
        self.checks = 0

    def polled(self, busy: int) -> None:
        """The coordinator got a good reading of its own slots."""
        if busy >= self._policy.threshold:
            self._high_at = self._env.now

    def dispatched(self, worker: WorkerId, slice_: Slice, *, is_trial: bool) -> None:
        """A part or a trial leaves for a worker."""
        self.checks += 1
        shown = self._of(worker)
        if is_trial:
            # A check that got lost with its stage ends a trial too, when its time is over.
            limit = self._policy.call_deadline_ns + self._policy.check_report_max_ns
            is_alone = shown.trial_from is None or self._env.now - shown.trial_from >= limit
            self._require(is_alone, f"D2: a second trial of {worker} at a time")
            shown.trial_from = self._env.now
            since = None if shown.trial_failed_at is None else self._env.now - shown.trial_failed_at
            wait = min(self._policy.trial_backoff_ns, self._policy.breaker_ns)
            self._require(
                since is None or since >= wait, f"D2: {worker} is tried {since} ns after it failed"
            )
            return
        has_served = any(
            own.layer == slice_.layer and own.begin <= slice_.begin and slice_.end <= own.end
            for own in shown.right
        )
        self._require(has_served, f"D2: {worker} gets work on {slice_} and never served it")
        policy = self._policy
        down = policy.decision_period_ns * (policy.down_readings + 1) + policy.engaged_min_ns
        limit = max(down, policy.blind_local_ns) + policy.idle_timeout_ns + policy.tick_ns
        quiet = None if self._high_at is None else self._env.now - self._high_at
        self._require(
            quiet is not None and quiet <= limit,
            f"D4: {worker} gets work {quiet} ns after the last reading at the threshold",
        )

    def trial_ended(self, worker: WorkerId, *, is_failed: bool) -> None:
        """Its trial was answered and checked, or was not answered."""
        shown = self._of(worker)
        shown.trial_from = None
        if is_failed:
            shown.trial_failed_at = self._env.now

    def checked(self, worker: WorkerId, slice_: Slice, *, is_right: bool) -> None:
        """The coordinator compared an answer."""
        shown = self._of(worker)
        if is_right:
            shown.right.add(slice_)
        else:
            shown.right.clear()

    def condemned(self, worker: WorkerId) -> None:
        """Quarantined: what it has shown counts no longer."""
        self._of(worker).right.clear()
        self._of(worker).trial_from = None

    def settled(self, call: int, routed: int, summed: int) -> None:
        """A call is concluded: each of its pairs entered the sum exactly once."""
        self.checks += 1
        self._require(
            routed == summed, f"call {call}: {summed} pairs in the sum of {routed} routed"
        )

    def heard(self, worker: WorkerId) -> None:
        """The hub took a heartbeat in."""
        self._of(worker).heard_at = Nanos(self._env.now)

    def heard_at(self, worker: WorkerId) -> Nanos:
        """Its last heartbeat that the hub took in."""
        return self._of(worker).heard_at

    def lost(self, worker: WorkerId, ttl_ns: int) -> None:
        """The hub gave a worker up: by real time, it must have been silent so long."""
        self.checks += 1
        silent = self._env.now - self._of(worker).heard_at
        self._require(silent >= ttl_ns, f"M7, M10: {worker} is lost after {silent} ns of silence")

    def assigned(self, order: Assign) -> None:
        """The hub assigned a slice."""
        self.checks += 1
        size = order.slice.end - order.slice.begin
        is_sound = order.slice.layer in self._layers and 1 <= size <= self._policy.slice_experts_max
        self._require(is_sound, f"M2: {order.node} is assigned {order.slice}")
        self._require(0 <= order.scarcity <= 1, f"M1: scarcity is {order.scarcity}")

    def demanded(self, demand: Demand, *, counts_claims: bool) -> None:
        """The whole market at one moment."""
        for model in demand.models:
            for layer in model.layers:
                for run in layer.segments:
                    self.checks += 1
                    supply = run.replicas + (run.claimed if counts_claims else 0)
                    self._require(
                        0 <= run.scarcity <= 1 and (run.scarcity == 0) == (supply >= run.target),
                        f"M1: {run} of layer {layer.layer}",
                    )

    def _of(self, worker: WorkerId) -> _Shown:
        return self._shown.setdefault(worker, _Shown())

    def _require(self, holds: bool, message: str) -> None:
        if not holds:
            raise LawBroken(f"at {self._env.now / nanos(1):.3f} s: {message}")
