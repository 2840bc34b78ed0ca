"""Live requests and their histories: what the head must be told to compute any row of them."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass

from kvasir_core.microbatch import MicroBatch
from kvasir_core.units import RequestId
from kvasir_rt import wire
from kvasir_rt.submission import Submission


@dataclass(slots=True, eq=False)
class Live:
    """A request that has not ended. Its history is the prompt and the tokens given so far."""

    submission: Submission
    history: list[int]
    tokens: int = 0


def lap_of(batch: MicroBatch, live: Mapping[RequestId, Live], *, composed: int = 0) -> wire.Lap:
    """The message that submits a micro-batch: the token ids of its rows travel with it.

    Sampling parameters go with the row at position 0; the tail keeps them until the release, and a
    replay starts at 0 again.
    """
    ids: list[int] = []
    sampling = []
    keeps_ids = False
    for index, (request, start, rows) in enumerate(
        zip(batch.requests, batch.starts, batch.rows, strict=True)
    ):
        entry = live[request]
        params = entry.submission.sampling
        ids += entry.history[start : start + rows]
        keeps_ids |= params.needs_history
        if start == 0:
            sampling.append((index, params))
    return wire.Lap(
        micro_batch=batch,
        ids=struct.pack(f"<{len(ids)}i", *ids),
        keeps_ids=keeps_ids,
        sampling=tuple(sampling),
        stamps=(),
        body_bytes=0,
        composed=composed,
    )
