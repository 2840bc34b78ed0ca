"""The shell around the core's `Hub`: facts in, orders carried out, on one event loop.

Every accepted event goes to the event log; refused ones changed nothing and are not in it, so
`replay` gives the identical decisions. The hub's time is `time.monotonic_ns`. What the core says
must survive is handed to a writing thread every few seconds, if anything has happened.
"""

import asyncio
import contextvars
import logging
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from kvasir_core.events import TimePassed
from kvasir_core.swarm import Hub, SwarmPolicy
from kvasir_core.swarm.decisions import HubDecision, LoseWorker, PollCoordinator
from kvasir_core.swarm.events import (
    CoordinatorAttached,
    CoordinatorGone,
    HubEvent,
    ModelRegistered,
    SlotsPolled,
    SlotsPollFailed,
    StateRestored,
)
from kvasir_core.swarm.refusal import Refused
from kvasir_core.swarm.words import Chance, CoordinatorId, ModelName, WorkerId
from kvasir_core.units import NANOS_PER_SECOND, Nanos
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.poller import SlotsPoller, Target
from kvasir_rt.hub.record import Record
from kvasir_rt.hub.store import Store, StoreError
from kvasir_rt.logs import log_event
from kvasir_rt.swarm.event_log import EventLog

logger = logging.getLogger("kvasir.hub")

WRITE_S = 2.0  # A crash loses so much at most; see `store`.
FULL_CHECK_EVENTS = 1000
EVENTS_FLUSH_S = 1.0


