"""All that a shell may tell the ring. Events are facts, named in the past tense.

They are `NamedTuple`s: immutable, compared by value, and cheap enough for one a micro-batch.
"""

from typing import NamedTuple

from kvasir_core.microbatch import FinishReason
from kvasir_core.units import Epoch, MicroBatchId, Nanos, RequestId


class RequestArrived(NamedTuple):
    """A request reached the head's queue. Ids are chosen by the shell and never reused."""

    request: RequestId
    prompt_tokens: int
    output_tokens_max: int
    cached_tokens: int = 0  # Leading prompt rows whose KV a prefix cache holds on every stage.


class RequestCancelled(NamedTuple):
    """The client is gone (`cancelled`), its deadline passed (`deadline`), or it `failed`."""

    request: RequestId
    reason: FinishReason = FinishReason.CANCELLED


class LapEnded(NamedTuple):
    """A micro-batch's tail result is back at the head.

    `stopped` lists requests of this micro-batch whose new token ended them (end-of-sequence or a
    stop string). A lap of an older epoch is dropped without effect.
    """

    micro_batch: MicroBatchId
    epoch: Epoch
    stopped: tuple[RequestId, ...] = ()


class ReleaseEnded(NamedTuple):
    """A `Release` has passed every stage; each stage freed these requests' KV."""

    requests: tuple[RequestId, ...]
    epoch: Epoch


class StageLost(NamedTuple):
    """A stage died or was declared dead. Its KV is gone."""

    stage: int


class StageReady(NamedTuple):
    """A replacement for a lost stage holds its layers and knows the current epoch."""

    stage: int


class StageTimesMeasured(NamedTuple):
    """What `window: auto` is computed from: means since the last report, and their jitter."""

    holds: tuple[
        Nanos, ...
    ]  # Per stage: time a micro-batch is computed (and sent, if that occupies).
    links: tuple[Nanos, ...]  # Per hop, the tail-to-head return last.
    turnaround: Nanos  # From a tail result at the head to the next submission.
    jitter: Nanos = Nanos(0)  # Spread of one lap (standard deviation).


class TimePassed(NamedTuple):
    """The time that `next_wakeup` named has come."""


RingEvent = (
    RequestArrived
    | RequestCancelled
    | LapEnded
    | ReleaseEnded
    | StageLost
    | StageReady
    | StageTimesMeasured
    | TimePassed
)
