"""An honest but chaotic shell: legal events in any order, each judged by the naive model.

`HonestShell` knows which laps and releases may come back now; whoever drives it (Hypothesis, or a
seeded `random.Random`) chooses among them. It writes the event log and keeps all decisions.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from kvasir_core import (
    FinishReason,
    LapEnded,
    MicroBatch,
    Nanos,
    Plan,
    Release,
    ReleaseEnded,
    RequestArrived,
    RequestCancelled,
    RequestId,
    Ring,
    RingDecision,
    RingEvent,
    StageLost,
    StageReady,
    StageTimesMeasured,
    TimePassed,
)
from kvasir_core.eventlog import encode
from kvasir_core.packers import PACKERS
from kvasir_core.queues import Predict
from tests.core.naive_ring import NaiveRing
from tests.core.stories import plan_of

REASONS = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.FAILED, FinishReason.STOP)


@dataclass(frozen=True)
class LinearCost:
    """A hold that never falls with rows: what `cohort` may be given as its cost model."""

    fixed: int
    row: int
    context: int  # Per 8 rows of context, and per row of a chunk at that context.

    def __call__(self, decodes: int, decode_context: int, chunk_rows: int, chunk_start: int) -> int:
        reads = decode_context + chunk_rows * chunk_start
        return self.fixed + self.row * (decodes + chunk_rows) + self.context * reads // 8


class HonestShell:
    """Drives one ring. `overlaps`: laps may overtake each other, but no request's own rows."""

    def __init__(self, plan: Plan, *, predict: Predict | None = None, overlaps: bool) -> None:
        self.plan = plan
        self.predict = predict
        self.overlaps = overlaps
        self.ring = Ring(plan, predict=predict)
        self.model = NaiveRing(plan)
        self.log: list[str] = []
        self.decisions: list[list[RingDecision]] = []
        self.next_id = 0
        self.is_sound = True

    def tell(self, event: RingEvent, after_ns: int = 0) -> None:
        now = Nanos(self.ring.now + after_ns)
        self.log.append(encode(event, now))
        self.is_sound = False
        expected = self.model.expect(event, now)
        orders = self.ring.handle(event, now)
        self.decisions.append(list(orders))
        assert orders[: len(expected)] == expected, event
        self.model.judge(orders[len(expected) :])
        self.ring.check()
        self.model.settle(self.ring)
        self.is_sound = True

    # ------------------------------------------------------------------ legal moves

    def arrive(self, prompt: int, output: int, cached: int = 0, after_ns: int = 0) -> None:
        request = RequestId(self.next_id)
        self.next_id += 1
        self.tell(RequestArrived(request, prompt, output, min(cached, prompt - 1)), after_ns)

    def laps(self) -> list[MicroBatch]:
        """Micro-batches that may come back now."""
        open_ = list(self.model.open.values())
        if not self.overlaps:
            return open_[:1]
        before: set[RequestId] = set()
        legal = []
        for batch in open_:
            if before.isdisjoint(batch.requests):
                legal.append(batch)
            before.update(batch.requests)
        return legal

    def lap(self, choice: int, stop: int = 0, after_ns: int = 0) -> None:
        """One lap ends; bit k of `stop`: the token of output row k is a stop."""
        laps = self.laps()
        batch = laps[choice % len(laps)]
        stopped = tuple(r for k, r in enumerate(batch.outputs) if stop >> k & 1)
        self.tell(LapEnded(batch.id, self.model.epoch, stopped), after_ns)

    def releases(self) -> list[Release]:
        """Releases that may be back: no open micro-batch carries rows of their requests."""
        flying = {request for batch in self.model.open.values() for request in batch.requests}
        return [order for order in self.model.releases if flying.isdisjoint(order.requests)]

    def release(self, choice: int, after_ns: int = 0) -> None:
        releases = self.releases()
        order = releases[choice % len(releases)]
        self.model.releases.remove(order)
        self.tell(ReleaseEnded(order.requests, order.epoch), after_ns)

    def cancel(self, request: RequestId, reason: FinishReason, after_ns: int = 0) -> None:
        self.tell(RequestCancelled(request, reason), after_ns)

    def lose(self, stage: int, after_ns: int = 0) -> None:
        self.tell(StageLost(stage % self.plan.stages), after_ns)

    def recover(self, choice: int, after_ns: int = 0) -> None:
        lost = sorted(self.model.lost)
        self.tell(StageReady(lost[choice % len(lost)]), after_ns)

    def measure(self, longest: int, rest: int, link: int, after_ns: int = 0) -> None:
        stages = self.plan.stages
        holds = (longest, *[rest] * (stages - 1))
        times = StageTimesMeasured(
            tuple(map(Nanos, holds)), (Nanos(link),) * stages, Nanos(rest), Nanos(link)
        )
        self.tell(times, after_ns)

    def wait(self, after_ns: int) -> None:
        self.tell(TimePassed(), after_ns)

    def wake(self) -> None:
        """The time that the ring asked for has come."""
        wakeup = self.ring.next_wakeup()
        assert wakeup is not None
        self.tell(TimePassed(), wakeup - self.ring.now)

    # ------------------------------------------------------------------ liveness

    def drain(self) -> None:
        """Every fault heals, every lap and release comes back: everything must end."""
        rows = sum(request.prompt + request.output_max for request in self.model.live)
        for _ in range(1000 + 20 * rows):
            if self.model.lost:
                self.recover(0)
            elif self.laps():
                self.lap(0)
            elif self.releases():
                self.release(0)
            elif self.ring.next_wakeup() is not None:
                self.wake()
            else:
                break
        assert not self.model.live, "the ring hangs"
        assert self.ring.is_idle, "a block is lost"  # R13
        for request in self.model.past:
            assert request.ended_ns is not None


