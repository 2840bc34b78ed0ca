"""Cuts a flight into frames, and puts the answers together again."""

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
import torch

from kvasir_core.swarm.words import ModelName
from kvasir_core.units import Nanos
from kvasir_rt.experts.pairs import Pairs, from_bytes, pack_pairs
from kvasir_rt.experts.records import Flight
from kvasir_rt.swarm.frames import (
    ELEMENT_BYTES,
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    PAIR_BYTES,
    PAIRS_MAX,
    ROWS_MAX,
    Call,
    Dtype,
    Reply,
)

_PAYLOAD_MAX = FRAME_BYTES_MAX - HEADER_BYTES_MAX - 2


class Encoded(NamedTuple):
    """A frame's parts, ready to send."""

    call: Call
    payload: bytes


def encode(
    flight: Flight, model: ModelName, dtype: Dtype, now: Nanos, numbers: "count[int]"
) -> Iterator[Encoded]:
    """The flight's frames; each gets a request number, noted in the flight.

    Args:
        flight: Has not been sent.
        model: For the header.
        dtype: Of rows on the wire.
        now: On the clock of the flight's deadline.
        numbers: Where request numbers come from.
    """
    hidden = flight.x.shape[1]
    rows_of_pairs = flight.pairs.rows.cpu()
    deadline_ms = max(1, (flight.deadline - now) // 1_000_000)
    for start, stop in _spans(rows_of_pairs.numpy(), len(flight.rows), hidden, dtype):
        inside = (rows_of_pairs >= start) & (rows_of_pairs < stop)
        where = inside.nonzero().flatten().to(flight.pairs.rows.device)
        pairs = Pairs(
            flight.pairs.rows[where] - start,
            flight.pairs.experts[where],
            flight.pairs.weights[where],
        )
        request = next(numbers)
        flight.requests[request] = (start, stop)
        _, _, worker = flight.key
        call = Call(
            request, worker, flight.session, model, flight.layer, dtype, stop - start, hidden,
            len(pairs), deadline_ms,
        )  # fmt: skip
        yield Encoded(call, pack_pairs(flight.x[start:stop], pairs, dtype))


def _spans(
    rows_of_pairs: np.ndarray, rows: int, hidden: int, dtype: Dtype
) -> Iterator[tuple[int, int]]:
    """Consecutive rows `[start, stop)` that fit one frame each."""
    pairs = np.bincount(rows_of_pairs, minlength=rows).tolist()
    row_bytes = hidden * ELEMENT_BYTES[dtype]
    start = size = held = 0
    for row, count_ in enumerate(pairs):
        more = row_bytes + count_ * PAIR_BYTES
        is_full = size + more > _PAYLOAD_MAX or held + count_ > PAIRS_MAX
        if row > start and (is_full or row - start >= ROWS_MAX):
            yield start, row
            start, size, held = row, 0, 0
        size += more
        held += count_
    yield start, rows


def is_sendable(flight: Flight, dtype: Dtype) -> bool:
    """Whether every number survives the wire: f16 ends at 65,504, and a NaN helps nobody."""
    values = flight.x.half() if dtype == "f16" else flight.x
    return bool(values.isfinite().all()) and bool(flight.pairs.weights.isfinite().all())


def take_reply(flight: Flight, reply: Reply, payload: memoryview, dtype: Dtype) -> bool:
    """Put a request's answer into the flight; True when it was the last or has the wrong shape."""
    start, stop = flight.requests.pop(reply.request)
    hidden = flight.x.shape[1]
    if (reply.dtype, reply.rows, reply.hidden) != (dtype, stop - start, hidden):
        flight.is_shaped = False
        return True
    if flight.values is None:
        flight.values = torch.empty(len(flight.rows), hidden, dtype=torch.float32)
    flight.values[start:stop] = from_bytes(payload, dtype, reply.rows, hidden)
    return not flight.requests
