"""One request's life inside the ring: waiting, running, releasing."""

from dataclasses import dataclass

from kvasir_core.units import RequestId


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """What the head knows of a live request. Rows are token positions, counted from 0.

    A request is *waiting* (no KV), *running* (admitted: holds blocks) or *releasing* (ended or
    preempted, its KV still on the way out of the stages).
    """

    id: RequestId
    order: int  # By arrival; decides admission and, from the youngest, preemption.
    length: int  # Prompt and tokens delivered so far.
    length_max: int  # Prompt and most tokens.
    target: int  # Rows to compute before the next token: the length when admitted.
    scheduled: int = 0  # Rows composed since it was admitted.
    returned: int = 0  # Rows whose laps are back (prompt chunks only).
    in_flight: int = 0  # Open micro-batches that carry rows of it.
    blocks: int = 0  # KV blocks it holds.
    is_running: bool = False
    is_live: bool = True  # False once it ended: its late tokens are dropped.

    @property
    def is_decoding(self) -> bool:
        """Its prompt is computed and back; it takes one row a lap."""
        return self.is_running and self.returned == self.target

    @property
    def rows_computed(self) -> int:
        """Rows composed since it was admitted: what is lost with its KV."""
        if self.is_decoding:
            return self.length - 1 + self.in_flight
        return self.scheduled
