"""Live requests and their histories: what the head must be told to compute any row of them."""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

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
    needs_history: bool = field(init=False)  # The tail must know the tokens so far.

    def __post_init__(self) -> None:
        self.needs_history = self.submission.sampling.needs_history


def lap_of(batch: MicroBatch, live: Mapping[RequestId, Live], *, composed: int = 0) -> wire.Lap:
    """The message that submits a micro-batch: the token ids of its rows travel with it.

    Sampling parameters go with the row at position 0; the tail keeps them until the release, and a
    replay starts at 0 again.
    """
    entries, decodes = [live[request] for request in batch.requests], batch.decodes
    ids: list[int] = []
    sampling = []
    for entry, start in zip(entries[:decodes], batch.starts, strict=False):
        ids.append(entry.history[start])
    for index in range(decodes, len(entries)):
        entry, start = entries[index], batch.starts[index]
        ids += entry.history[start : start + batch.rows[index]]
        if start == 0:
            sampling.append((index, entry.submission.sampling))
    return wire.Lap(
        micro_batch=batch,
        ids=struct.pack(f"<{len(ids)}i", *ids),
        keeps_ids=any(entry.needs_history for entry in entries),
        sampling=tuple(sampling),
        stamps=(),
        body_bytes=0,
        composed=composed,
    )
