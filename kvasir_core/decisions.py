"""All that the ring may ask of a shell. Decisions are orders, named as imperatives."""

from typing import NamedTuple

from kvasir_core.microbatch import FinishReason, MicroBatch
from kvasir_core.units import Epoch, MicroBatchId, RequestId


class Launch(NamedTuple):
    """Submit this micro-batch to stage 0; every stage replays its exact membership."""

    micro_batch: MicroBatch


class Deliver(NamedTuple):
    """Hand each of these requests the one token that the micro-batch's tail sampled for it.

    Output rows of other requests in that micro-batch are late (cancelled, preempted): drop them.
    """

    micro_batch: MicroBatchId
    requests: tuple[RequestId, ...]


class Finish(NamedTuple):
    """The request has ended; tell its client. Its KV is released by a `Release`."""

    request: RequestId
    reason: FinishReason


class Refuse(NamedTuple):
    """The request can never fit; it was not queued. `why` is a sentence with both numbers."""

    request: RequestId
    why: str


class Preempt(NamedTuple):
    """For the record: the request lost its KV and will recompute so many rows."""

    request: RequestId
    rows_lost: int


class Release(NamedTuple):
    """Send a release round the ring, behind the micro-batches already in it.

    Each stage frees these requests' KV when it passes; the shell then reports `ReleaseEnded`.
    """

    requests: tuple[RequestId, ...]
    epoch: Epoch


class BeginEpoch(NamedTuple):
    """A stage is lost: every stage drops all KV and all frames of older epochs.

    Only the stages in `lost` are replaced. Affected requests are replayed by later `Launch`es.
    """

    epoch: Epoch
    lost: tuple[int, ...]


RingDecision = Launch | Deliver | Finish | Refuse | Preempt | Release | BeginEpoch
