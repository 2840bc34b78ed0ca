"""Layer 1: decides where the routed experts of one model run. Runs beside the router.

At rest everything is local: the fastest path per token. Under load, work goes to workers that have
shown that they can do it. The coordinator polls its own slots and fetches the hub's dispatch map by
its own clock; an answer that is late or missing blocks nothing and changes nothing until the last
good one is too old.

Absent by design: bytes, numbers and connections (a shell has them), and any trust in what a worker
or the hub says about ability.
"""

from collections.abc import Iterator, Sequence
from typing import assert_type

from kvasir_core.errors import IllegalEvent
from kvasir_core.events import TimePassed
from kvasir_core.swarm.calls import Calls
from kvasir_core.swarm.clock import AwakeClock
from kvasir_core.swarm.decisions import (
    CoordinatorDecision,
    Disengage,
    Engage,
    FetchMap,
    PollSlots,
    Report,
)
from kvasir_core.swarm.defaults import SwarmPolicy
from kvasir_core.swarm.engagement import Engagement
from kvasir_core.swarm.events import (
    AnswerArrived,
    AnswerChecked,
    AnswerFailed,
    CoordinatorEvent,
    ExpertsRouted,
    MapFetched,
    MapFetchFailed,
    MapRow,
    ServedRow,
    SlotsPolled,
    SlotsPollFailed,
    StageMeasured,
    WorkerAttached,
    WorkerDetached,
)
from kvasir_core.swarm.polling import Poller, PollIds
from kvasir_core.swarm.refusal import (
    COUNT_MAX,
    Refused,
    check_flag,
    check_label,
    check_measure,
    check_slices,
    check_whole,
)
from kvasir_core.swarm.roster import Roster
from kvasir_core.swarm.standing import Worker
from kvasir_core.swarm.statistics import CoordinatorStatistics, SliceStatistics
from kvasir_core.swarm.words import Chance, Failure, Session, Slice, Standing, WorkerId
from kvasir_core.units import Nanos

Decisions = list[CoordinatorDecision]

SLICES_MAX = 4096  # Of one worker: 64 layers in 64 pieces.
MAP_ROWS_MAX = 1 << 18
EXPERTS_MAX = 1 << 16  # Of one layer.


