"""Asking again and again, never waiting: one question open, an answer to an older one is late."""

from kvasir_core.errors import IllegalEvent
from kvasir_core.swarm.words import PollId
from kvasir_core.units import Nanos


class PollIds:
    """Numbers that were given to questions."""

    __slots__ = ("_next",)

    def __init__(self) -> None:
        self._next = 0

    def take(self) -> PollId:
        self._next += 1
        return PollId(self._next - 1)

    def check(self, poll: object) -> None:
        """Raises IllegalEvent if this was never asked."""
        if type(poll) is not int or not 0 <= poll < self._next:
            raise IllegalEvent(f"poll {poll!r:.60} was never asked; {self._next} were")


class Poller:
    """When to ask, and whether an answer is in time."""

    __slots__ = ("_asked_at", "_limit_ns", "_period_ns", "due_at", "ids", "missed", "open")

    def __init__(
        self, ids: PollIds, period_ns: Nanos, limit_ns: Nanos, first_at: Nanos = Nanos(0)
    ) -> None:
        self.ids = ids
        self.open: PollId | None = None
        self.due_at = first_at
        self.missed = 0  # Questions without a good answer in time.
        self._period_ns = period_ns
        self._limit_ns = limit_ns
        self._asked_at = first_at

    def ask(self, at: Nanos) -> PollId:
        """The next question is asked now, whatever became of the last one."""
        self.missed += self.open is not None
        self.open = self.ids.take()
        self._asked_at = at
        self.due_at = Nanos(at + self._period_ns)
        return self.open

    def take(self, poll: PollId, at: Nanos, *, is_good: bool) -> Nanos | None:
        """When the question was asked, if this is its good answer in time; else None."""
        if poll != self.open:
            return None
        self.open = None
        if not is_good or at - self._asked_at > self._limit_ns:
            self.missed += 1
            return None
        return self._asked_at
