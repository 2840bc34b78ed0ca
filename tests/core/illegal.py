"""What cannot happen now, of every kind, and a ring's whole state as a value to compare."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from kvasir_core import (
    Epoch,
    FinishReason,
    LapEnded,
    MicroBatchId,
    Nanos,
    Plan,
    ReleaseEnded,
    RequestArrived,
    RequestCancelled,
    RequestId,
    RingEvent,
    StageLost,
    StageReady,
    StageTimesMeasured,
    TimePassed,
)
from tests.core.honest_shell import HonestShell

NOBODY = RequestId(10**9)


def illegal_events(shell: HonestShell) -> list[tuple[str, RingEvent, int]]:
    """(why, event, nanoseconds after the last one) for everything that cannot happen now."""
    model, plan = shell.model, shell.plan
    found: list[tuple[str, RingEvent, int]] = []
    if model.now:
        found.append(("time goes back", TimePassed(), -1))
    found += [(why, event, 1) for why, event in _of_requests(shell)]
    found += [(why, event, 1) for why, event in _of_laps(shell)]
    found += [(why, event, 1) for why, event in _of_releases(shell)]
    for stage in (-1, plan.stages):
        found.append(("no such stage", StageLost(stage), 1))
    healthy = [stage for stage in range(plan.stages) if stage not in model.lost]
    found += [("not lost", StageReady(stage), 1) for stage in [*healthy[:1], plan.stages]]
    zero = (Nanos(0),) * plan.stages
    found.append(("another ring's", StageTimesMeasured((*zero, Nanos(0)), zero, Nanos(0)), 1))
    found.append(("no return link", StageTimesMeasured(zero, zero[1:], Nanos(0)), 1))
    found.append(("negative time", StageTimesMeasured(zero, zero, Nanos(-1)), 1))
    return found


def _of_requests(shell: HonestShell) -> Iterator[tuple[str, RingEvent]]:
    model = shell.model
    new = RequestId(shell.next_id)
    yield "empty prompt", RequestArrived(new, 0, 1)
    yield "no output", RequestArrived(new, 1, 0)
    yield "a prompt of less than nothing", RequestArrived(new, -3, 5)
    yield "nothing left to compute", RequestArrived(new, 4, 1, 4)
    yield "cached less than nothing", RequestArrived(new, 4, 1, -1)
    yield "cancel of a stranger", RequestCancelled(NOBODY)
    for request in model.live[:1]:
        yield "arrives twice", RequestArrived(request.id, 1, 1)
        for reason in (FinishReason.LENGTH, FinishReason.REFUSED):
            yield "not the shell's to say", RequestCancelled(request.id, reason)
    for id_ in list(model.releasing)[:1]:
        yield "its number is still in the stages", RequestArrived(id_, 1, 1)
    for request in model.past[:1]:
        if request.ended_ns is not None:
            yield "cancel of one that ended", RequestCancelled(request.id)


def _of_laps(shell: HonestShell) -> Iterator[tuple[str, RingEvent]]:
    model = shell.model
    future, never = Epoch(model.epoch + 1), MicroBatchId(model.micro_batches)
    yield "not launched", LapEnded(never, model.epoch)
    yield "an epoch to come", LapEnded(never, future)
    for id_ in range(model.micro_batches):
        if id_ not in model.open:
            yield "its lap has ended", LapEnded(MicroBatchId(id_), model.epoch)
            break
    returned: set[RequestId] = set()
    for batch in model.open.values():
        yield "an epoch to come", LapEnded(batch.id, future)
        yield "a stranger stops", LapEnded(batch.id, model.epoch, (NOBODY,))
        for span in batch.spans:
            is_live = model.requests[span.request].ended_ns is None
            if not span.has_output:
                yield "no output row", LapEnded(batch.id, model.epoch, (span.request,))
            if is_live and not span.is_decode and span.request in returned:
                yield "overtakes its earlier rows", LapEnded(batch.id, model.epoch)
        returned.update(batch.requests)


def _of_releases(shell: HonestShell) -> Iterator[tuple[str, RingEvent]]:
    model = shell.model
    yield "release of a stranger", ReleaseEnded((NOBODY,), model.epoch)
    for request in model.running[:1]:
        yield "release of one that runs", ReleaseEnded((request.id,), model.epoch)
    for id_ in list(model.releasing):
        yield "an epoch to come", ReleaseEnded((id_,), Epoch(model.epoch + 1))
        yield "freed twice", ReleaseEnded((id_, id_), model.epoch)
        yield "one of them is a stranger", ReleaseEnded((id_, NOBODY), model.epoch)
        if model.is_in_flight(id_):
            yield "its rows are in flight", ReleaseEnded((id_,), model.epoch)


def state_of(value: Any, seen: dict[int, int] | None = None) -> Any:
    """A deep copy of plain values: two are equal if and only if nothing changed."""
    seen = {} if seen is None else seen
    if value is None or isinstance(value, bool | int | float | str | Enum | Plan):
        return value
    if callable(value):
        return "callable"
    if id(value) in seen:
        return ("seen", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, dict):
        return [(state_of(k, seen), state_of(v, seen)) for k, v in value.items()]
    if is_dataclass(value):
        return [(f.name, state_of(getattr(value, f.name), seen)) for f in fields(value)]
    if hasattr(value, "__dict__"):
        return state_of(vars(value), seen)
    names = getattr(type(value), "__slots__", None)
    if names:
        return [(name, state_of(getattr(value, name), seen)) for name in names]
    return [type(value).__name__, *[state_of(item, seen) for item in value]]
