"""Messages and bytes in virtual time: requests to the hub that may get lost, and shared wires."""

from collections.abc import Callable
from random import Random
from typing import Any

from kvasir_core import NANOS_PER_SECOND
from kvasir_sim.pipeline import Clock

Reply = Callable[[Any], None]


def after(env: Clock, delay_ns: int, call: Callable[[], None]) -> None:
    """Call back so many nanoseconds from now."""
    event = env.timeout(delay_ns)
    assert event.callbacks is not None
    event.callbacks.append(lambda _: call())


class Wire:
    """A shared connection, one way: bytes queue, and drain at its bandwidth.

    What is sent counts from the moment of sending, whenever it arrives: a slow peer's answer does
    not stand before a fast one's.
    """

    __slots__ = ("_bytes_per_s", "_free_at", "busy_ns")

    def __init__(self, bytes_per_s: float | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = 0
        self.busy_ns = 0

    def send(self, size: int, now: int) -> int:
        """How long until the last byte is out (ns)."""
        if self._bytes_per_s is None or not size:
            return 0
        transfer = round(size * NANOS_PER_SECOND / self._bytes_per_s)
        self.busy_ns += transfer
        self._free_at = max(now, self._free_at) + transfer
        return self._free_at - now


class Weather:
    """What faults do to control messages now; several at once add up."""

    def __init__(self, chance: Random) -> None:
        self.lost_share = 0.0
        self.doubled_share = 0.0
        self.delay_ns = 0
        self._chance = chance

    def copies(self, own_lost_share: float) -> int:
        """How often a message arrives: 0, 1 or 2 times."""
        lost = max(self.lost_share, own_lost_share)
        if lost and self._chance.random() < lost:
            return 0
        return 1 + (self.doubled_share > 0 and self._chance.random() < self.doubled_share)

    def delay(self) -> int:
        """Extra delay of one message: up to the fault's, so that messages overtake each other."""
        return round(self.delay_ns * self._chance.random()) if self.delay_ns else 0


class Line:
    """Between one peer and the hub: a request, and the reply to it, each way with its own luck."""

    __slots__ = ("_env", "_latency_ns", "_lost_share", "_weather")

    def __init__(self, env: Clock, weather: Weather, latency_ns: int, lost_share: float) -> None:
        self._env = env
        self._weather = weather
        self._latency_ns = latency_ns
        self._lost_share = lost_share

    def carry(self, arrive: Callable[[], None]) -> None:
        """One message, one way."""
        weather = self._weather
        for _ in range(weather.copies(self._lost_share)):
            after(self._env, self._latency_ns + weather.delay(), arrive)

    def ask(self, serve: Callable[[], Any], reply: Reply) -> None:
        """A request that `serve` answers at the hub (None: no answer); `reply` gets the answer."""

        def arrive() -> None:
            answer = serve()
            if answer is not None:
                self.carry(lambda: reply(answer))

        self.carry(arrive)
