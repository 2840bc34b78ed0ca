"""What the engine tells a recorder; `kvasir_scenario.recorder.Recorder` is one."""

from typing import Protocol

from kvasir_core.microbatch import FinishReason, MicroBatch
from kvasir_core.units import RequestId


class RingRecorder(Protocol):
    """What the engine tells a recorder."""

    def lap(
        self,
        micro_batch: MicroBatch,
        composed_ns: int,
        returned_ns: int,
        delivered: tuple[RequestId, ...],
        stamps: list[int],
    ) -> None: ...

    def lost(
        self, micro_batch: MicroBatch, composed_ns: int, cut_ns: int, stamps: list[int]
    ) -> None: ...

    def spent(
        self, stage: int, state: str, start_ns: int, stop_ns: int, composed_ns: int
    ) -> None: ...

    def offered(self, request: RequestId, arrival_ns: int, prompt_tokens: int) -> None: ...

    def finished(self, request: RequestId, at_ns: int, reason: FinishReason) -> None: ...

    def refused(self, request: RequestId, at_ns: int) -> None: ...

    def preempted(self, request: RequestId) -> None: ...

    def sample(self, at_ns: int, waiting: int, running: int, kv_blocks_in_use: int) -> None: ...
