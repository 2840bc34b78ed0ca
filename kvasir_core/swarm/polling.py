"""Asking again and again, never waiting: one question open, an answer to an older one is late."""

from kvasir_core.errors import IllegalEvent
from kvasir_core.swarm.words import PollId
from kvasir_core.units import Nanos


class Poller:
    """When to ask, and whether an answer is in time."""

    __slots__ = ("_asked_at", "_limit_ns", "_next", "_open", "_period_ns", "due_at", "missed")

    def __init__(self, period_ns: Nanos, limit_ns: Nanos, first_at: Nanos = Nanos(0)) -> None:
        self._period_ns = period_ns
        self._limit_ns = limit_ns
        self._open: PollId | None = None
        self._next = 0
        self._asked_at = first_at
        self.due_at = first_at
        self.missed = 0  # Questions without a good answer in time.

    def check(self, poll: object) -> None:
        """Raises IllegalEvent if this was never asked."""
        if type(poll) is not int or not 0 <= poll < self._next:
            raise IllegalEvent(f"poll {poll!r:.60} was never asked; {self._next} were")

    def ask(self, at: Nanos) -> PollId:
        """The next question is asked now, whatever became of the last one."""
        self.missed += self._open is not None
        self._open = PollId(self._next)
        self._next += 1
        self._asked_at = at
        self.due_at = Nanos(at + self._period_ns)
        return self._open

    def take(self, poll: PollId, at: Nanos, *, is_good: bool) -> Nanos | None:
        """When the question was asked, if this is its good answer in time; else None."""
        if poll != self._open:
            return None
        self._open = None
        if not is_good or at - self._asked_at > self._limit_ns:
            self.missed += 1
            return None
        return self._asked_at