class Coordinator:
    """Where each expert call's pairs are computed.

    Args:
        policy: The numbers.
        chance: A seeded `random.Random`; decides which answers are checked, after they arrived.
    """

    def __init__(self, policy: SwarmPolicy, chance: Chance) -> None:
        self._policy = policy
        self._clock = AwakeClock(policy.silence_max_ns)
        self._roster = Roster(policy)
        self._calls = Calls(policy, chance, self._roster)
        self._engagement = Engagement(policy)
        self._slots = Poller(PollIds(), policy.decision_period_ns, policy.self_poll_max_ns)
        self._map = Poller(PollIds(), policy.map_period_ns, policy.map_fetch_max_ns)
        self._map_rows: tuple[MapRow, ...] = ()
        self._map_sessions: dict[WorkerId, Session] = {}
        self._map_at: Nanos | None = None  # When the last good map was asked for.
        self._report_at = self._report_all_at = Nanos(0)
        self._call_last = -1
        self._ask_at = Nanos(0)

    def handle(self, event: CoordinatorEvent, now: Nanos) -> Decisions:
        """Take a fact, return orders.

        Raises:
            IllegalEvent: It cannot have happened; nothing has changed. `Refused` if a peer's
                input is to blame.
        """
        self._check(event)
        at = self._clock.advance(now)
        calls = self._calls
        calls.shell_offset = self._clock.in_shell(Nanos(0))
        decisions = calls.run_timers(Nanos(at - 1))  # What is due at this instant comes after it.
        decisions += self._follow_gauge(at)
        self._expire_map(at)
        decisions += self._apply(event, at)
        decisions += self._follow_gauge(at)
        decisions += calls.run_timers(at)
        if at >= self._ask_at:
            decisions += self._ask(at)
        assert calls.is_consistent
        return decisions

    def next_wakeup(self) -> Nanos:
        """When to send `TimePassed` at the latest: within a tick, always."""
        at = min(self._clock.now + self._policy.tick_ns, self._ask_at)
        for due in (self._calls.next_timer, self._engagement.blind_at):
            if due is not None:
                at = min(at, due)
        return self._clock.in_shell(Nanos(max(at, self._clock.now)))

    def statistics(self) -> CoordinatorStatistics:
        at = self._clock.now
        gauge = self._engagement.gauge
        workers = self._roster.workers.values()
        return CoordinatorStatistics(
            is_engaged=self._engagement.is_engaged,
            engagements=self._engagement.changes,
            threshold=self._policy.threshold,
            busy=gauge.busy,
            slots=gauge.slots,
            reading=gauge.reading(at),
            reading_age_ns=None if gauge.read_at is None else Nanos(at - gauge.read_at),
            polls_missed=self._slots.missed,
            map_age_ns=None if self._map_at is None else Nanos(at - self._map_at),
            maps_missed=self._map.missed,
            workers_known=len(self._roster.workers),
            workers_attached=sum(worker.is_attached for worker in workers),
            slices=tuple(
                _slice_statistics(w, s, at) for w in workers for s in w.slices or w.proven
            ),
            calls=self._calls.statistics(),
            clock_jumps=self._clock.jumps,
        )

    def standings(self) -> Iterator[tuple[WorkerId, Standing]]:
        """Of every slice of every worker that is known, as `statistics` has them."""
        at = self._clock.now
        for worker in self._roster.workers.values():
            for slice_ in worker.slices or worker.proven:
                yield worker.id, worker.standing(slice_, at)

    def check_invariants(self) -> None:
        """The full check, O(n): for tests, and every 1,000th event."""
        self._calls.check_invariants()
        self._roster.check_layers()
        assert self._calls.is_engaged == self._engagement.is_engaged

    def _check(self, event: CoordinatorEvent) -> None:
        """Raise if it cannot have happened. Changes nothing."""
        match event:
            case ExpertsRouted():
                self._check_routed(event)
            case AnswerArrived():
                check_flag("is_shaped", event.is_shaped)
                check_measure("norm_ratio", event.norm_ratio)
            case AnswerChecked():
                check_measure("error", event.error)
            case AnswerFailed():
                if type(event.why) is not Failure:
                    raise Refused("malformed", f"why is {event.why!r:.60}; it must be a Failure")
            case SlotsPolled():
                self._slots.ids.check(event.poll)
                check_whole("busy", event.busy)
                check_whole("slots", event.slots, event.busy)
            case SlotsPollFailed():
                self._slots.ids.check(event.poll)
            case MapFetched():
                self._map.ids.check(event.fetch)
                self._check_map(event.rows)
            case MapFetchFailed():
                self._map.ids.check(event.fetch)
            case WorkerAttached():
                _check_worker(event.worker, event.session, event.slices)
                self._roster.check_room((event.worker,), self._clock.now)
            case WorkerDetached():
                check_label("worker", event.worker)
                check_whole("session", event.session)
            case StageMeasured():
                for name, value in zip(event._fields, event, strict=True):
                    check_whole(name, value, high=1 << 62)
            case TimePassed():
                pass
            case _:
                raise IllegalEvent(f"{event!r:.200} is no event of the coordinator")

    def _check_routed(self, event: ExpertsRouted) -> None:
        if event.call <= self._call_last:
            raise IllegalEvent(f"call {event.call} is not above the last one, {self._call_last}")
        if not event.pairs:
            raise IllegalEvent(f"call {event.call} has no pairs")
        last = -1
        for expert, count in event.pairs:
            if not last < expert < EXPERTS_MAX or not 1 <= count <= COUNT_MAX:
                raise IllegalEvent(
                    f"call {event.call}: expert {expert} with {count} pairs after expert {last}; "
                    f"experts ascend below {EXPERTS_MAX}, pairs are 1 to {COUNT_MAX}"
                )
            last = expert

    def _check_map(self, rows: tuple[MapRow, ...]) -> None:
        if rows == self._map_rows:
            return
        if len(rows) > MAP_ROWS_MAX:
            raise Refused("malformed", f"the map has {len(rows)} rows; at most {MAP_ROWS_MAX}")
        for worker, (session, slices) in _by_worker(rows).items():
            _check_worker(worker, session, tuple(slices))
            if any(row.session != session for row in rows if row.worker == worker):
                raise Refused("malformed", f"the map has two sessions of worker {worker!r}")
        self._roster.check_room([row.worker for row in rows], self._clock.now)

    def _apply(self, event: CoordinatorEvent, at: Nanos) -> Decisions:
        match event:
            case ExpertsRouted():
                self._call_last = event.call
                return self._calls.route(event, at)
            case AnswerArrived():
                return self._calls.answer(event, at)
            case AnswerChecked():
                return self._calls.check(event, at)
            case AnswerFailed():
                return self._calls.fail(event, at)
            case SlotsPolled():
                if self._slots.take(event.poll, at, is_good=True) is not None:
                    self._engagement.gauge.read(event.busy, event.slots, at)
            case SlotsPollFailed():
                self._slots.take(event.poll, at, is_good=False)
            case MapFetched():
                return self._take_map(event, at)
            case MapFetchFailed():
                self._map.take(event.fetch, at, is_good=False)
            case WorkerAttached():
                self._roster.make_room((event.worker,), at)
                return self._attach(event.worker, event.session, event.slices, at)
            case WorkerDetached():
                return self._detach(event.worker, event.session, at)
            case StageMeasured():
                self._engagement.measure(*event, self._calls.pairs_accepted, at)
            case _:
                assert_type(event, TimePassed)
        return []

    def _follow_gauge(self, at: Nanos) -> Decisions:
        change = self._engagement.look(at)
        if change is None:
            return []
        self._calls.is_engaged = self._engagement.is_engaged
        if change == "engaged":
            return [Engage()]
        if change == "blind":  # Local at once: what it knew of the load is too old.
            for worker in self._roster.workers.values():
                worker.engaged_at = None
        return [Disengage(change)]

    def _take_map(self, event: MapFetched, at: Nanos) -> Decisions:
        """The map is authoritative for whom it named before and names now."""
        asked_at = self._map.take(event.fetch, at, is_good=True)
        if asked_at is None:
            return []
        self._map_at = asked_at
        if event.rows == self._map_rows:
            return []
        named = _by_worker(event.rows)
        for worker, session in self._map_sessions.items():
            if worker not in named:
                self._roster.drop(worker, session)  # What is in the air may still be answered.
        decisions: Decisions = []
        self._roster.make_room(list(named), at)
        for worker, (session, slices) in named.items():
            decisions += self._attach(worker, session, slices, at)
        self._map_rows = event.rows
        self._map_sessions = {worker: session for worker, (session, _) in named.items()}
        return decisions

    def _expire_map(self, at: Nanos) -> None:
        """A hub outage keeps the last good map until its own time to live is over."""
        if self._map_at is not None and at - self._map_at > self._policy.map_ttl_ns:
            for worker, session in self._map_sessions.items():
                self._roster.drop(worker, session)
            self._map_at = None
            self._map_rows = ()
            self._map_sessions = {}

    def _attach(
        self, worker: WorkerId, session: Session, slices: Sequence[Slice], at: Nanos
    ) -> Decisions:
        before = self._roster.workers.get(worker)
        session_before = before.session if before else session
        if not self._roster.attach(worker, session, [Slice(*s) for s in slices]):
            return []
        record = self._roster.workers[worker]
        self._calls.changed[worker] = None
        if session == session_before:
            return []
        return self._calls.lose_worker(record, at)  # The old connection's calls went with it.

    def _detach(self, worker: WorkerId, session: Session, at: Nanos) -> Decisions:
        record = self._roster.detach(worker, session)
        return [] if record is None else self._calls.lose_worker(record, at)

    def _ask(self, at: Nanos) -> Decisions:
        """Polls and reports that are due."""
        decisions: Decisions = []
        if at >= self._slots.due_at:
            decisions.append(PollSlots(self._slots.ask(at)))
        if at >= self._map.due_at:
            decisions.append(FetchMap(self._map.ask(at)))
        if at >= self._report_at:
            decisions += self._report(at)
        self._ask_at = min(self._slots.due_at, self._map.due_at, self._report_at)
        return decisions

    def _report(self, at: Nanos) -> Decisions:
        workers = self._roster.workers
        if at >= self._report_all_at:
            self._report_all_at = Nanos(at + self._policy.report_all_ns)
            self._calls.changed.update(dict.fromkeys(n for n, w in workers.items() if w.slices))
        rows = []
        for name in self._calls.changed:
            worker = workers.get(name)
            if worker is not None:
                rows += [_served_row(worker, slice_, at) for slice_ in worker.slices]
                worker.served.clear()
        self._calls.changed.clear()
        self._report_at = Nanos(at + self._policy.report_period_ns)
        return [Report(tuple(rows))] if rows else []


