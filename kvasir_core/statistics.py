"""What the ring can say of itself at any moment; shells show it, they do not recount it."""

from dataclasses import dataclass, field

from kvasir_core.microbatch import BindingLimit, FinishReason
from kvasir_core.queues import Queues
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


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the ring counts as it goes; the rest of its statistics is read off its queues."""

    offered: int = 0
    ended: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))
    micro_batches: int = 0
    window_stalls: int = 0  # Events after which the window forbade another micro-batch,
    dependency_stalls: int = 0  # and after which every live request was in flight.
    preemptions: int = 0
    rows_recomputed: int = 0
    in_system_ns: int = 0

    def statistics(
        self, now: Nanos, epoch: Epoch, queues: Queues, lost: tuple[int, ...]
    ) -> RingStatistics:
        blocks = queues.plan.kv_blocks
        return RingStatistics(
            now=now,
            offered=self.offered,
            waiting=len(queues.waiting),
            running=queues.running,
            ended=dict(self.ended),
            live_decodes=queues.live_decodes,
            open=queues.open_count,
            window=queues.window,
            epoch=epoch,
            lost=lost,
            micro_batches=self.micro_batches,
            stalls={
                BindingLimit.WINDOW: self.window_stalls,
                BindingLimit.DEPENDENCY: self.dependency_stalls,
            },
            kv_blocks_total=blocks,
            kv_blocks_in_use=blocks - queues.blocks_free,
            kv_blocks_peak=blocks - queues.blocks_free_least,
            preemptions=self.preemptions,
            rows_recomputed=self.rows_recomputed,
            in_system_ns=self.in_system_ns,
        )
