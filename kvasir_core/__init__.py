"""Decisions without I/O: events in, decisions out. Start reading at `ring.py`."""

from kvasir_core.causes import Cause, CauseClock
from kvasir_core.decisions import (
    BeginEpoch,
    Deliver,
    Finish,
    Launch,
    Preempt,
    Refuse,
    Release,
    RingDecision,
)
from kvasir_core.errors import IllegalEvent, KvasirError, PlanError, ScenarioError
from kvasir_core.events import (
    LapEnded,
    ReleaseEnded,
    RequestArrived,
    RequestCancelled,
    RingEvent,
    StageLost,
    StageReady,
    StageTimesMeasured,
    TimePassed,
)
from kvasir_core.meter import StageMeter
from kvasir_core.microbatch import BindingLimit, FinishReason, MicroBatch, Span
from kvasir_core.plan import Plan, split_evenly
from kvasir_core.ring import Ring
from kvasir_core.statistics import RingStatistics
from kvasir_core.units import NANOS_PER_SECOND, Epoch, MicroBatchId, Nanos, RequestId, nanos

__all__ = [
    "NANOS_PER_SECOND", "BeginEpoch", "BindingLimit", "Cause", "CauseClock", "Deliver", "Epoch",
    "Finish", "FinishReason", "IllegalEvent", "KvasirError", "LapEnded", "Launch", "MicroBatch",
    "MicroBatchId", "Nanos", "Plan", "PlanError", "Preempt", "Refuse", "Release", "ReleaseEnded",
    "RequestArrived", "RequestCancelled", "RequestId", "Ring", "RingDecision", "RingEvent",
    "RingStatistics", "ScenarioError", "Span", "StageLost", "StageMeter", "StageReady",
    "StageTimesMeasured", "TimePassed", "nanos", "split_evenly",
]  # fmt: skip
