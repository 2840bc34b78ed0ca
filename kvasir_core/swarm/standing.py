"""One worker as the coordinator knows it. Ability is what it has shown, not what it registered.

    new --first routable request--> trial --checked result--> proven
    trial --late, failed, window over--> suspect (60 s x 2^k) --the coordinator's clock--> trial
    proven --late or failed twice running--> suspect (5 s x 2^n) --> tried again --> proven
    anything --a wrong number--> quarantined (600 s x 2^q) --> tried again, as if new
    detached: gone. The record stays, so reconnecting renews nothing.

Being proven is per slice (a worker may hold a good and a bad file); lateness, windows, backoff and
quarantine are the worker's, or each new slice would buy it another try.
"""

from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.words import Session, Slice, Standing, WorkerId
from kvasir_core.units import Nanos

NEVER = Session(-1)  # Below every generation.


class Worker:
    """The record of one identity. Times are the core's awake time."""

    __slots__ = (
        "answers", "breaks", "deviation_ns", "engaged_at", "failed_trials", "failures",
        "grace_from", "id", "in_flight", "is_attached", "is_on_trial", "is_suspect",
        "last_serve_ms", "mean_ns", "overdue", "policy", "proven", "quarantined_until",
        "quarantines", "rate", "retry_at", "sent_at", "served", "session",
        "session_closed", "slices",
    )  # fmt: skip

    def __init__(self, worker: WorkerId, policy: SwarmPolicy) -> None:
        self.id = worker
        self.policy = policy
        self.is_attached = False
        self.session = self.session_closed = NEVER
        self.slices: tuple[Slice, ...] = ()
        self.proven: dict[Slice, int] = {}  # last_serve_ms of each, set on a checked result only.
        self.served: dict[Slice, int] = {}  # Pairs dispatched since the last report.
        self.last_serve_ms = 0
        self.grace_from: Nanos | None = None
        self.retry_at = Nanos(0)  # No window opens before.
        self.failed_trials = 0
        self.is_on_trial = False
        self.failures = 0  # Consecutive.
        self.is_suspect = False
        self.breaks = 0  # Times it became suspect since it last passed a trial.
        self.quarantines = 0
        self.quarantined_until = Nanos(0)
        self.engaged_at: Nanos | None = None  # Last dispatch to it while engaged.
        self.answers = 0  # Since its last quarantine.
        self.rate = 0  # Pairs a second, measured.
        self.mean_ns = self.deviation_ns = 0  # Of its answers' times.
        self.in_flight = self.overdue = 0
        self.sent_at = Nanos(0)  # Last dispatch to it, whatever the reason.

    def standing(self, slice_: Slice, at: Nanos) -> Standing:
        if at < self.quarantined_until:
            return Standing.QUARANTINED
        if not self.is_attached:
            return Standing.GONE
        if self.is_suspect:
            return Standing.SUSPECT
        if slice_ in self.proven:
            return Standing.PROVEN
        if self.is_in_window(at):
            return Standing.TRIAL
        return Standing.SUSPECT if self.failed_trials or self.quarantines else Standing.NEW

    def is_trusted(self, slice_: Slice, at: Nanos) -> bool:
        """Proven, and not suspect or quarantined since."""
        return slice_ in self.proven and not self.is_suspect and at >= self.quarantined_until

    def is_in_window(self, at: Nanos) -> bool:
        return self.grace_from is not None and at - self.grace_from <= self.policy.grace_ns

    def open_window(self, at: Nanos) -> bool:
        """A routable request wants an unproven slice: is now inside a window of grace?

        Opens the first window, or the next one where the clock allows it. A window that ended
        without a result is followed by the same wait as a failed trial.
        """
        if self.grace_from is not None and not self.is_in_window(at):
            self._close_window(Nanos(self.grace_from + self.policy.grace_ns))
        if at < self.retry_at or at < self.quarantined_until:
            return False
        if self.grace_from is None:
            self.grace_from = at
        return True

    def pass_trial(self) -> None:
        self.is_on_trial = self.is_suspect = False
        self.failed_trials = self.failures = self.breaks = 0

    def fail_trial(self, at: Nanos) -> None:
        """The k-th failed trial (k = 0, 1, ...) closes the window for 60 s x 2^k."""
        self.is_on_trial = False
        if self.is_suspect:
            self._break(at)
        else:
            self._close_window(at)
            self.failed_trials += 1

    def prove(self, slice_: Slice, elapsed_ns: int) -> None:
        """A checked result. The only place that sets `last_serve_ms`."""
        self.last_serve_ms = max(1, elapsed_ns // 1_000_000)
        self.proven[slice_] = self.last_serve_ms

    def answered(self, pairs: int, elapsed_ns: int) -> None:
        """A sound answer in time: measure it."""
        self.failures = 0
        self.answers += 1
        elapsed_ns = max(1, elapsed_ns)
        rate = max(1, pairs * 1_000_000_000 // elapsed_ns)
        if self.answers == 1:
            self.rate, self.mean_ns, self.deviation_ns = rate, elapsed_ns, elapsed_ns // 2
            return
        self.rate += (rate - self.rate) // 2 if rate > self.rate else -((self.rate - rate) // 4)
        error = elapsed_ns - self.mean_ns  # Jacobson's estimator, as TCP's retransmission uses.
        self.mean_ns += error // 8
        self.deviation_ns += (abs(error) - self.deviation_ns) // 4

    def failed(self, at: Nanos) -> None:
        """Late or no answer to a real dispatch."""
        self.failures += 1
        if self.failures >= self.policy.failures_max and not self.is_suspect:
            self.is_suspect = True
            self._break(at)

    def quarantine(self, at: Nanos) -> Nanos:
        """Its numbers were wrong: nothing it showed counts any more. Returns for how long."""
        duration = Nanos(self.policy.quarantine_ns << self.quarantines)
        self.quarantines += 1
        self.quarantined_until = Nanos(at + duration)
        self.grace_from = None
        self.proven.clear()
        self.last_serve_ms = self.answers = self.failures = self.breaks = 0
        self.is_suspect = self.is_on_trial = False
        return duration

    def is_blameless(self, at: Nanos) -> bool:
        """Gone, and forgetting it gives it nothing that it did not have."""
        return (
            not self.is_attached
            and not self.in_flight
            and not self.is_on_trial
            and not self.is_in_window(at)
            and max(self.retry_at, self.quarantined_until) <= at
        )

    def _close_window(self, at: Nanos) -> None:
        self.grace_from = None
        self.retry_at = Nanos(at + (self.policy.trial_backoff_ns << self.failed_trials))

    def _break(self, at: Nanos) -> None:
        wait = min(self.policy.breaker_ns << self.breaks, self.policy.breaker_max_ns)
        self.breaks += 1
        self.grace_from = None
        self.retry_at = Nanos(at + wait)
