"""Spans packed together: composed once at the head, replayed unchanged by every stage."""

from enum import StrEnum
from typing import NamedTuple

from kvasir_core.units import Epoch, MicroBatchId, RequestId


class FinishReason(StrEnum):
    """How a request ended; the names are those of `requests.parquet`."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    REFUSED = "refused"
    FAILED = "failed"


class BindingLimit(StrEnum):
    """Why a micro-batch stopped filling, or why none could be composed."""

    NOTHING_WAITING = "nothing_waiting"
    ROW_WIDTH = "row_width"
    MICRO_BATCH_WIDTH = "micro_batch_width"
    COHORT = "cohort"
    RUNNING_CAP = "running_cap"
    KV = "kv"
    WINDOW = "window"
    DEPENDENCY = "dependency"


class Span(NamedTuple):
    """The consecutive rows `[start, start + rows)` of one request inside a micro-batch."""

    request: RequestId
    start: int
    rows: int
    is_decode: bool
    has_output: bool  # The span's last row is sampled by the tail.


class MicroBatch(NamedTuple):
    """A frozen composition, as parallel columns: one entry per span, decodes first.

    `rows[i]` rows of `requests[i]` starting at position `starts[i]`. The first `decodes` spans are
    decode steps of one row each; the others are prompt chunks. Output rows are the last row of
    every decode span and of the spans listed in `completing`.
    """

    id: MicroBatchId
    epoch: Epoch
    requests: tuple[RequestId, ...]
    starts: tuple[int, ...]
    rows: tuple[int, ...]
    decodes: int
    completing: tuple[int, ...]  # Indexes of prompt spans that end their prompt, ascending.
    row_count: int  # sum(rows)
    decode_context: int  # Sum over decode spans of start + 1: KV rows their attention reads.
    binding: BindingLimit

    @property
    def prefill_rows(self) -> int:
        return self.row_count - self.decodes

    @property
    def outputs(self) -> tuple[RequestId, ...]:
        """Requests with an output row, in span order (the tail samples in this order)."""
        decodes = self.requests[: self.decodes]
        if not self.completing:
            return decodes
        return decodes + tuple(self.requests[i] for i in self.completing)

    @property
    def spans(self) -> tuple[Span, ...]:
        completing = set(self.completing)
        return tuple(
            Span(request, start, rows, i < self.decodes, i < self.decodes or i in completing)
            for i, (request, start, rows) in enumerate(
                zip(self.requests, self.starts, self.rows, strict=True)
            )
        )
