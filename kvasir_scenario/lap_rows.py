"""Laps as rows of integers, packed as they come back: nothing of a lap outlives it as an object.

Keeping the objects of thousands of laps for a later conversion would cost as much as the rest of a
simulated lap: every new one would be written to memory that is no longer in a cache.
"""

from dataclasses import dataclass
from struct import Struct

import numpy as np

from kvasir_core.microbatch import BindingLimit, MicroBatch
from kvasir_core.units import RequestId
from kvasir_scenario.tables import Ints

STAMPS = 4  # Per stage: received, start, end, sent.
LIMITS = tuple(BindingLimit)
LIMIT_CODES = {limit: code for code, limit in enumerate(LIMITS)}
FIELDS = 8  # Of a row, before its stamps.


@dataclass(frozen=True, slots=True)
class Laps:
    """Columns, one entry per lap in order of return, unless said otherwise.

    Attributes:
        limits: Indexes into LIMITS.
        stamps: `int64[laps, stages, STAMPS]`.
        tokens: Requests that got a token, lap by lap; `token_counts` of each lap.
        prompts: Requests with a prompt chunk, lap by lap; `spans - decodes` of each lap.
        batches: The first micro-batches, as many as were to be kept.
    """

    ids: Ints
    composed: Ints
    returned: Ints
    rows: Ints
    decodes: Ints
    spans: Ints
    token_counts: Ints
    limits: Ints
    stamps: Ints
    tokens: Ints
    prompts: Ints
    batches: list[MicroBatch]


class LapRows:
    """Collects at most `laps_max` laps; `take` gives them as columns and empties it."""

    def __init__(self, stages: int, laps_max: int) -> None:
        self._stages = stages
        row = Struct(f"{FIELDS + STAMPS * stages}n")  # int64, and faster to pack than "q"
        self._pack = row.pack_into
        self._row_bytes = row.size
        self._buffer = bytearray(laps_max * row.size)
        self._end = len(self._buffer)
        self._tokens: list[int] = []
        self._prompts: list[int] = []
        self._batches: list[MicroBatch] = []
        self.kept_max = 0  # So many micro-batches are kept, the first ones.
        self._at = 0  # Where the next row begins.

    def __len__(self) -> int:
        return self._at // self._row_bytes

    def add(
        self,
        micro_batch: MicroBatch,
        composed_ns: int,
        returned_ns: int,
        delivered: tuple[RequestId, ...],
        stamps: list[int],
    ) -> bool:
        """Pack one lap; true if that filled it: `take` must come before the next."""
        id_, _, requests, _, _, decodes, _, rows, _, binding = micro_batch
        spans = len(requests)
        self._pack(
            self._buffer, self._at, id_, composed_ns, returned_ns, rows, decodes, spans,
            len(delivered), LIMIT_CODES[binding], *stamps,
        )  # fmt: skip
        self._tokens += delivered
        if decodes < spans:
            self._prompts += requests[decodes:]
        if len(self._batches) < self.kept_max:
            self._batches.append(micro_batch)
        self._at = at = self._at + self._row_bytes
        return at == self._end

    def take(self) -> Laps:
        """All laps so far."""
        flat = np.frombuffer(self._buffer, np.int64, self._at // 8)
        table = flat.reshape(len(self), FIELDS + STAMPS * self._stages)
        stamps = np.ascontiguousarray(table[:, FIELDS:])
        columns = np.ascontiguousarray(table[:, :FIELDS].T)
        ids, composed, returned, rows, decodes, spans, token_counts, limits = columns
        laps = Laps(
            ids=ids,
            composed=composed,
            returned=returned,
            rows=rows,
            decodes=decodes,
            spans=spans,
            token_counts=token_counts,
            limits=limits,
            stamps=stamps.reshape(-1, self._stages, STAMPS),
            tokens=np.array(self._tokens, np.int64),
            prompts=np.array(self._prompts, np.int64),
            batches=self._batches,
        )
        self._at = 0
        self._tokens.clear()
        self._prompts.clear()
        self._batches = []
        return laps
