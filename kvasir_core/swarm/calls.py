"""The life of an expert call: split, dispatched, hedged, accepted or computed locally.

1. A router's pairs are split: those that proven, wanted workers hold become *parts*, one per
   slice; the rest is part 0, local. A trial is a copy of pairs beside the parts: waiting for an
   unproven worker costs nobody anything.
2. A part in the air is a *flight*. When it is overdue by the worker's own measure, the part is
   hedged: to another replica, or to the local path.
3. The first sound answer settles the part: accepted, or (sampled) computed locally and compared.
   At the deadline of the call what is left is computed locally.
4. Each part gets exactly one of `Accept` and `ComputeLocally`, so each pair enters the sum exactly
   once; when all have, `Conclude`. Flights outlive their parts: what a worker does with a part
   that is settled still tells whether it answers in time.
"""

from dataclasses import asdict, dataclass
from heapq import heappop, heappush

from kvasir_core.swarm.decisions import (
    Accept,
    ComputeLocally,
    Conclude,
    CoordinatorDecision,
    Dispatch,
    Hedge,
    Quarantine,
    Verify,
)
from kvasir_core.swarm.defaults import SECOND, SwarmPolicy
from kvasir_core.swarm.dispatch import split_pairs
from kvasir_core.swarm.events import AnswerArrived, AnswerChecked, AnswerFailed, ExpertsRouted
from kvasir_core.swarm.flights import Check, Flight, Part
from kvasir_core.swarm.roster import Roster
from kvasir_core.swarm.selection import choose, is_ready, replicas_of
from kvasir_core.swarm.standing import Worker
from kvasir_core.swarm.statistics import CallStatistics
from kvasir_core.swarm.verification import is_checked, is_right, is_sound
from kvasir_core.swarm.words import CallId, Chance, Failure, Share, Slice, WorkerId
from kvasir_core.units import Nanos

Decisions = list[CoordinatorDecision]
Key = tuple[CallId, int, WorkerId]


@dataclass(slots=True)
class _Counts:
    calls: int = 0
    pairs: int = 0
    pairs_accepted: int = 0
    pairs_verified: int = 0
    pairs_fallback: int = 0
    dispatches: int = 0
    trials: int = 0
    hedges: int = 0
    checks: int = 0
    mismatches: int = 0
    late: int = 0
    dropped: int = 0


