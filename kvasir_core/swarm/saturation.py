"""Is a coordinator saturated? Busy slots against a threshold, held for a dwell time.

Success of an action removes its own trigger (workers come, slots free up), so a threshold alone
flips. Rising needs consecutive high readings; falling needs consecutive low ones, counted from the
last high one. No data is not idle: a missing reading counts neither way, and a gap longer than a
reading is valid starts the count anew. Only after `blind_ns` without a good reading it falls.
"""

from typing import NamedTuple, Self

from kvasir_core.swarm.defaults import Rule, SwarmPolicy
from kvasir_core.swarm.words import Reading
from kvasir_core.units import Nanos


class Dwell(NamedTuple):
    """What it takes to rise and to fall."""

    up_readings: int  # Consecutive high readings...
    up_ns: int  # ...over at least this time.
    down_readings: int  # Consecutive low readings...
    down_ns: int  # ...this long after the last high one...
    held_ns: int  # ...and this long after rising.
    valid_ns: int  # A longer gap between good readings starts both counts anew.
    blind_ns: int  # No good reading for so long: fallen.


class Gauge:
    """A slot count's history, reduced to whether it is saturated."""

    __slots__ = (
        "_dwell", "_high_since", "_highs", "_low_since", "_lows", "_naive", "_risen_at",
        "_threshold", "busy", "changes", "is_saturated", "read_at", "slots",
    )  # fmt: skip

    def __init__(self, threshold: int, dwell: Dwell, rule: Rule = "dwell") -> None:
        self._threshold = threshold
        self._dwell = dwell
        self._naive = rule == "naive"
        self.busy = self.slots = 0  # Of the last good reading.
        self.read_at: Nanos | None = None
        self.is_saturated = False
        self.changes = 0
        self._highs = self._lows = 0
        self._high_since: Nanos | None = None
        self._low_since: Nanos | None = None  # The last high reading, or the first low one known.
        self._risen_at = Nanos(0)

    @classmethod
    def of_coordinator(cls, policy: SwarmPolicy) -> Self:
        dwell = Dwell(policy.up_readings, 0, policy.down_readings, 0, policy.engaged_min_ns,
                      policy.blind_local_ns, policy.blind_local_ns)  # fmt: skip
        return cls(policy.threshold, dwell, policy.rule)

    @classmethod
    def of_hub(cls, policy: SwarmPolicy) -> Self:
        dwell = Dwell(1, policy.hub_up_ns, 1, policy.hub_down_ns, 0,
                      policy.reading_valid_ns, policy.blind_base_ns)  # fmt: skip
        return cls(policy.threshold, dwell, policy.rule)

    def read(self, busy: int, slots: int, at: Nanos) -> None:
        """A good reading."""
        if self.read_at is not None and at - self.read_at > self._dwell.valid_ns:
            self._highs = self._lows = 0
            self._high_since = self._low_since = None
        self.busy, self.slots, self.read_at = busy, slots, at
        if busy >= self._threshold:
            self._highs, self._lows = self._highs + 1, 0
            self._high_since = at if self._high_since is None else self._high_since
            self._low_since = at
        else:
            self._lows, self._highs = self._lows + 1, 0
            self._low_since = at if self._low_since is None else self._low_since
            self._high_since = None
        self._decide(at)

    def is_blind(self, at: Nanos) -> bool:
        """No good reading for `blind_ns` (or none ever)."""
        return self.read_at is None or at - self.read_at >= self._dwell.blind_ns

    def look(self, at: Nanos) -> bool:
        """Whether it is saturated now; falls if it went blind."""
        if self.is_saturated and self.is_blind(at):
            self._set(False, at)
        return self.is_saturated

    def reading(self, at: Nanos) -> Reading:
        if self.read_at is None:
            return Reading.FAILED
        return Reading.OK if at - self.read_at < self._dwell.valid_ns else Reading.STALE

    def resume(self, at: Nanos) -> None:
        """Take up a saturated state from before a restart, as if last read now."""
        self.read_at = self._low_since = at
        self._set(True, at)

    def _decide(self, at: Nanos) -> None:
        dwell = self._dwell
        if self._naive:
            wanted = self._highs > 0
        elif self.is_saturated:
            wanted = not (
                self._low_since is not None
                and self._lows >= dwell.down_readings
                and at - self._low_since >= dwell.down_ns
                and at - self._risen_at >= dwell.held_ns
            )
        else:
            wanted = (
                self._high_since is not None
                and self._highs >= dwell.up_readings
                and at - self._high_since >= dwell.up_ns
            )
        if wanted != self.is_saturated:
            self._set(wanted, at)

    def _set(self, saturated: bool, at: Nanos) -> None:
        self.is_saturated = saturated
        self.changes += 1
        self._risen_at = at
        if not saturated:
            self._highs, self._high_since = 0, None
