"""What became of every request: growing columns, one entry per request, updated many at a time.

Times are integer nanoseconds; NOT_YET marks what has not happened. Per request the ledger keeps the
last token's time across updates, so that gaps between tokens need no per-request lists.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvasir_core.microbatch import FinishReason
from kvasir_core.verdict import QueueFacts
from kvasir_scenario.latency import LatencySamples
from kvasir_scenario.tables import Ints

NOT_YET = -1
UNSET = np.iinfo(np.int64).max  # Loses against every real time in a minimum.
SPREAD_MAX = 1 << 28  # From the lowest to the highest request id: 16 GB of columns.
REASONS = tuple(FinishReason)
REASON_CODES = {reason: code for code, reason in enumerate(REASONS)}
FAILED = REASON_CODES[FinishReason.FAILED]
COMPLETE = (REASON_CODES[FinishReason.STOP], REASON_CODES[FinishReason.LENGTH])
QUEUE_INSTANTS = 512  # Where the queue's length is read to see whether it grows.

Codes = npt.NDArray[np.int8]
Bools = npt.NDArray[np.bool_]


class RequestLedger:
    """Columns indexed by request id minus `base`; ids may have holes (sliced traces)."""

    def __init__(self, warmup_ns: int) -> None:
        self.base = 0
        self.size = 0
        self.gaps = LatencySamples()
        self.tokens_in_window = 0
        self._warmup_ns = warmup_ns
        self._times = np.full((5, 0), NOT_YET, np.int64)
        self._numbers = np.zeros((3, 0), np.int32)
        self._reasons: Codes = np.full(0, NOT_YET, np.int8)

    # Views of the columns; rows of two matrices so that growing is one copy.
    @property
    def arrival(self) -> Ints:
        return self._times[0, : self.size]

    @property
    def composed(self) -> Ints:
        """First composition; UNSET before it."""
        return self._times[1, : self.size]

    @property
    def first_token(self) -> Ints:
        return self._times[2, : self.size]

    @property
    def last_token(self) -> Ints:
        return self._times[3, : self.size]

    @property
    def ended(self) -> Ints:
        return self._times[4, : self.size]

    @property
    def prompt_tokens(self) -> npt.NDArray[np.int32]:
        return self._numbers[0, : self.size]

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Tokens delivered so far."""
        return self._numbers[1, : self.size]

    @property
    def preemptions(self) -> npt.NDArray[np.int32]:
        return self._numbers[2, : self.size]

    @property
    def reasons(self) -> Codes:
        """Index into REASONS, NOT_YET while unfinished."""
        return self._reasons[: self.size]

    @property
    def offered(self) -> Ints:
        """Slots in use, ascending by request id."""
        return np.flatnonzero(self.arrival >= 0)

    def offer(self, ids: Ints, arrivals: Ints, prompts: Ints) -> None:
        """Add requests; their ids are new.

        Raises:
            ValueError: Ids lie too far apart to be kept as columns.
        """
        if not ids.size:
            return
        self._reach(int(ids.min()), int(ids.max()))
        slots = ids - self.base
        assert (self.arrival[slots] < 0).all(), "a request id was offered twice"
        self.arrival[slots] = arrivals
        self.prompt_tokens[slots] = prompts

    def _reach(self, low: int, high: int) -> None:
        base = min(self.base, low) if self.size else low
        size = max(self.base + self.size, high + 1) - base if self.size else high + 1 - base
        if size > SPREAD_MAX:
            raise ValueError(
                f"request ids from {base} to {high} are too far apart; at most {SPREAD_MAX} fit"
            )
        shift = self.base - base if self.size else 0
        if shift or size > self._reasons.size:
            capacity = max(size, 2 * self._reasons.size)
            times = np.full((5, capacity), NOT_YET, np.int64)
            times[1] = UNSET
            numbers = np.zeros((3, capacity), np.int32)
            reasons = np.full(capacity, NOT_YET, np.int8)
            kept = slice(shift, shift + self.size)
            times[:, kept] = self._times[:, : self.size]
            numbers[:, kept] = self._numbers[:, : self.size]
            reasons[kept] = self._reasons[: self.size]
            self._times, self._numbers, self._reasons = times, numbers, reasons
        self.base, self.size = base, size

    def compose(self, ids: Ints, times: Ints) -> None:
        """These requests had prompt rows composed at these times; the first one counts."""
        np.minimum.at(self.composed, ids - self.base, times)

    def deliver(self, ids: Ints, times: Ints) -> None:
        """One token each, in order of time."""
        if not ids.size:
            return
        slots = ids - self.base
        low = int(slots.min())
        # A radix sort where the ids in flight lie close together, as they do.
        near = int(slots.max()) - low < 1 << 16
        order = np.argsort((slots - low).astype(np.uint16) if near else slots, kind="stable")
        slots, times = slots[order], times[order]
        is_first = np.empty(slots.size, np.bool_)
        is_first[0] = True
        np.not_equal(slots[1:], slots[:-1], out=is_first[1:])
        starts = np.flatnonzero(is_first)
        heads = slots[starts]
        previous = np.empty_like(times)
        previous[1:] = times[:-1]
        previous[starts] = self.last_token[heads]
        fresh = starts[previous[starts] < 0]
        self.first_token[slots[fresh]] = times[fresh]
        stops = np.append(starts[1:], slots.size)
        self.last_token[heads] = times[stops - 1]
        self.tokens[heads] += (stops - starts).astype(np.int32)
        credited = self.in_window(times)
        self.tokens_in_window += int(credited.sum())
        self.gaps.add((times - previous)[credited & (previous >= 0)])

    def end(self, ids: Ints, times: Ints, codes: Codes) -> None:
        """These requests ended, for these reasons (indexes of REASONS)."""
        slots = ids - self.base
        assert (self.reasons[slots] == NOT_YET).all(), "a request ended twice"
        self.ended[slots] = times
        self.reasons[slots] = codes

    def preempt(self, ids: Sequence[int]) -> None:
        np.add.at(self.preemptions, np.asarray(ids, np.int64) - self.base, 1)

    def in_window(self, times: Ints) -> Bools:
        """Whether an event is credited: after the warm-up; a window from 0 includes 0."""
        least = self._warmup_ns + 1 if self._warmup_ns else 0
        credited: Bools = times >= least
        return credited

    def censor(self, end_ns: int) -> None:
        """Forget requests that would have arrived after the end."""
        self.arrival[self.arrival > end_ns] = NOT_YET

    def residence_ns(self, end_ns: int) -> int:
        """Sum over requests of their time in the system, unfinished ones censored at `end_ns`."""
        slots = self.offered
        ended = self.ended[slots]
        times = np.where(ended >= 0, ended, end_ns) - self.arrival[slots]
        return (int((times >> 32).sum()) << 32) + int((times & 0xFFFFFFFF).sum())  # Any size.

    def queue(self, end_ns: int) -> QueueFacts:
        """How the waiting queue did between the first and the last arrival after the warm-up.

        Waiting is from arrival to the first composition (or to the end without one).
        """
        slots = self.offered
        arrivals = np.sort(self.arrival[slots])
        start = max(int(arrivals[0]), self._warmup_ns) if slots.size else 0
        stop = int(arrivals[-1]) if slots.size else 0
        if stop <= start:
            return QueueFacts()
        ended = self.ended[slots]
        left = np.minimum(self.composed[slots], np.where(ended >= 0, ended, end_ns))
        left.sort()
        lengths_then = np.arange(1, arrivals.size + 1) - np.searchsorted(left, arrivals, "right")
        at = np.linspace(start, stop, QUEUE_INSTANTS).astype(np.int64)
        lengths = np.searchsorted(arrivals, at, "right") - np.searchsorted(left, at, "right")
        half = QUEUE_INSTANTS // 2
        place = np.linspace(-0.5, 0.5, QUEUE_INSTANTS)
        slope = float((place * lengths).sum() / (place * place).sum())
        return QueueFacts(
            arrivals=int(arrivals.size - np.searchsorted(arrivals, start, "left")),
            grown=slope,
            earlier_mean=float(lengths[:half].mean()),
            later_mean=float(lengths[half:].mean()),
            occupied_share=float((lengths[half:] > 0).mean()),
            length_max=max(0, int(lengths_then.max())),
        )