def _by_worker(rows: Sequence[MapRow]) -> dict[WorkerId, tuple[Session, list[Slice]]]:
    named: dict[WorkerId, tuple[Session, list[Slice]]] = {}
    for worker, session, layer, begin, end in rows:
        named.setdefault(worker, (session, []))[1].append(Slice(layer, begin, end))
    return named


def _check_worker(worker: WorkerId, session: Session, slices: tuple[Slice, ...]) -> None:
    check_label("worker", worker)
    check_whole("session", session)
    check_slices(f"slices of {worker!r}", slices, SLICES_MAX)


def _slice_statistics(worker: Worker, slice_: Slice, at: Nanos) -> SliceStatistics:
    return SliceStatistics(
        worker=worker.id,
        session=worker.session,
        layer=slice_.layer,
        experts=(slice_.begin, slice_.end),
        standing=worker.standing(slice_, at),
        last_serve_ms=worker.proven.get(slice_, 0),
        pairs_per_s=worker.rate,
        answers=worker.answers,
        in_flight=worker.in_flight,
    )


def _served_row(worker: Worker, slice_: Slice, at: Nanos) -> ServedRow:
    return ServedRow(
        worker.id, *slice_, worker.standing(slice_, at),
        worker.proven.get(slice_, 0), worker.served.get(slice_, 0),
    )  # fmt: skip
