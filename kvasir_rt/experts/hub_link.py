"""The coordinator's questions to the hub and to its own bridge: register, map, reports, slots."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from kvasir_core.swarm.defaults import TOLERANCES, SwarmPolicy
from kvasir_core.swarm.events import (
    MapFetched,
    MapFetchFailed,
    MapRow,
    ServedRow,
    SlotsPolled,
    SlotsPollFailed,
)
from kvasir_core.swarm.words import CoordinatorId, PollId, Session, WorkerId
from kvasir_core.units import NANOS_PER_SECOND
from kvasir_rt.hub.dials import parse_origin
from kvasir_rt.hub.limits import HubLimits
from kvasir_rt.hub.poller import SlotsPoller, Target
from kvasir_rt.logs import log_event
from kvasir_rt.swarm import protocol as wire
from kvasir_rt.swarm.frames import Dtype
from kvasir_rt.swarm.hub_http import HubError, HubHttp, HubRefused

logger = logging.getLogger("kvasir.experts")

REGISTER_AGAIN_S = 5.0  # After a failure.
AGAIN_S_MAX = 3600.0  # Whatever lease a hub gives.

BodyT = TypeVar("BodyT", bound=wire.Body)
Told = MapFetched | MapFetchFailed | SlotsPolled | SlotsPollFailed


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerOptions:
    """What a stage must know to use remote experts.

    Attributes:
        hub: `http(s)://HOST:PORT`.
        relay: `ws(s)://HOST:PORT/api/expert-relay`; None is the hub's own.
        service_token: The hub's.
        coordinator: This stage's name at the hub, unlike any other's.
        model: The model's name at the hub.
        model_file: Its path, if the hub is on this machine; slices are cut from it.
        layers: All layers of the model that hold experts, not only this stage's.
        experts: In each.
        hidden: Width of a row.
        slots_url: `http://HOST:PORT` of the bridge, whose `GET /slots` tells the load.
        slots_key: What the bridge wants as a bearer token.
        dtype: Of rows on the wire; the tolerance of checks follows from it.
        policy: The numbers; its tolerance is replaced.
        seed: Of which answers are checked.
        events: Where to write the core's event log; None writes none.
    """

    hub: str
    relay: str | None = None
    service_token: str = field(repr=False)
    coordinator: str
    model: str
    model_file: str | None = None
    layers: tuple[int, ...]
    experts: int
    hidden: int
    slots_url: str
    slots_key: str | None = field(default=None, repr=False)
    dtype: Dtype = "f32"
    policy: SwarmPolicy = field(default_factory=SwarmPolicy)
    seed: int = 0
    events: Path | None = None

    @property
    def core_policy(self) -> SwarmPolicy:
        """With the tolerance of the rows' format."""
        return replace(self.policy, tolerance=TOLERANCES[self.dtype])


class HubLink:
    """Made and used inside the caller's loop.

    Args:
        options: Whom to ask, as whom.
        tell: Takes what came back, on the loop.
    """

    def __init__(self, options: CallerOptions, tell: Callable[[Told], None]) -> None:
        self._options = options
        self._tell = tell
        policy = options.policy
        self._http = HubHttp(options.hub, policy.map_fetch_max_ns / NANOS_PER_SECOND)
        limit_s = policy.self_poll_max_ns / NANOS_PER_SECOND
        self._slots = SlotsPoller(HubLimits(), limit_s, tell)
        self._target = Target(parse_origin(options.slots_url), options.slots_key)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_registered = asyncio.Event()
        self._register_now = asyncio.Event()
        self._problem = ""
        self._spawn(self._stay_registered())

    async def close(self) -> None:
        """Say goodbye and end."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._is_registered.is_set():
            try:
                await self._ask(wire.Done, "DELETE", f"/api/coordinators/{self._quoted}")
            except HubError as error:
                log_event(logger, "no goodbye", level=logging.DEBUG, why=str(error))
        await self._slots.close()
        await self._http.close()

    def poll_slots(self, poll: PollId) -> None:
        self._slots.ask(poll, CoordinatorId(self._options.coordinator), self._target)

    def fetch_map(self, fetch: PollId) -> None:
        self._spawn(self._fetch_map(fetch))

    def report(self, rows: Sequence[ServedRow]) -> None:
        for first in range(0, len(rows), wire.SERVED_ROWS_MAX):
            self._spawn(self._report(rows[first : first + wire.SERVED_ROWS_MAX]))

    @property
    def _quoted(self) -> str:
        return quote(self._options.coordinator, safe="")

    async def _stay_registered(self) -> None:
        """At once, then before the lease ends, and when the hub does not know us (any more)."""
        options = self._options
        body = wire.CoordinatorRegistration(
            coordinator=options.coordinator,
            model=options.model,
            layers=list(options.layers),
            experts=options.experts,
            hidden_size=options.hidden,
            slots_url=options.slots_url,
            slots_key=options.slots_key,
            model_file=options.model_file,
        )
        while True:
            self._register_now.clear()
            try:
                reply = await self._ask(wire.CoordinatorReply, "POST", "/api/coordinators", body)
                self._is_registered.set()
                self._note("")
                again_s = min(AGAIN_S_MAX, max(1.0, reply.lease_s / 3))
            except HubError as error:
                self._note(str(error))
                again_s = REGISTER_AGAIN_S
            try:
                async with asyncio.timeout(again_s):
                    await self._register_now.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(0.1)  # Not again and again while the hub starts.

    async def _fetch_map(self, fetch: PollId) -> None:
        try:
            found = await self._ask(
                wire.DispatchMap, "GET", "/api/expert-dispatch-map",
                query={"model": self._options.model},
            )  # fmt: skip
            rows = tuple(
                MapRow(WorkerId(r.worker), Session(r.session), r.layer, r.experts[0], r.experts[1])
                for r in found.rows
            )
        except HubError:
            self._tell(MapFetchFailed(fetch))
            return
        self._tell(MapFetched(fetch, rows))

    async def _report(self, rows: Sequence[ServedRow]) -> None:
        served = [
            wire.ServedSlice(
                worker=row.worker,
                layer=row.layer,
                experts=[row.begin, row.end],
                standing=row.standing.value,
                last_serve_ms=row.last_serve_ms,
                pairs=row.pairs,
            )
            for row in rows
        ]
        body = wire.ServingReport(coordinator=self._options.coordinator, rows=served)
        try:
            await self._ask(wire.Done, "POST", "/api/expert-serving", body)
        except HubError as error:  # The next report of everything heals it.
            log_event(logger, "report not taken", level=logging.DEBUG, why=str(error))

    async def _ask(
        self, kind: type[BodyT], method: str, path: str, body: wire.Body | None = None,
        query: dict[str, str] | None = None,
    ) -> BodyT:  # fmt: skip
        try:
            return await self._http.ask(
                kind, method, path, token=self._options.service_token, body=body, query=query
            )
        except HubRefused as refused:
            if refused.status == 404 and path != "/api/coordinators":
                self._register_now.set()
            raise

    def _note(self, problem: str) -> None:
        if problem != self._problem:
            self._problem = problem
            log_event(
                logger,
                "cannot register with the hub" if problem else "registered with the hub",
                level=logging.WARNING if problem else logging.INFO,
                why=problem or None,
            )

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
