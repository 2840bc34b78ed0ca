"""How long to wait after a failure: doubling, and jittered so that a herd spreads out."""

import asyncio
import random

PAUSE_S = 1.0  # After the first failure...
PAUSE_S_MAX = 30.0  # ...doubling up to this.
ASKED_S = (0.05, 3600.0)  # What a hub asks for is heeded so far.
LONG_S = 30.0  # What went well for so long was no failure.

_chance = random.Random()  # noqa: S311 - Jitter, no secret.


def heeded(asked_s: float) -> float:
    """Seconds to wait where a hub asks for `asked_s`: none can put a worker to sleep for ever."""
    least, most = ASKED_S
    return min(most, max(least, asked_s))


class Pause:
    """A wait that doubles with every failure in a row, jittered so that a herd spreads out."""

    def __init__(self) -> None:
        self._next_s = PAUSE_S

    def reset(self) -> None:
        self._next_s = PAUSE_S

    async def wait(self, at_least_s: float = 0.0) -> None:
        await asyncio.sleep(max(heeded(at_least_s), self._next_s) * _chance.uniform(0.75, 1.25))
        self._next_s = min(PAUSE_S_MAX, 2 * self._next_s)
