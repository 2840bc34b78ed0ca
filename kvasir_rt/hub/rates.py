"""Token buckets, one per key, in a table of bounded size."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from time import monotonic


class Rates:
    """How often each key may do something.

    Args:
        per_s: Sustained rate of one key.
        burst: What a rested key may do at once.
        keys_max: Keys remembered; the one longest unheard of is forgotten, so it is rested again.
        clock: Seconds, never going back.
    """

    def __init__(
        self, per_s: float, burst: int, keys_max: int, clock: Callable[[], float] = monotonic
    ) -> None:
        self._per_s = per_s
        self._burst = burst
        self._keys_max = keys_max
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # Left, when.

    def __len__(self) -> int:
        return len(self._buckets)

    def take(self, key: Hashable) -> float:
        """0 if it may now; else the seconds until it may, and nothing is taken."""
        now = self._clock()
        left, since = self._buckets.pop(key, (float(self._burst), now))
        left = min(float(self._burst), left + (now - since) * self._per_s)
        wait = 0.0 if left >= 1 else (1 - left) / self._per_s
        self._buckets[key] = (left if wait else left - 1, now)
        if len(self._buckets) > self._keys_max:
            self._buckets.popitem(last=False)
        return wait
