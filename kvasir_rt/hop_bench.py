"""Times of a hop and of the bridge's work per lap, on two processes that compute nothing."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median, pstdev

from kvasir_core.microbatch import MicroBatch
from kvasir_core.plan import Plan
from kvasir_core.units import RequestId
from kvasir_rt import wire
from kvasir_rt.bench import Load, Requests
from kvasir_rt.engine import Engine, EngineOptions
from kvasir_rt.member import CrewOptions
from kvasir_rt.scenario_ring import FIXED_DTYPE
from kvasir_rt.switchboard import LineOptions
from kvasir_scenario.profile import Lap, Line

ROWS = (1, 8, 32, 128)
HOLD_NS = 1_000_000
VOCABULARY = 1000


@dataclass(slots=True)
class Hops:
    """A recorder that keeps each lap's micro-batch and stamps."""

    laps: list[tuple[MicroBatch, list[int]]] = field(default_factory=list)

    def lap(
        self,
        micro_batch: MicroBatch,
        composed_ns: int,
        returned_ns: int,
        delivered: tuple[RequestId, ...],
        stamps: list[int],
    ) -> None:
        del composed_ns, returned_ns, delivered
        self.laps.append((micro_batch, stamps))

    def _ignore(self, *_: object, **__: object) -> None:
        """Nothing else is of interest."""

    lost = offered = offered_many = finished = refused = preempted = sample = spent = _ignore


def measure_hops(hidden: int, element_bytes: int, repeats: int) -> tuple[list[Line], Lap]:
    """A hop by bytes, and the bridge's own time from a tail result to the next launch.

    Raises:
        RingDown: The ring of two idle stages did not start.
    """
    row_bytes = hidden * element_bytes
    plan = Plan(
        layers=((0, 1), (1, 2)),
        row_width=max(ROWS),
        micro_batch_width=8,
        window=1,
        window_max=1,
        running_max=8,
        context=1024,
        kv_tokens=(8192, 8192),
        hidden=row_bytes // 2,
        element_bytes=2,
    )
    crew = CrewOptions(
        plan=plan,
        dtype=FIXED_DTYPE,
        compute=wire.FixedSpec((HOLD_NS, HOLD_NS), VOCABULARY),
        secret=secrets.token_hex(32),
    )
    engine = Engine(EngineOptions(lines=LineOptions(crew=crew)))
    hops = engine.recorder = Hops()
    try:
        engine.start()
        requests = Requests(engine)
        for size in ROWS:
            for _ in range(max(8, repeats)):
                requests.run(Load(requests=1, prompt_tokens=size, new_tokens=2), VOCABULARY)
    finally:
        engine.close()
    return hop_lines(hops.laps, row_bytes)


def hop_lines(
    laps: Sequence[tuple[MicroBatch, list[int]]], row_bytes: int
) -> tuple[list[Line], Lap]:
    """From the stamps of two stages (received, start, end, sent each), one lap after another."""
    by_bytes: dict[int, list[int]] = {}
    for batch, stamps in laps:
        by_bytes.setdefault(batch.row_count * row_bytes, []).append(max(0, stamps[4] - stamps[3]))
    lines = [
        (size, round(median(times)), round(pstdev(times)))
        for size, times in sorted(by_bytes.items())
    ]
    gaps = [
        after[0] - before[7]
        for (_, before), (batch, after) in pairwise(laps)
        if batch.decodes  # It was launched as soon as its token was back.
    ]
    bridge = max(0, round(median(gaps)) - lines[0][1])  # The return is a hop of its own.
    return lines, Lap(bridge_ns=bridge, spread_ns=round(pstdev(gaps)))
