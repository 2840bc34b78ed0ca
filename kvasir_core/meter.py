"""One stage's time, split exactly: busy + blocked + starved = elapsed (law R11).

A stage holds a micro-batch from its start until it is sent: *busy* while computing, *blocked* while
it waits with it (no credit downstream, or expert results outstanding). Otherwise it is *starved*,
and the gap is split by cause. The meter is fed finished executions in the stage's order, many at a
time, so that a simulator pays for it once per thousands of micro-batches.
"""

from collections.abc import Sequence
from itertools import chain

from kvasir_core.causes import NEVER, Cause, CauseClock
from kvasir_core.units import Nanos


class StageMeter:
    """Accumulates one stage's time from `since`; all figures are nanoseconds."""

    __slots__ = (
        "accounted_until", "blocked_by_credit_ns", "blocked_by_experts_ns", "busy_ns",
        "micro_batches", "rows", "since", "starved_by_ns",
    )  # fmt: skip

    def __init__(self, since: Nanos = Nanos(0)) -> None:
        self.since = since
        self.accounted_until = since
        self.busy_ns = 0
        self.blocked_by_credit_ns = 0
        self.blocked_by_experts_ns = 0
        self.starved_by_ns: dict[Cause, int] = dict.fromkeys(Cause, 0)
        self.micro_batches = 0
        self.rows = 0

    @property
    def blocked_ns(self) -> int:
        return self.blocked_by_credit_ns + self.blocked_by_experts_ns

    @property
    def starved_ns(self) -> int:
        return sum(self.starved_by_ns.values())

    @property
    def elapsed_ns(self) -> int:
        return self.accounted_until - self.since

    def add(
        self,
        started: Sequence[int],
        ended: Sequence[int],
        sent: Sequence[int],
        composed: Sequence[int],
        clock: CauseClock,
    ) -> None:
        """Account consecutive executions: computed in `[started, ended)`, held until `sent`.

        Args:
            started: Start of each execution, ascending and not before the previous `sent`.
            ended: End of its computation.
            sent: When it left the stage.
            composed: When the head composed that micro-batch.
            clock: The head's causes since the last drain.
        """
        if not started:
            return
        gaps = zip(chain((self.accounted_until,), sent), started, composed, strict=False)
        self._starve(gaps, clock)
        self.busy_ns += sum(ended) - sum(started)
        self.blocked_by_credit_ns += sum(sent) - sum(ended)
        self.accounted_until = Nanos(sent[-1])
        self._check()

    def add_summed(
        self,
        *,
        busy_ns: int,
        blocked_ns: int,
        upstream_ns: int,
        waits: Sequence[tuple[int, int]],
        until: Nanos,
        clock: CauseClock,
    ) -> None:
        """Account consecutive executions up to `until`, as `add` does, of which the sums are known.

        Args:
            busy_ns: Time computed.
            blocked_ns: Time waited for a credit.
            upstream_ns: Time empty-handed after the next micro-batch was composed.
            waits: When it was empty-handed before that: `(free, composed or started)`, in order.
            until: When the last one was sent.
            clock: The head's causes since the last drain.
        """
        self.busy_ns += busy_ns
        self.blocked_by_credit_ns += blocked_ns
        self.starved_by_ns[Cause.UPSTREAM] += upstream_ns
        clock.split(waits, self.starved_by_ns)
        self.accounted_until = until
        self._check()

    def spend(
        self, state: str, start: Nanos, stop: Nanos, composed: Nanos, clock: CauseClock
    ) -> None:
        """Account one interval: `state` is `busy`, `credit` or `experts` (kinds of blocked).

        For stages that hold several micro-batches at once; intervals come in order of time and do
        not overlap (blocked only while every held micro-batch waits).
        """
        match state:
            case "busy":
                self.busy_ns += stop - start
            case "credit":
                self.blocked_by_credit_ns += stop - start
            case "experts":
                self.blocked_by_experts_ns += stop - start
            case _:
                raise ValueError(f"state is {state!r}; it must be busy, credit or experts")
        self._starve([(self.accounted_until, start, composed)], clock)
        self.accounted_until = stop
        self._check()

    def close(self, now: Nanos, clock: CauseClock) -> None:
        """Account the time up to `now`, in which the stage was empty-handed."""
        self._starve([(self.accounted_until, now, NEVER)], clock)
        self.accounted_until = max(self.accounted_until, now)
        self._check()

    def _starve(
        self, gaps: "zip[tuple[int, int, int]] | list[tuple[int, int, int]]", clock: CauseClock
    ) -> None:
        before: list[tuple[int, int]] = []
        upstream = 0
        for free, start, composed in gaps:
            if start <= free:
                continue
            if composed <= free:
                upstream += start - free
            elif composed >= start:
                before.append((free, start))
            else:
                upstream += start - composed
                before.append((free, composed))
        self.starved_by_ns[Cause.UPSTREAM] += upstream
        clock.split(before, self.starved_by_ns)

    def _check(self) -> None:
        total = self.busy_ns + self.blocked_ns + self.starved_ns
        assert total == self.elapsed_ns, f"{total} ns accounted of {self.elapsed_ns}"
