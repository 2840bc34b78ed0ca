"""The swarm of a real run, looked at every second: what `report.json` says of it.

Two sources: the coordinators' counts, which travel with the stages' beats, and the hub's
`GET /api/swarm`. The hub counts for all its models together (claims, releases, losses, downloads);
it shows no idle volunteer, nor whether a worker that is believed lies.
"""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvasir_core.microbatch import FinishReason, MicroBatch
from kvasir_core.swarm.words import TELLING
from kvasir_core.units import NANOS_PER_SECOND, Nanos, RequestId
from kvasir_rt.engine import Engine
from kvasir_rt.ring_errors import RingDown
from kvasir_rt.snapshot import RingSnapshot
from kvasir_rt.swarm.hub_http import HubError, HubHttp
from kvasir_rt.swarm_look import HubLook, counts_of, look_of
from kvasir_rt.wire import ExpertCounts
from kvasir_scenario.recorder import Recorder
from kvasir_scenario.swarm_moments import Moments, Row, TokenClock, write_rows

SHOWN = "/api/swarm"
LOOK_S_MAX = 2.0  # For one answer of the hub.
SETTLE_S_MAX = 3.0  # At the end, for the last counts.
SETTLE_TURNS = 2  # Whatever was under way when we looked, the second is of later.


class SwarmRecorder(Recorder):
    """A recorder that also counts tokens as they come."""

    tokens: TokenClock

    def lap(
        self, micro_batch: MicroBatch, composed_ns: int, returned_ns: int,
        delivered: tuple[RequestId, ...], stamps: list[int],
    ) -> None:  # fmt: skip
        """See `Recorder.lap`."""
        self.tokens.given(delivered, returned_ns)
        super().lap(micro_batch, composed_ns, returned_ns, delivered, stamps)

    def finished(self, request: RequestId, at_ns: int, reason: FinishReason) -> None:
        """See `Recorder.finished`."""
        self.tokens.ended(request)
        super().finished(request, at_ns, reason)


@dataclass(slots=True)
class Holdings:
    """Who covered what, as far as looks can tell."""

    nodes: set[str] = field(default_factory=set)  # All that were ever seen.
    starts: int = 0
    stops: int = 0
    wasted: int = 0
    _held: dict[tuple[str, tuple[int, ...]], bool] = field(default_factory=dict)
    """Slices now, and whether their worker was ever known to serve."""

    def take(self, look: HubLook) -> None:
        """What is covered now."""
        now = {(node, slice_): served for node, slice_, served in look.slices}
        self.nodes.update(node for node, _ in now)
        self.starts += len(now.keys() - self._held.keys())
        gone = self._held.keys() - now.keys()
        self.stops += len(gone)
        self.wasted += sum(not self._held[each] for each in gone)
        self._held = {each: served or self._held.get(each, False) for each, served in now.items()}


