"""Measures how long requests wait: from arrival at the ring to their first composition.

It listens where the engine tells a recorder what happens, on the engine's thread.
"""

from collections.abc import Callable

from kvasir_core.causes import CauseClock
from kvasir_core.microbatch import FinishReason, MicroBatch
from kvasir_core.units import NANOS_PER_SECOND, Nanos, RequestId


class QueueClock:
    """A recorder (`kvasir_rt.engine.RingRecorder`) that keeps nothing but waiting requests.

    Args:
        observe: Called with seconds, once for each request that was composed.
        causes: The ring's history of causes, which a recorder has to drain.
    """

    def __init__(self, observe: Callable[[float], None], causes: CauseClock) -> None:
        self._observe = observe
        self._causes = causes
        self._arrived: dict[RequestId, int] = {}

    def offered(self, request: RequestId, arrival_ns: int, prompt_tokens: int) -> None:
        del prompt_tokens
        self._arrived[request] = arrival_ns

    def lap(
        self,
        micro_batch: MicroBatch,
        composed_ns: int,
        returned_ns: int,
        delivered: tuple[RequestId, ...],
        stamps: list[int],
    ) -> None:
        del delivered, stamps
        self._causes.drain_before(Nanos(returned_ns))
        self._composed(micro_batch, composed_ns)

    def lost(
        self, micro_batch: MicroBatch, composed_ns: int, cut_ns: int, stamps: list[int]
    ) -> None:
        del cut_ns, stamps
        self._composed(micro_batch, composed_ns)

    def spent(self, stage: int, state: str, start_ns: int, stop_ns: int, composed_ns: int) -> None:
        """The engine's meter has it."""

    def finished(self, request: RequestId, at_ns: int, reason: FinishReason) -> None:
        del at_ns, reason
        self._arrived.pop(request, None)

    def refused(self, request: RequestId, at_ns: int) -> None:
        del at_ns
        self._arrived.pop(request, None)

    def preempted(self, request: RequestId) -> None:
        """It was composed before."""

    def sample(self, at_ns: int, waiting: int, running: int, kv_blocks_in_use: int) -> None:
        """The snapshot has these."""

    def _composed(self, micro_batch: MicroBatch, composed_ns: int) -> None:
        if self._arrived:
            for request in micro_batch.requests:
                arrived = self._arrived.pop(request, None)
                if arrived is not None:
                    self._observe((composed_ns - arrived) / NANOS_PER_SECOND)