class Calls:
    """Open calls. Times are awake time; `shell_offset` turns them into the shell's."""

    def __init__(self, policy: SwarmPolicy, chance: Chance, roster: Roster) -> None:
        self._policy = policy
        self._chance = chance
        self._roster = roster
        self._parts: dict[tuple[CallId, int], Part] = {}
        self._unsettled: dict[CallId, int] = {}
        self._flights: dict[Key, Flight] = {}
        self._checks: dict[Key, Check] = {}  # In the order in which they expire.
        self._timers: list[tuple[Nanos, int, bool, Flight]] = []  # When, order, is deadline.
        self._sequence = 0
        self._counts = _Counts()
        self.is_engaged = False
        self.shell_offset = 0
        self.changed: dict[WorkerId, None] = {}  # Workers whose report to the hub is due.

    @property
    def next_timer(self) -> Nanos | None:
        return self._timers[0][0] if self._timers else None

    @property
    def is_consistent(self) -> bool:
        """The cheap invariant: an unsettled call has parts, a part has a flight."""
        return len(self._unsettled) <= len(self._parts) <= len(self._flights)

    def statistics(self) -> CallStatistics:
        return CallStatistics(**asdict(self._counts))

    @property
    def pairs_accepted(self) -> int:
        return self._counts.pairs_accepted

    def route(self, event: ExpertsRouted, at: Nanos) -> Decisions:
        """Open a call."""
        self._counts.calls += 1
        self._counts.pairs += sum([count for _, count in event.pairs])
        call = event.call
        holders = self._roster.holders(event.layer)
        if not holders:
            everything = tuple([Share(expert, 0, count) for expert, count in event.pairs])
            return [ComputeLocally(call, 0, everything), Conclude(call)]
        chosen, trials = choose(holders, event.pairs, at, is_engaged=self.is_engaged)
        split = split_pairs(event.pairs, replicas_of(chosen, self._policy))
        decisions: Decisions = []
        number = 0
        for (slice_, worker), shares in zip(chosen, split[:-1], strict=True):
            if shares:
                number += 1
                self._open_part(call, number, tuple(shares), slice_, at)
                decisions.append(self._fly(call, number, worker, slice_, tuple(shares), at))
        if number:
            self._unsettled[call] = number
        for slice_, worker in trials:
            number += 1
            decisions.append(self._try(call, number, worker, slice_, event.pairs, at))
        if split[-1]:
            decisions.append(ComputeLocally(call, 0, tuple(split[-1])))
        if call not in self._unsettled:
            decisions.append(Conclude(call))
        return decisions

    def answer(self, event: AnswerArrived, at: Nanos) -> Decisions:
        flight = self._flight_of(event)
        if flight is None:
            return []
        worker = flight.worker
        if not is_sound(
            is_shaped=event.is_shaped, norm_ratio=event.norm_ratio, policy=self._policy
        ):
            return self._condemn(worker, at)
        self._end(flight)
        worker.answered(flight.pairs, at - flight.sent_at)
        part = self._parts.get((flight.call, flight.part))
        if flight.is_trial:
            return [self._verify(flight, at)]
        if part is None:
            self._counts.dropped += 1
            return []
        if is_checked(worker.answers, self._chance, self._policy):
            self._counts.pairs_verified += part.pairs
            return [self._verify(flight, at), *self._settle(part, None)]
        self._counts.pairs_accepted += part.pairs
        return self._settle(part, worker.id)

    def fail(self, event: AnswerFailed, at: Nanos) -> Decisions:
        flight = self._flight_of(event)
        if flight is None:
            return []
        return self._lose(flight, at, is_blamed=event.why is not Failure.BUSY)

    def check(self, event: AnswerChecked, at: Nanos) -> Decisions:
        key = (event.call, event.part, event.worker)
        check = self._checks.get(key)
        if check is None or check.session != event.session:
            self._counts.dropped += 1
            return []
        del self._checks[key]
        worker = check.worker
        if not is_right(event.error, self._policy):
            return self._condemn(worker, at)
        if check.is_trial:
            worker.pass_trial()
        worker.prove(check.slice, check.elapsed_ns)
        self.changed[worker.id] = None
        return []

    def lose_worker(self, worker: Worker, at: Nanos) -> Decisions:
        """Its connection is over: nothing in the air to it will be answered."""
        decisions: Decisions = []
        for flight in self._flights_to(worker):
            decisions += self._lose(flight, at, is_blamed=True)
        self.changed[worker.id] = None
        return decisions

    def run_timers(self, at: Nanos) -> Decisions:
        """Everything that is due by `at`: hedges, deadlines, checks nobody reported."""
        decisions: Decisions = []
        while self._timers and self._timers[0][0] <= at:
            _, _, is_deadline, flight = heappop(self._timers)
            if not flight.is_open:
                continue
            if is_deadline:
                self._counts.late += 1
                decisions += self._lose(flight, at, is_blamed=True)
                continue
            flight.is_overdue = True
            flight.worker.overdue += 1
            part = self._parts.get((flight.call, flight.part))
            if part is not None and not part.is_hedged:
                decisions += self._try_elsewhere(part, at)
        while self._checks and (check := next(iter(self._checks.values()))).expires_at <= at:
            del self._checks[check.key]
            check.worker.is_on_trial = check.worker.is_on_trial and not check.is_trial
        return decisions

    def check_invariants(self) -> None:
        """The O(n) check: parts, flights and workers agree."""
        for key, part in self._parts.items():
            flying = [f for f in self._flights.values() if (f.call, f.part) == key]
            assert part.flights == len(flying) > 0
            assert part.pairs == sum(share.pairs for share in part.shares)
        unsettled: dict[CallId, int] = {}
        for call, _ in self._parts:
            unsettled[call] = unsettled.get(call, 0) + 1
        assert unsettled == self._unsettled
        for worker in self._roster.workers.values():
            flights = self._flights_to(worker)
            assert worker.in_flight == len(flights) <= self._policy.in_flight_max + 1
            assert worker.overdue == sum(f.is_overdue for f in flights)
            trials = sum(f.is_trial for f in flights)
            trials += sum(c.is_trial and c.worker is worker for c in self._checks.values())
            assert worker.is_on_trial == (trials == 1)
            assert trials <= 1

    def _open_part(
        self, call: CallId, number: int, shares: tuple[Share, ...], slice_: Slice, at: Nanos
    ) -> None:
        pairs = sum([share.pairs for share in shares])
        deadline = Nanos(at + self._policy.call_deadline_ns)
        self._parts[call, number] = Part(call, number, slice_.layer, shares, pairs, deadline)

    def _fly(
        self, call: CallId, number: int, worker: Worker, slice_: Slice,
        shares: tuple[Share, ...], at: Nanos,
    ) -> Dispatch:  # fmt: skip
        """Put a part in the air to a trusted worker."""
        part = self._parts[call, number]
        part.flights += 1
        part.tried.append(worker.id)
        self._counts.dispatches += 1
        flight = self._launch(part.key, worker, slice_, part.pairs, part.deadline, at)
        if self.is_engaged:
            worker.engaged_at = at
        worker.served[slice_] = worker.served.get(slice_, 0) + part.pairs
        expected = max(
            self._policy.hedge_min_ns,
            worker.mean_ns + 4 * worker.deviation_ns,
            3 * part.pairs * SECOND // max(1, worker.rate),
        )
        self._time(Nanos(at + min(expected, (part.deadline - at) // 2)), flight, is_deadline=False)
        return Dispatch(
            call, number, worker.id, flight.session, slice_.layer, shares,
            Nanos(part.deadline + self.shell_offset), False,
        )  # fmt: skip

    def _try(
        self, call: CallId, number: int, worker: Worker, slice_: Slice,
        pairs: tuple[tuple[int, int], ...], at: Nanos,
    ) -> Dispatch:  # fmt: skip
        """Put a trial in the air: a copy of a few pairs of the slice."""
        left = self._policy.trial_pairs_max
        shares = []
        for expert, count in pairs:
            if slice_.begin <= expert < slice_.end and left:
                shares.append(Share(expert, 0, min(count, left)))
                left -= min(count, left)
        self._counts.trials += 1
        worker.is_on_trial = True
        deadline = Nanos(at + self._policy.call_deadline_ns)
        tried = self._policy.trial_pairs_max - left
        flight = self._launch((call, number), worker, slice_, tried, deadline, at, is_trial=True)
        return Dispatch(
            call, number, worker.id, flight.session, slice_.layer, tuple(shares),
            Nanos(deadline + self.shell_offset), True,
        )  # fmt: skip

    def _launch(
        self, part: tuple[CallId, int], worker: Worker, slice_: Slice, pairs: int,
        deadline: Nanos, at: Nanos, *, is_trial: bool = False,
    ) -> Flight:  # fmt: skip
        flight = Flight(*part, worker, worker.session, slice_, pairs, at, is_trial)
        self._flights[flight.key] = flight
        worker.in_flight += 1
        worker.sent_at = at
        self.changed[worker.id] = None
        self._time(deadline, flight, is_deadline=True)
        return flight

    def _time(self, when: Nanos, flight: Flight, *, is_deadline: bool) -> None:
        self._sequence += 1
        heappush(self._timers, (when, self._sequence, is_deadline, flight))

    def _flight_of(self, event: AnswerArrived | AnswerFailed) -> Flight | None:
        """What this answers, or None: unknown, over, or of another generation."""
        flight = self._flights.get((event.call, event.part, event.worker))
        if flight is None or flight.session != event.session:
            self._counts.dropped += 1
            return None
        return flight

    def _flights_to(self, worker: Worker) -> list[Flight]:
        return [flight for flight in self._flights.values() if flight.worker is worker]

    def _end(self, flight: Flight) -> None:
        """It is in the air no longer."""
        del self._flights[flight.key]
        flight.is_open = False
        flight.worker.in_flight -= 1
        flight.worker.overdue -= flight.is_overdue
        part = self._parts.get((flight.call, flight.part))
        if part is not None:
            part.flights -= 1

    def _lose(self, flight: Flight, at: Nanos, *, is_blamed: bool) -> Decisions:
        """It will not be answered."""
        self._end(flight)
        worker = flight.worker
        self.changed[worker.id] = None
        if flight.is_trial and is_blamed:
            worker.fail_trial(at)
        elif flight.is_trial:
            worker.is_on_trial = False
        elif is_blamed:
            worker.failed(at)
        part = self._parts.get((flight.call, flight.part))
        if part is None or part.flights:
            return []
        return self._try_elsewhere(part, at)

    def _try_elsewhere(self, part: Part, at: Nanos) -> Decisions:
        """Hedge the part to the fastest other replica of all of it, once; or compute it here."""
        if not part.is_hedged and part.deadline - at > self._policy.hedge_min_ns:
            part.is_hedged = True
            others = [
                (slice_, worker)
                for slice_, worker in self._roster.holders(part.layer)
                if worker.id not in part.tried
                and slice_.begin <= part.shares[0].expert
                and part.shares[-1].expert < slice_.end
                and is_ready(worker, slice_, at, is_engaged=self.is_engaged)
            ]
            if others:
                slice_, worker = max(others, key=lambda other: other[1].rate)
                self._counts.hedges += 1
                order = self._fly(part.call, part.number, worker, slice_, part.shares, at)
                return [Hedge(*order[:-1])]
        self._counts.pairs_fallback += part.pairs
        return self._settle(part, None)

    def _settle(self, part: Part, worker: WorkerId | None) -> Decisions:
        """The part's one and only way into the sum; the call's end if it was the last."""
        del self._parts[part.key]
        decisions: Decisions = [
            ComputeLocally(part.call, part.number, part.shares)
            if worker is None
            else Accept(part.call, part.number, worker)
        ]
        self._unsettled[part.call] -= 1
        if not self._unsettled[part.call]:
            del self._unsettled[part.call]
            decisions.append(Conclude(part.call))
        return decisions

    def _verify(self, flight: Flight, at: Nanos) -> Verify:
        self._counts.checks += 1
        check = Check(flight, at - flight.sent_at, Nanos(at + self._policy.check_report_max_ns))
        self._checks[check.key] = check
        return Verify(flight.call, flight.part, flight.worker.id, flight.session)

    def _condemn(self, worker: Worker, at: Nanos) -> Decisions:
        """Wrong numbers: everything of this worker in the air is dropped."""
        self._counts.mismatches += 1
        self.changed[worker.id] = None
        for check in [c for c in self._checks.values() if c.worker is worker]:
            del self._checks[check.key]
        flights = self._flights_to(worker)
        for flight in flights:
            self._end(flight)
        decisions: Decisions = [Quarantine(worker.id, worker.quarantine(at))]
        for flight in flights:
            part = self._parts.get((flight.call, flight.part))
            if part is not None and not part.flights:
                decisions += self._try_elsewhere(part, at)
        return decisions
