"""What happened in a swarm, told by its event logs: each is replayed through a fresh core.

All processes of one machine share the monotonic clock, so moments of different logs compare.
"""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvasir_core.eventlog import replay
from kvasir_core.swarm import Coordinator, Hub, SwarmPolicy
from kvasir_core.swarm.decisions import (
    Accept,
    Acknowledge,
    AdmitRelay,
    Assign,
    Disengage,
    Dispatch,
    Engage,
    LoseWorker,
    SetTarget,
)
from kvasir_core.swarm.eventlog import COORDINATOR_EVENTS, HUB_EVENTS
from kvasir_core.swarm.events import CoverageReported, ServingReported, SlotsPolled
from kvasir_rt.swarm.event_log import DecisionDigest


@dataclass(frozen=True)
class Moment:
    """Something that happened."""

    at_ns: int
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Replayed:
    """A log told again, and whether the decisions are those of the process that wrote it.

    None: that process was killed, and could not say.
    """

    events: int
    is_identical: bool | None
    moments: list[Moment]


def replay_hub(path: Path) -> Replayed:
    """The hub's log."""
    core = _core_of(path)
    hub = Hub(SwarmPolicy(**core["policy"]), random.Random(core["seed"]))
    return _replayed(path, core, hub, HUB_EVENTS, HubMoments(hub))


def replay_coordinator(path: Path) -> Replayed:
    """A stage's log."""
    core = _core_of(path)
    coordinator = Coordinator(SwarmPolicy(**core["policy"]), random.Random(core["seed"]))
    moments = CoordinatorMoments(path.stem)
    return _replayed(path, core, coordinator, COORDINATOR_EVENTS, moments)


def moments_of(events: Path) -> list[Moment]:
    """Of all logs of a run, in order of time."""
    found = list(replay_hub(events / "hub.jsonl").moments)
    for path in sorted(events.glob("coordinator-*.jsonl")):
        found += replay_coordinator(path).moments
    return sorted(found, key=lambda moment: moment.at_ns)


def first(moments: list[Moment], kind: str, after_ns: int = 0) -> Moment | None:
    return next((m for m in moments if m.kind == kind and m.at_ns >= after_ns), None)


def last(moments: list[Moment], kind: str) -> Moment | None:
    return next((m for m in reversed(moments) if m.kind == kind), None)


def _core_of(path: Path) -> dict[str, Any]:
    core: dict[str, Any] = json.loads(path.with_name(path.name + ".core.json").read_text())
    return core


def _replayed(path: Path, core: dict[str, Any], state: Any, registry: Any, teller: Any) -> Replayed:
    digest = DecisionDigest()
    moments: list[Moment] = []
    with path.open(encoding="utf-8") as lines:
        whole = (line for line in lines if line.endswith("\n"))  # A killed process's last is not.
        for event, now, decisions in replay(state, whole, registry):
            digest.add(decisions)
            moments += teller.told(event, now, decisions)
    is_identical = None
    if "events" in core:
        is_identical = (digest.events, digest.hex) == (core["events"], core["decisions_sha256"])
    return Replayed(digest.events, is_identical, moments)


class HubMoments:
    """What is worth telling of the hub."""

    def __init__(self, hub: Hub) -> None:
        self._threshold = hub.recruitment().threshold
        self._is_high = False
        self._covered: dict[str, set[Any]] = {}
        self._proven: set[str] = set()

    def told(self, event: Any, now: int, decisions: Any) -> Iterator[Moment]:
        match event:
            case SlotsPolled():
                is_high = event.busy >= self._threshold
                if is_high != self._is_high:
                    self._is_high = is_high
                    yield Moment(now, "hub reads high" if is_high else "hub reads low")
            case CoverageReported():
                yield from self._coverage(event, now)
            case ServingReported():
                for row in event.rows:
                    if row.last_serve_ms and row.worker not in self._proven:
                        self._proven.add(row.worker)
                        yield Moment(now, "hub knows it proven", row.worker[:8])
            case _:
                pass
        for order in decisions:
            match order:
                case SetTarget(_, target, _):
                    yield Moment(now, "target rises" if target else "target falls", str(target))
                case Assign():
                    layer, begin, end = order.slice
                    yield Moment(now, "assigned", f"{order.node[:8]} {layer} {begin} {end}")
                case AdmitRelay():
                    yield Moment(now, "dials", order.worker[:8])
                case Acknowledge() if order.release:
                    yield Moment(now, "released", f"{order.worker[:8]} {len(order.release)}")
                case LoseWorker():
                    yield Moment(now, "lost", order.worker[:8])
                case _:
                    pass

    def _coverage(self, event: CoverageReported, now: int) -> Iterator[Moment]:
        before, now_covered = self._covered.get(event.worker, set()), set(event.segments)
        for slice_ in sorted(now_covered - before):
            words = " ".join(map(str, slice_))
            yield Moment(now, "covers", f"{event.worker[:8]} {words}")
        if before and not now_covered:
            yield Moment(now, "leaves", event.worker[:8])
        self._covered[event.worker] = now_covered


class CoordinatorMoments:
    """What is worth telling of a stage's coordinator."""

    def __init__(self, name: str) -> None:
        self._name = name

    def told(self, event: Any, now: int, decisions: Any) -> Iterator[Moment]:
        del event
        for order in decisions:
            match order:
                case Engage():
                    yield Moment(now, "engages", self._name)
                case Disengage(why):
                    yield Moment(now, "disengages", f"{self._name} {why}")
                case Dispatch(is_trial=True):
                    yield Moment(now, "trial", order.worker[:8])
                case Dispatch():
                    yield Moment(now, "dispatch", order.worker[:8])
                case Accept():
                    yield Moment(now, "accepts", order.worker[:8])
                case _:
                    pass
