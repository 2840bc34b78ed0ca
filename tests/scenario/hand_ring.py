"""A ring driven by hand: fixed holds, free links, unbounded inputs; only for tests of the recorder."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kvasir_core.decisions import Deliver, Finish, Launch, Preempt, Refuse, Release
from kvasir_core.events import LapEnded, ReleaseEnded, RequestArrived, RingEvent, TimePassed
from kvasir_core.microbatch import MicroBatch
from kvasir_core.plan import Plan
from kvasir_core.ring import Ring
from kvasir_core.units import Nanos, RequestId, nanos
from kvasir_scenario.recorder import Recorder
from kvasir_scenario.report import Labels
from kvasir_scenario.report_schema import Report
from kvasir_scenario.tables import Ints


class Facts(NamedTuple):
    """What reading the workload would have found."""

    trace_span_s: float | None = None
    out_of_order: int = 0
    ties: int = 0
    clipped: int = 0
    warnings: tuple[str, ...] = ()


class Columns(NamedTuple):
    """An open-loop workload's columns."""

    request_id: Ints
    arrival_ns: Ints
    prompt_tokens: Ints
    output_tokens: Ints


def columns(*rows: tuple[int, int, int, int]) -> Columns:
    """From rows of (id, arrival in ns, prompt, output)."""
    return Columns(*np.array(rows, np.int64).reshape(-1, 4).T)


def plan_of(layers: tuple[int, ...] = (4, 4), **numbers: Any) -> Plan:
    edges = [sum(layers[:stage]) for stage in range(len(layers) + 1)]
    known: dict[str, Any] = {
        "row_width": 64, "micro_batch_width": 1, "window": 2, "running_max": 256, "context": 4096,
        "kv_tokens": (100_000,) * len(layers), "kv_block": 1, "credits": None,
    }  # fmt: skip
    known.update(numbers)
    known.setdefault("window_max", known["window"])
    return Plan(layers=tuple(pairwise(edges)), **known)


class HandRing:
    """Runs requests `(arrival_s, prompt, output)` through a real `Ring` and records them."""

    def __init__(self, plan: Plan, holds_s: tuple[float, ...], out: Path | None = None) -> None:
        self.plan = plan
        self.holds = [nanos(hold) for hold in holds_s]
        self.out = out

    def run(
        self,
        requests: Sequence[tuple[float, int, int]],
        *,
        warmup_s: float = 0,
        horizon_s: float | None = None,
        labels: Labels | None = None,
        csv: bool = False,
        bulk: bool = False,
        warnings: tuple[str, ...] = (),
    ) -> Report:
        """Run them all; `bulk` offers them ahead of time, and output 0 failed in the trace."""
        self.ring = Ring(self.plan)
        self.recorder = Recorder(
            self.out, self.plan, self.ring.causes, warmup_ns=nanos(warmup_s), csv=csv
        )
        self.free = [0] * self.plan.stages
        self.events: list[tuple[int, int, RingEvent]] = []
        self.count = 0
        self.flying: dict[int, tuple[MicroBatch, int, list[int]]] = {}
        self.bulk = bulk
        if bulk:
            rows = [
                (k, nanos(arrival), prompt, out)
                for k, (arrival, prompt, out) in enumerate(requests)
            ]
            self.recorder.offered_many(columns(*rows))
        for request, (arrival_s, prompt, output) in enumerate(requests):
            if output:
                self._at(nanos(arrival_s), RequestArrived(RequestId(request), prompt, output))
        now = 0
        end = None if horizon_s is None else nanos(horizon_s)
        while self.events and (end is None or self.events[0][0] <= end):
            now, _, event = heappop(self.events)
            self._handle(event, now)
        end = nanos(horizon_s) if horizon_s is not None else Nanos(now)
        self.ring.handle(TimePassed(), Nanos(end))
        for batch, composed, stamps in self.flying.values():
            self.recorder.lost(batch, composed, end, stamps)
        return self.recorder.close(
            end,
            self.ring.statistics(),
            Facts(
                trace_span_s=requests[-1][0] - requests[0][0] if requests else None,
                warnings=warnings,
            ),
            labels or Labels(name="hand", mode="simulated"),
        )

    def _at(self, time: int, event: RingEvent) -> None:
        heappush(self.events, (time, self.count, event))
        self.count += 1

    def _handle(self, event: RingEvent, now: int) -> None:
        recorder = self.recorder
        if isinstance(event, RequestArrived) and not self.bulk:
            recorder.offered(event.request, now, event.prompt_tokens)
        orders = self.ring.handle(event, Nanos(now))
        delivered = next((order.requests for order in orders if isinstance(order, Deliver)), ())
        if isinstance(event, LapEnded):
            batch, composed, stamps = self.flying.pop(event.micro_batch)
            recorder.lap(batch, composed, now, delivered, stamps)
        for order in orders:
            match order:
                case Finish(request, reason):
                    recorder.finished(request, now, reason)
                case Refuse(request):
                    recorder.refused(request, now)
                case Preempt(request):
                    recorder.preempted(request)
                case Release(ids, epoch):
                    self._at(now, ReleaseEnded(ids, epoch))
                case Launch(batch):
                    self._launch(batch, now)
                case _:
                    pass
        statistics = self.ring.statistics()
        recorder.sample(now, statistics.waiting, statistics.running, statistics.kv_blocks_in_use)
        wakeup = self.ring.next_wakeup()
        if wakeup is not None:
            self._at(max(wakeup, now), TimePassed())

    def _launch(self, batch: MicroBatch, now: int) -> None:
        stamps: list[int] = []
        at = now
        for stage, hold in enumerate(self.holds):
            start = max(at, self.free[stage])
            stamps += (at, start, start + hold, start + hold)
            at = self.free[stage] = start + hold
        self.flying[batch.id] = (batch, now, stamps)
        self._at(at, LapEnded(batch.id, batch.epoch))
