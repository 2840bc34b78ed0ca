"""The few scalar types everything else is spelled in."""

from typing import NewType

Nanos = NewType("Nanos", int)
"""Integer nanoseconds on the shell's monotonic clock."""

RequestId = NewType("RequestId", int)
MicroBatchId = NewType("MicroBatchId", int)
Epoch = NewType("Epoch", int)
"""Counts the ring's rebirths: frames of an older epoch are dropped by whoever receives them."""

NANOS_PER_SECOND = 1_000_000_000

make = tuple.__new__
"""`make(Launch, (batch,))` is `Launch(batch)` in half the time: for what is made once a lap."""


def nanos(seconds: float) -> Nanos:
    """Seconds to the nearest nanosecond (ties to even, as `round` does)."""
    return Nanos(round(seconds * NANOS_PER_SECOND))
