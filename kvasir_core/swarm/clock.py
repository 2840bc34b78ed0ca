"""Time as the core lived it: sleeps and jumps of the shell's clock age nobody.

The core is called at least once a tick. When a call comes much later, the whole process slept
(stopped, suspended, starved of CPU) and so heard nobody; when it comes *earlier* than the one
before, the clock was set back. Neither says anything about workers, so this clock stands still
meanwhile, and ages count from the awakening at the earliest.
"""

from kvasir_core.units import Nanos


class AwakeClock:
    """Advances with the shell's clock, except over jumps."""

    __slots__ = ("_shell", "_silence_max", "jumps", "now", "woke_at")

    def __init__(self, silence_max_ns: Nanos) -> None:
        self._silence_max = silence_max_ns
        self._shell: int | None = None
        self.now = Nanos(0)  # Awake time, from 0, never falling.
        self.woke_at = Nanos(0)  # When the last sleep ended.
        self.jumps = 0

    def advance(self, shell_now: Nanos) -> Nanos:
        """Take the shell's time of this call; returns awake time."""
        step = 0 if self._shell is None else shell_now - self._shell
        self._shell = shell_now
        if 0 <= step <= self._silence_max:
            self.now = Nanos(self.now + step)
        else:
            self.jumps += 1
            self.woke_at = self.now
        return self.now

    def age(self, since: Nanos) -> Nanos:
        """Awake time since then, or since the last sleep ended. Never negative."""
        return Nanos(self.now - max(since, self.woke_at))

    def in_shell(self, at: Nanos) -> Nanos:
        """When the shell's clock will show awake time `at`, if nothing jumps."""
        return Nanos(at - self.now + (self._shell or 0))