class SwarmWatch:
    """A thread that looks.

    Args:
        engine: Started; its recorder counts tokens with `tokens`.
        hub: Its URL.
        token: The service token.
        model: The model's name there.
        tokens: See `SwarmRecorder`.
        period_s: Between two looks.
    """

    def __init__(
        self, engine: Engine, hub: str, token: str, model: str, tokens: TokenClock, period_s: float
    ) -> None:
        self.moments = Moments()
        self.rows: list[Row] = []
        self.holdings = Holdings()
        self.first: dict[str, int] | None = None
        self.hub: HubLook | None = None
        self.looks = 0
        self.missed = 0  # Looks at the hub without an answer.
        self.counts: tuple[ExpertCounts, ...] = ()
        self.quarantined_ns: int | None = None  # When the last one was so for the first time.
        self._engine = engine
        self._address = hub, token, model
        self._tokens = tokens
        self._period_s = period_s
        self._before = (0, 0, 0, 0, 0, 0)  # Time, tokens, gap_ns, gaps, pairs, remote pairs.
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="swarm-watch", daemon=True)

    def begin(self) -> None:
        """What the hub has counted until now is not of this run, whose ring is yet to start."""
        with suppress(HubError, KeyError, TypeError, ValueError):
            self.first = counts_of(asyncio.run(self._ask()))

    def start(self) -> None:
        """Look, from now on."""
        self._thread.start()

    def close(self) -> None:
        """A last look, once the coordinators' counts are of now; nothing if it never looked."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()

    def write(self, directory: Path, *, csv: bool) -> None:
        """`swarm.parquet`."""
        write_rows(self.rows, directory, csv=csv)

    async def _ask(self) -> dict[str, Any]:
        url, token, _ = self._address
        http = HubHttp(url, LOOK_S_MAX)
        try:
            return await http.ask(dict[str, Any], "GET", SHOWN, token=token)
        finally:
            await http.close()

    def _run(self) -> None:
        asyncio.run(self._watch())

    async def _watch(self) -> None:
        url, token, model = self._address
        http = HubHttp(url, LOOK_S_MAX)
        try:
            while not await asyncio.to_thread(self._stop.wait, self._period_s):
                await self._look(http, token, model)
            await asyncio.to_thread(self._settle)
            await self._look(http, token, model)
        finally:
            await http.close()

    async def _look(self, http: HubHttp, token: str, model: str) -> None:
        self.looks += 1
        try:
            shown = await http.ask(dict[str, Any], "GET", SHOWN, token=token)
            self.hub = look_of(shown, model)
            self.first = self.first or self.hub.counts
            self.holdings.take(self.hub)
        except (HubError, KeyError, TypeError, ValueError):
            self.missed += 1
        try:
            self._add(await asyncio.to_thread(self._engine.snapshot))
        except RingDown:
            return

    def _settle(self) -> None:
        """Counts come with beats; wait for those of now."""
        until_s = time.monotonic() + SETTLE_S_MAX
        begin: list[int] = []
        while time.monotonic() < until_s:
            try:
                turns = [counts.turn for counts in counts_in(self._engine.snapshot())]
            except RingDown:
                return
            begin = begin or turns
            if all(now >= then + SETTLE_TURNS for now, then in zip(turns, begin, strict=True)):
                return
            time.sleep(0.05)

    def _add(self, ring: RingSnapshot) -> None:
        now, counts = ring.now_ns, counts_in(ring)
        if now <= self._before[0] or not counts:
            return
        if sum(c.quarantined for c in counts) > sum(c.quarantined for c in self.counts):
            self.quarantined_ns = now
        self.counts = counts
        tokens = self._tokens
        remote = sum(c.pairs_remote for c in counts)
        pairs = remote + sum(c.pairs_computed for c in counts)
        sums = now, tokens.tokens, tokens.gap_ns, tokens.gaps, pairs, remote
        spent, given, gap_ns, gaps, pairs, remote = (
            value - before for value, before in zip(sums, self._before, strict=True)
        )  # A stage that was replaced counts anew: then pairs are unknown for one row.
        self._before = sums
        share = min(1.0, remote / pairs) if pairs > 0 and remote >= 0 else np.nan
        tpot_s = gap_ns / gaps / NANOS_PER_SECOND if gaps > 0 else np.nan
        hub, state = self.hub, ring.statistics
        standing = [max(c.standings.get(str(each), 0) for c in counts) for each in TELLING]
        self.rows.append((
            now, state.waiting, state.running, any(c.is_engaged for c in counts),
            hub is not None and hub.recruiting, hub.target if hub else 0, hub.claims if hub else 0,
            hub.online if hub else 0, hub.covering if hub else 0, *reversed(standing),
            hub.covered if hub else np.nan, hub.reached if hub else np.nan, self.downloads,
            share, given * NANOS_PER_SECOND / spent, tpot_s,
        ))  # fmt: skip
        if hub is not None:
            self.moments.note(
                Nanos(now), state.running, max(0, remote), hub.reached, hub.surplus, hub.online,
                hub.covering, hub.target, hub.threshold, hub.base,
            )  # fmt: skip

    @property
    def downloads(self) -> int:
        """Slices that went out to the last byte."""
        return self.since("downloads")

    def since(self, name: str) -> int:
        """What a count of the hub has grown by; a hub that restarted counts anew."""
        if self.hub is None or self.first is None:
            return 0
        return max(0, self.hub.counts[name] - self.first[name])


def counts_in(ring: RingSnapshot) -> tuple[ExpertCounts, ...]:
    """Of the stages that have a coordinator."""
    return tuple(stage.experts for stage in ring.stages if stage.experts is not None)


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
