"""Every number of the swarm's policy, with its reason, in one frozen dataclass."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Self

from kvasir_core.units import NANOS_PER_SECOND, Nanos, nanos

Rule = Literal["dwell", "naive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmPolicy:
    """Defaults of both layers. A limit holds *at* its value; what comes "after X" comes at X."""

    # Saturation, both layers.
    rule: Rule = "dwell"  # "naive" = the threshold alone: flips 92-297 times an hour.
    threshold: int = 2  # Busy slots; one busy slot is a single user, whom local serves best.

    # Coordinator: readings of its own slots.
    decision_period_ns: Nanos = nanos(3)  # Two readings are then 6 s: shorter than patience.
    self_poll_max_ns: Nanos = nanos(1)  # A local answer that takes longer is no answer.
    up_readings: int = 2  # One high reading is a spike.
    down_readings: int = 10  # 30 s below: a lull between two users' turns is shorter.
    engaged_min_ns: Nanos = nanos(60)  # Workers' caches and links are warm; do not waste them.
    blind_local_ns: Nanos = nanos(30)  # Without a good reading for so long: local.

    # Coordinator: when a worker may serve.
    idle_timeout_ns: Nanos = nanos(20)  # Serve TTL past the last engaged dispatch.
    grace_ns: Nanos = nanos(15)  # From the first routable request after the first attach.
    trial_backoff_ns: Nanos = nanos(60)  # x 2^k after failed trial k = 0, 1, 2, ...
    trial_pairs_max: int = 64  # A trial's answer is recomputed; this bounds what it costs.
    failures_max: int = 2  # One lost answer is the network's, two in a row are the worker's.
    breaker_ns: Nanos = nanos(5)  # Suspect for so long, doubling, before it is tried again.
    breaker_max_ns: Nanos = nanos(300)  # A worker that recovers is found within five minutes.
    quarantine_ns: Nanos = nanos(600)  # x 2^q: a wrong number costs more than a late one.
    in_flight_max: int = 32  # Calls one worker holds: a stalled one then holds no more.
    workers_max: int = 4096  # Identities remembered; those gone and blameless leave first.
    map_period_ns: Nanos = nanos(5)  # A recruit is wired in within one of these.
    map_fetch_max_ns: Nanos = nanos(4)  # As the hub's own polls.
    map_ttl_ns: Nanos = nanos(120)  # A hub outage keeps the last map so long (coverage TTL).
    report_period_ns: Nanos = nanos(3)  # Standing that changed goes to the hub so soon.
    report_all_ns: Nanos = nanos(60)  # All of it so often: a lost report heals.

    # Coordinator: one call.
    call_deadline_ns: Nanos = nanos(2)  # Total, hedge included; then everything left is local.
    hedge_min_ns: Nanos = nanos(0.01)  # Below this, jitter of a local network would hedge.
    answers_checked_first: int = 20  # Every one of a worker's first answers is recomputed.
    check_share: float = 0.02  # Then max(this, 1 / answers so far), decided after it arrived.
    tolerance: float = 5e-3  # Relative L2 of the worst row; f32 1e-4, f16 5e-3, bf16 1e-2.
    norm_ratio_max: float = 1e6  # Largest output row norm over input row norm; above: overflow.
    check_report_max_ns: Nanos = nanos(30)  # The shell reports a check's error within this.
    no_gain_ns: Nanos = nanos(60)  # Remote help measured as no gain for so long: disengage.
    no_gain_hold_ns: Nanos = nanos(300)  # And stay local so long (the hub's down dwell).

    # Hub: readings of the coordinators' slots.
    poll_period_ns: Nanos = nanos(10)  # Three readings within the up dwell.
    poll_max_ns: Nanos = nanos(4)  # Total; a hung coordinator then costs one reading.
    reading_valid_ns: Nanos = nanos(45)  # Older: the state freezes.
    blind_base_ns: Nanos = nanos(300)  # No good reading for so long: base.
    hub_up_ns: Nanos = nanos(30)  # A download is dear: not for a short peak.
    hub_down_ns: Nanos = nanos(300)  # Since the last high reading.

    # Hub: the market.
    base: int = 2  # One replica may leave and every expert is still served.
    boost: int = 1  # More while recruiting; the target jumps, it does not step.
    coverage_ttl_ns: Nanos = nanos(120)  # Eight heartbeats.
    heartbeat_ns: Nanos = nanos(15)  # What workers are told.
    volunteer_period_ns: Nanos = nanos(45)  # Jittered by a fifth, so that a herd spreads out.
    claim_ttl_ns: Nanos = nanos(120)  # Time to download a slice; also the quiet after a restart.
    slice_experts_max: int = 64  # A download of this size ends within a claim.
    slice_grain: int = 8  # Boundaries fall on multiples where budgets allow: they align.
    idle_exit_ns: Nanos = nanos(600)  # No dispatch for so long and not needed for the base.
    release_period_ns: Nanos = nanos(30)  # At most a quarter of the surplus leaves in one.
    ban_ns: Nanos = nanos(600)  # A liar is offered nothing so long after the last report.
    counts_claims: bool = True  # False: as naive markets do (up to 24 recruits above target).
    prefers_held: bool = True  # A slice on the volunteer's disk before a download.
    nodes_max: int = 10_000  # Workers with coverage or an open claim.

    # Both: time as the core lives it.
    tick_ns: Nanos = nanos(1)  # The shell calls at least so often...
    silence_max_ns: Nanos = nanos(4)  # ...so a longer silence was the shell's own sleep.

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            low = 0 if field.name in ("base", "boost") else 1
            if type(value) is int and value < low:
                raise ValueError(f"{field.name} is {value}; it must be at least {low}")
            if type(value) is float and not 0 < value < float("inf"):
                raise ValueError(f"{field.name} is {value}; it must be above 0 and finite")
        if self.rule not in ("dwell", "naive"):
            raise ValueError(f"rule is {self.rule!r}; it must be 'dwell' or 'naive'")
        if self.silence_max_ns < 2 * self.tick_ns:
            raise ValueError(
                f"silence_max_ns {self.silence_max_ns} must be at least twice tick_ns "
                f"{self.tick_ns}, or every late tick counts as a sleep"
            )

    def faster(self, divisor: int) -> Self:
        """The same policy with every time divided: for demonstrations that cannot wait.

        The time limits of single polls and calls stay: the network does not get faster.
        """
        keep = {"self_poll_max_ns", "poll_max_ns", "map_fetch_max_ns", "call_deadline_ns",
                "hedge_min_ns", "check_report_max_ns", "silence_max_ns"}  # fmt: skip
        times: dict[str, Any] = {
            field.name: Nanos(max(1, getattr(self, field.name) // divisor))
            for field in fields(self)
            if field.name.endswith("_ns") and field.name not in keep
        }
        return replace(self, **times)


TOLERANCES = {"f32": 1e-4, "f16": 5e-3, "bf16": 1e-2}
"""Relative L2 error of the worst row that the wire's number format may cause."""

SECOND = NANOS_PER_SECOND
