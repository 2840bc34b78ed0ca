"""Cores that stages and workers of one machine share, each with one thread (processor sharing).

While no more pieces of computing than cores are under way, each has a core; else all are computed
at once, each at its fair part of all cores. So a piece takes as long as alone, or longer.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush

from kvasir_sim.pipeline import Clock
from kvasir_sim.swarm.network import after


class Cores:
    """So many cores, any number of pieces of computing."""

    def __init__(self, env: Clock, count: int) -> None:
        self._env = env
        self._count = count
        # What each piece that is under way all the time would have got of a core by now (ns), a
        # time that passes more slowly the more there are; pieces end by it.
        self._got = 0
        self._seen = 0  # When that was so.
        self._pieces: list[tuple[int, int, Callable[[], None]]] = []
        self._numbered = 0
        self._alarm = 0
        self._used_ns = 0  # Of all cores together.

    def compute(self, piece_ns: int, then: Callable[[], None]) -> int:
        """Begin a piece that takes so long alone; `then` is called at its end.

        Returns:
            Its number, for `drop`.
        """
        self._catch_up()
        self._numbered += 1
        heappush(self._pieces, (self._got + piece_ns, self._numbered, then))
        self._set_alarm()
        return self._numbered

    def drop(self, number: int) -> None:
        """A piece is lost with who computed it; nothing happens if it has ended."""
        self._catch_up()
        self._pieces = [piece for piece in self._pieces if piece[1] != number]
        heapify(self._pieces)
        self._set_alarm()

    def describe(self, elapsed_ns: int) -> str:
        """A sentence for the report; `elapsed_ns`: since the start."""
        self._catch_up()
        share = self._used_ns / (self._count * elapsed_ns) if elapsed_ns else 0.0
        return (
            f"stages, workers and bridge share {self._count} core{'s' * (self._count > 1)}, busy "
            f"for {share:.0%} of the run; a stage that waits for one counts as busy"
        )

    def _catch_up(self) -> None:
        now, count = self._env.now, len(self._pieces)
        if count:
            used = (now - self._seen) * min(self._count, count)
            self._used_ns += used
            self._got += used // count
        self._seen = now

    def _set_alarm(self) -> None:
        """The next end, if nobody begins before it."""
        self._alarm += 1
        if self._pieces:
            alarm, count = self._alarm, len(self._pieces)
            left = max(0, self._pieces[0][0] - self._got)
            after(self._env, -(-left * count // min(self._count, count)), lambda: self._ring(alarm))

    def _ring(self, alarm: int) -> None:
        if alarm != self._alarm:
            return
        self._catch_up()
        over = []
        while self._pieces and self._pieces[0][0] <= self._got:
            over.append(heappop(self._pieces)[2])
        self._set_alarm()
        for then in over:
            then()
