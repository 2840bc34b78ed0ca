"""What the ring can say of itself at any moment; shells show it, they do not recount it."""

from dataclasses import dataclass

from kvasir_core.microbatch import BindingLimit, FinishReason
from kvasir_core.units import Epoch, Nanos


@dataclass(frozen=True, slots=True, kw_only=True)
class RingStatistics:
    """Counts since time 0; `in_system_ns` is the integral of waiting + running requests."""

    now: Nanos
    offered: int
    waiting: int
    running: int
    ended: dict[FinishReason, int]
    live_decodes: int
    open: int
    window: int
    epoch: Epoch
    lost: tuple[int, ...]
    micro_batches: int
    stalls: dict[BindingLimit, int]  # Events after which `window` or `dependency` forbade another.
    kv_blocks_total: int
    kv_blocks_in_use: int
    kv_blocks_peak: int
    preemptions: int
    rows_recomputed: int
    in_system_ns: int

    @property
    def finished(self) -> int:
        """Requests that got all their tokens: by length or by a stop."""
        return self.ended[FinishReason.LENGTH] + self.ended[FinishReason.STOP]

    @property
    def refused(self) -> int:
        return self.ended[FinishReason.REFUSED]

    @property
    def cancelled(self) -> int:
        """Cancelled by the client or by a deadline."""
        return self.ended[FinishReason.CANCELLED] + self.ended[FinishReason.DEADLINE]

    @property
    def failed(self) -> int:
        return self.ended[FinishReason.FAILED]