def random_plan(chance: random.Random, packer: str) -> Plan:
    """A small plan: every limit binds now and then."""
    context = chance.choice([8, 24, 48])
    is_chunked = chance.random() < 0.8
    window = chance.randint(1, 4)
    block = chance.choice([1, 2, 4])
    return plan_of(
        packer,
        stages=chance.randint(2, 3),
        row_width=chance.randint(1, 16) if is_chunked else context + chance.randint(0, 4),
        micro_batch_width=chance.choice([1, 2, 3, 5, 16]),
        window=window,
        window_max=window + chance.randint(0, 3),
        window_auto=chance.random() < 0.3,
        running_max=chance.choice([1, 3, 6, 64]),
        context=context,
        kv_tokens=block
        * chance.randint(context // block // 2 + 1, 3 * context // block)
        * chance.choice([1, 1, 9]),
        kv_block=block,
        chunked_prefill=is_chunked,
        prefill_rows_max=chance.choice([None, None, 1, 3]),
        cohort_wait_ns=chance.choice([0, 20]),
    )


def random_run(seed: int, events: int, *, packer: str | None = None) -> HonestShell:
    """A run that depends on the seed alone, drained at its end."""
    chance = random.Random(seed)
    plan = random_plan(chance, packer or sorted(PACKERS)[seed % len(PACKERS)])
    predict = chance.choice([None, LinearCost(9, 2, 1)])
    shell = HonestShell(plan, predict=predict, overlaps=chance.random() < 0.3)
    for _ in range(events):
        random_move(shell, chance)()
    shell.drain()
    return shell


def random_move(shell: HonestShell, chance: random.Random) -> Callable[[], None]:
    """One legal move, laps and arrivals most of all."""
    any_, dt, context = chance.randrange(1000), chance.randint(0, 4), shell.plan.context
    prompt, output = chance.randint(1, context // 2), chance.randint(1, context // 2 + 2)
    roll = chance.random()
    if roll < 0.02:
        return lambda: shell.lose(any_, dt)
    if shell.model.lost and roll < 0.3:
        return lambda: shell.recover(any_, dt)
    live = shell.model.live
    if live and roll < 0.06:
        request = live[any_ % len(live)].id
        return lambda: shell.cancel(request, REASONS[any_ % len(REASONS)], dt)
    if roll < 0.08:
        return lambda: shell.measure(1 + any_ % 7, any_ % 5, any_ % 11, dt)
    if shell.ring.next_wakeup() is not None and roll < 0.3:
        return shell.wake
    if shell.releases() and roll < 0.4:
        return lambda: shell.release(any_, dt)
    if shell.laps() and roll < 0.85:
        return lambda: shell.lap(any_, any_ if any_ < 60 else 0, dt)
    return lambda: shell.arrive(prompt, output, any_ % 7 if any_ % 3 == 0 else 0, dt)
