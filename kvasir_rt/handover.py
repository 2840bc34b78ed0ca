"""Between the two threads of a stage: the agent moves frames, the compute thread computes.

Waiting in `take` is *starved*, waiting in `wait_credit` is *blocked*; both wait on one condition
and neither polls. What the compute thread wants sent it leaves here and wakes the agent.
"""

import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from kvasir_core.units import Epoch, Nanos
from kvasir_rt import wire


class Load(NamedTuple):
    """Hold these layers."""

    assign: wire.Assign


class Work(NamedTuple):
    """Compute this micro-batch; its frame arrived at `received`."""

    lap: wire.Lap
    body: memoryview | None
    received: Nanos


class Free(NamedTuple):
    """Free these requests' KV and pass the message on."""

    release: wire.Release


class Reset(NamedTuple):
    """Drop all KV: a new epoch has begun."""

    epoch: Epoch


class QuitCause(Enum):
    """Who wants the process to end."""

    STOPPED = "stopped"  # The bridge said so: refused, or without a reason, all is well.
    NO_BRIDGE = "no_bridge"  # It never answered.
    FAILED = "failed"  # Something broke; a fresh process may do better.


class Quit(NamedTuple):
    """End the process."""

    cause: QuitCause
    why: str


Item = Load | Work | Free | Reset | Quit


class Outgoing(NamedTuple):
    """A message for the next stage."""

    kind: str
    header: bytes
    body: wire.Buffer | None


class Holding(NamedTuple):
    """The micro-batch in hand; `computing_since` is None while it waits for a credit."""

    micro_batch: int
    rows: int
    computing_since: Nanos | None


class Handover:
    """The items for the compute thread, its credits, and what it sends."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._items: deque[Item] = deque()
        self._outgoing: deque[Outgoing] = deque()
        self._reports: deque[wire.ToBridge] = deque()
        self._credits: int | None = 0  # None: the receiver takes any number.
        self._epoch = Epoch(-1)
        self._slots_freed = 0
        self._wake = wake
        self.waiting = 0  # Micro-batches not taken yet.
        self.holding: Holding | None = None
        self.beside: Callable[[], wire.ExpertCounts | None] = lambda: None  # Told with each beat.
        self.slowdown = 1.0  # Holds last so many times as long as they take.

    # ------------------------------------------------------------------ the agent's side

    def put(self, item: Item) -> None:
        with self._changed:
            self._items.append(item)
            self.waiting += isinstance(item, Work)
            self._changed.notify()

    def quit(self, cause: QuitCause, why: str) -> None:
        """Nothing else is wanted, not even what is queued."""
        with self._changed:
            self._items.clear()
            self._items.append(Quit(cause, why))
            self._epoch = Epoch(-1)
            self._changed.notify()

    def begin_epoch(self, epoch: Epoch) -> None:
        """Forget every older frame, on the way in and out; the compute thread resets."""
        with self._changed:
            kept = [item for item in self._items if isinstance(item, Load | Quit)]
            self._items = deque([*kept, Reset(epoch)])
            self._outgoing.clear()
            self._credits = 0
            self._epoch = epoch
            self._slots_freed = 0
            self.waiting = 0
            self._changed.notify()

    def add_credits(self, count: int | None) -> None:
        with self._changed:
            if count is None or self._credits is None:
                self._credits = None
            else:
                self._credits += count
            self._changed.notify()

    def drain(self) -> tuple[list[Outgoing], list[wire.ToBridge], int]:
        """What to send on, what to tell the bridge, and how many input slots were freed."""
        with self._changed:
            outgoing, reports = list(self._outgoing), list(self._reports)
            self._outgoing.clear()
            self._reports.clear()
            freed, self._slots_freed = self._slots_freed, 0
            return outgoing, reports, freed

    # ------------------------------------------------------------------ the compute thread's side

    def take(self) -> Item:
        """The next item; waits for one. Taking a micro-batch frees its input slot."""
        with self._changed:
            while not self._items:
                self._changed.wait()
            item = self._pop()
        if isinstance(item, Work):
            self._wake()
        return item

    def take_if(self, item: Item) -> bool:
        """As `take`, if this is still the next item: a new epoch may have come since `peek`."""
        with self._changed:
            if not self._items or self._items[0] is not item:
                return False
            self._pop()
        if isinstance(item, Work):
            self._wake()
        return True

    def _pop(self) -> Item:
        item = self._items.popleft()
        if isinstance(item, Work):
            self.waiting -= 1
            self._slots_freed += 1
        return item

    def peek(self) -> Item | None:
        """The next item, if there is one; it stays."""
        with self._changed:
            return self._items[0] if self._items else None

    def wait(self, is_due: Callable[[Item | None], bool], limit_s: float | None) -> None:
        """Until something is due, or the limit.

        Args:
            is_due: Given the next item; asked, with the lock held, whenever an item, a credit or a
                `nudge` came.
            limit_s: Return after so long all the same.
        """
        with self._changed:
            self._changed.wait_for(lambda: is_due(self._items[0] if self._items else None), limit_s)

    def nudge(self) -> None:
        """From any thread: what `wait` asks for may be so now."""
        with self._changed:
            self._changed.notify()

    @property
    def has_credit(self) -> bool:
        return self._credits != 0

    def wait_credit(self, epoch: Epoch) -> bool:
        """Use up one credit, waiting for it; False if the epoch ended meanwhile."""
        with self._changed:
            while self._credits == 0 and self._epoch == epoch:
                self._changed.wait()
            if self._epoch != epoch:
                return False
            if self._credits is not None:
                self._credits -= 1
            return True

    def send(self, epoch: Epoch, outgoing: Outgoing) -> None:
        """Leave a message for the next stage; dropped if the epoch is over."""
        with self._changed:
            if self._epoch != epoch:
                return
            self._outgoing.append(outgoing)
        self._wake()

    def report(self, message: wire.ToBridge) -> None:
        """Leave a message for the bridge."""
        with self._changed:
            self._reports.append(message)
        self._wake()