class Control:
    """One hub, alive.

    Args:
        policy: The numbers.
        chance: A seeded `random.Random`.
        limits: Of polls.
        record: Takes what people ask about later.
        store: Where state is kept; None keeps nothing.
        events: The event log, open for writing.
        clock: Nanoseconds, monotonic.
    """

    def __init__(
        self,
        policy: SwarmPolicy,
        chance: Chance,
        *,
        limits: HubLimits,
        record: Record,
        store: Store | None = None,
        events: EventLog | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.policy = policy
        self.hub = Hub(policy, chance)
        self.record = record
        self.models: dict[ModelName, ModelRegistered] = {}
        self.targets: dict[CoordinatorId, Target] = {}
        self.seen: dict[WorkerId, bytes] = {}  # Proved themselves since the last write.
        self.segments: Counter[WorkerId] = Counter()  # Of live coverage.
        self.events_taken = 0
        self.store_problem = ""
        self._limits = limits
        self._store = store
        self._events = events
        self._clock = clock
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="hub-store")
        self._poller: SlotsPoller | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._is_changed = False
        self._is_closed = False
        self.broken = asyncio.Event()  # The core contradicted itself.

    async def start(self, restored: StateRestored | None = None) -> None:
        """Begin to poll, tick and write.

        Raises:
            Refused: The restored state contradicts itself.
        """
        limit_s = self.policy.poll_max_ns / NANOS_PER_SECOND
        self._poller = SlotsPoller(self._limits, limit_s, self._take_reading)
        if restored is not None:
            self.tell(restored)
            self.models.update({model.model: model for model in restored.models})
        else:
            self.tell(TimePassed())
        if self._store is not None:
            self._tasks.append(asyncio.create_task(self._keep_writing()))
        if self._events is not None:
            self._tasks.append(asyncio.create_task(self._keep_flushing(self._events)))

    async def close(self) -> None:
        """Stop everything; the state is written a last time, unless the core broke."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._poller is not None:
            await self._poller.close()
        if self._store is not None and not self.broken.is_set():
            await self._write(self._store, is_last=True)
        self._writer.shutdown()
        if self._events is not None:
            self._events.close()
            self._events = None

    def tell(self, event: HubEvent) -> list[HubDecision]:
        """A fact; its orders are carried out, and returned for the answer to who told it.

        Raises:
            Refused: A peer's input breaks a rule; nothing has changed.
        """
        now = Nanos(self._clock())
        try:
            decisions = self.hub.handle(event, now)
            if self._events is not None:
                self._events.write(event, now, decisions)
            self.events_taken += 1
            if self.events_taken % FULL_CHECK_EVENTS == 0:
                self.hub.check_invariants()
        except Refused:
            raise
        except Exception as error:
            self._break(event, now, error)
            raise
        if not isinstance(event, TimePassed):
            self._is_changed = True
        for decision in decisions:
            self._is_changed = True
            if isinstance(decision, PollCoordinator):
                self._ask(decision)
            else:
                self.record.note(decision)
            if isinstance(decision, LoseWorker):
                self.segments.pop(decision.worker, None)
        self._set_timer(now)
        return decisions

    def _break(self, event: HubEvent, now: Nanos, error: Exception) -> None:
        """The core contradicts itself, our bug: the hub ends, and starts anew from what is kept.

        The event log then ends with the event that did it.
        """
        if self.broken.is_set():
            return
        facts = {"fields": {"event": repr(event)}}
        logger.critical("the core broke; the hub ends", extra=facts, exc_info=error)
        self._events, events = None, self._events
        if events is not None:
            events.write(event, now)
            events.close()
        if self._timer is not None:
            self._timer.cancel()
        self._is_closed = True
        self.broken.set()

    def add_model(self, model: ModelRegistered) -> None:
        """Raises Refused: it is registered with other numbers."""
        self.tell(model)
        self.models[model.model] = model

    def add_coordinator(self, coordinator: CoordinatorId, model: ModelName, target: Target) -> None:
        """Poll this coordinator from now on; a known one may have moved.

        Raises:
            Refused: It serves another model already, or the model is unknown.
        """
        before = self.targets.get(coordinator)
        if before is not None and (before.origin, before.key) == (target.origin, target.key):
            target = before
        self.targets[coordinator] = target
        try:
            self.tell(CoordinatorAttached(coordinator, model, str(target.origin)))
        except BaseException:
            del self.targets[coordinator]
            if before is not None:
                self.targets[coordinator] = before
            raise
        if before is None:
            self.record.add("coordinator_attached", model=model, coordinator=coordinator)

    def drop_coordinator(self, coordinator: CoordinatorId, why: str) -> None:
        """Raises Refused: there is no such coordinator."""
        self.tell(CoordinatorGone(coordinator))
        del self.targets[coordinator]
        self.record.add("coordinator_gone", coordinator=coordinator, why=why)

    def _ask(self, order: PollCoordinator) -> None:
        assert self._poller is not None
        target = self.targets[order.coordinator]
        self._poller.ask(order.poll, order.coordinator, target)

    def _take_reading(self, event: SlotsPolled | SlotsPollFailed) -> None:
        self.tell(event)

    def _set_timer(self, now: Nanos) -> None:
        """`TimePassed` at the core's next wakeup; an earlier event sets it anew."""
        if self._timer is not None:
            self._timer.cancel()
        if self._is_closed:
            return
        delay_s = max(0, self.hub.next_wakeup() - now) / NANOS_PER_SECOND
        self._timer = asyncio.get_running_loop().call_later(
            delay_s, self.tell, TimePassed(), context=contextvars.Context()
        )  # A context of its own: what it does is not the doing of the request that set it.

    async def _keep_writing(self) -> None:
        assert self._store is not None
        while True:
            await asyncio.sleep(WRITE_S)
            if self._is_changed or self.seen:
                await self._write(self._store)

    async def _write(self, store: Store, *, is_last: bool = False) -> None:
        """One write; a failed one is tried again with the next."""
        state, now = self.hub.snapshot(), Nanos(self._clock())
        entries, seen = self.record.take_unwritten(), self.seen
        self._is_changed, self.seen = False, {}
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._writer,
                lambda: store.write(state, now, entries=entries, seen=seen, is_last=is_last),
            )
            problem = ""
        except StoreError as error:
            problem = str(error)
            self._is_changed = True
            self.record.put_back(entries)
            self.seen = {**seen, **self.seen}
        if problem != self.store_problem:
            self.store_problem = problem
            level = logging.ERROR if problem else logging.INFO
            text = "state cannot be written" if problem else "state is written again"
            log_event(logger, text, level=level, why=problem or None)

    async def _keep_flushing(self, events: EventLog) -> None:
        while True:
            await asyncio.sleep(EVENTS_FLUSH_S)
            events.flush()


def policy_facts(policy: SwarmPolicy) -> dict[str, Any]:
    """The policy's fields, times in seconds, as `--policy` takes them."""
    facts: dict[str, Any] = {}
    for name in type(policy).__dataclass_fields__:
        value = getattr(policy, name)
        if name.endswith("_ns"):
            facts[name.removesuffix("_ns") + "_s"] = value / NANOS_PER_SECOND
        else:
            facts[name] = value
    return facts
