"""A worker in virtual time: volunteers, downloads, serves, and comes and goes as its owner does.

    offline --arrival--> volunteering --assigned--> downloading --coverage, dial--> serving
    serving --released, owner leaves, crash--> without that slice, or offline

All is pull: it asks the hub, and answers what it is asked over the connection that it dialled. Its
compute is one server; a piece of work is the same layer's call for all of a stage's layers at once.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from kvasir_core import NANOS_PER_SECOND, Nanos, nanos
from kvasir_core.swarm.decisions import Acknowledge, AdmitRelay, Assign, Decline
from kvasir_core.swarm.events import (
    CoverageReported,
    Held,
    RelayOpened,
    VolunteerAsked,
)
from kvasir_core.swarm.words import ClaimId, Session, Slice, WorkerId
from kvasir_scenario.schema_experts import WorkerClass
from kvasir_sim.pipeline import Clock
from kvasir_sim.swarm.cores import Cores
from kvasir_sim.swarm.honesty import Conscience
from kvasir_sim.swarm.network import Line, Weather, Wire, after
from kvasir_sim.swarm.numbers import ExpertNumbers

if TYPE_CHECKING:
    from kvasir_sim.swarm.calls import Trip
    from kvasir_sim.swarm.hub_shell import HubShell

NO_REPLY_NS = nanos(10)  # A volunteer whose question is not answered asks again.
KEEPALIVE_NS = nanos(20)  # A dial whose handshake got lost is seen as closed by then.
NEXT_SLICE_NS = nanos(0.1)  # From one slice that is ready to the question for the next.
DRAIN_NS = nanos(10)  # From a goodbye to the end: two fetches of the map.
HELD_MAX = 1024  # Slices it tells the hub of, the latest first.


@dataclass(slots=True)
class Holding:
    """A slice in memory."""

    is_download: bool  # Else it was on disk.
    served: int = 0  # Pairs of accepted answers, and of answers that a check found right.


@dataclass(slots=True)
class MarketTally:
    """What all workers did, since the start."""

    downloads: int = 0
    download_bytes: int = 0
    warm_loads: int = 0
    wasted_downloads: int = 0
    starts: int = 0  # Slices that became covered.
    stops: int = 0


class Worker:
    """One volunteer."""

    def __init__(
        self,
        env: Clock,
        identity: WorkerId,
        kind: WorkerClass,
        experts_max: int,
        numbers: ExpertNumbers,
        chance: Random,
        tally: MarketTally,
        weather: Weather,
    ) -> None:
        self.env = env
        self.id = identity
        self.kind = kind
        self.experts_max = experts_max
        self.conscience = Conscience(kind, chance)
        self.is_online = False
        self.is_connected = False
        self.session = Session(0)
        self.slices: dict[Slice, Holding] = {}
        self.draining: dict[Slice, Holding] = {}  # Released, and served until no map names them.
        self.disk: dict[Slice, None] = {}  # The latest last.
        self.trips: dict[int, Trip] = {}  # Asked and not answered.
        self.stalled_until = 0
        self.joins = self.exits = 0  # Times that it came to serve, and served no more.
        self.wrong_accepted = 0  # Wrong answers that entered a sum, since its last quarantine,
        self.wrong_accepted_max = 0  # and the most before any.
        self.slower: list[float] = []  # Faults that slow it down now.
        self.life = 0  # Rises with every start and stop: what an earlier life planned is off.
        self.on_closed: Callable[[Worker], None] = lambda _: None  # Its connection ended.
        self.on_gone: Callable[[Worker], None] = lambda _: None  # It said goodbye and is off.
        self._numbers = numbers
        self._chance = chance
        self._tally = tally
        self._hub: HubShell | None = None
        self._line = Line(env, weather, nanos(kind.link.latency_s), kind.lost_share)
        self._in = Wire(kind.link.bandwidth_bytes_per_s)
        self._out = Wire(kind.link.bandwidth_bytes_per_s)
        self._free_at = 0  # When its own cores are through with all they were given.
        self._queued: deque[tuple[int, Callable[[], None]]] = deque()  # On cores of others too.
        self._fetching: Slice | None = None
        self._asked = 0
        self._beats = 0

    # ------------------------------------------------------------------ coming and going

    def start(self, hub: "HubShell | None") -> None:
        """It comes online and volunteers."""
        self._hub = hub
        if self.is_online:
            return
        self.life += 1
        self.is_online = True
        self._free_at = self.env.now
        if hub is not None:
            self._ask()

    def leave(self) -> None:
        """Its owner takes it away: it drains, says goodbye, and is off."""
        if not self.is_online:
            return
        if self.slices and self._hub is not None:
            self._beat(is_draining=True)
            self._later(DRAIN_NS, self._go)
        else:
            self._go()

    def _go(self) -> None:
        if self._hub is not None:
            self._hub_says(CoverageReported(self.id, self._numbers.name, ()))
        self.crash()
        self.on_gone(self)

    def crash(self) -> None:
        """It is gone at once; what it held in memory is lost, its disk is not."""
        self.life += 1
        self.is_online = False
        self._fetching = None
        for slice_ in list(self.slices):
            self._drop(slice_)
        self.draining.clear()
        if not self.kind.keeps_slices:
            self.disk.clear()
        self.disconnect()

    def disconnect(self) -> None:
        """Its connection ends: what it was asked over it is not answered."""
        if self.is_connected:
            self.is_connected = False
            if self._hub is not None:
                self._hub.close_relay(self.id, self.session)
        self.on_closed(self)

    def stall(self, for_ns: int) -> None:
        """It accepts calls and answers none for so long."""
        self.stalled_until = max(self.stalled_until, self.env.now + for_ns)

    def hold(self, slices: tuple[Slice, ...]) -> None:
        """Hold these without a market (`experts.hub: null`)."""
        for slice_ in slices:
            self.slices[slice_] = Holding(is_download=False)

    # ------------------------------------------------------------------ the market

    @property
    def room(self) -> int:
        """Experts that it could still take."""
        used = sum(s.end - s.begin for s in self.slices)
        if self._fetching is not None:
            used += self._fetching.end - self._fetching.begin
        return self.experts_max - used

    def _ask(self) -> None:
        if self._fetching is not None or self.room < 1:
            return
        held = [s for s in reversed(self.disk) if s not in self.slices][:HELD_MAX]
        holds = tuple([Held(self._numbers.name, *slice_) for slice_ in held])
        event = VolunteerAsked(self.id, self._numbers.name, self.room, holds)
        self._asked += 1
        question = self._asked
        hub, life = self._hub, self.life
        assert hub is not None

        def reply(answer: object) -> None:
            if self.life == life and question == self._asked:
                self._asked += 1  # Its second copy answers nothing.
                self._take_offer(answer)

        self._line.ask(lambda: hub.serve(event), reply)
        self._later(NO_REPLY_NS, lambda: self._ask() if question == self._asked else None)

    def _take_offer(self, answer: object) -> None:
        if isinstance(answer, Assign):
            self._fetch(answer.slice, answer.claim)
        else:
            wait = answer.retry_after if isinstance(answer, Decline) else NO_REPLY_NS
            self._later(wait, self._ask)

    def _fetch(self, slice_: Slice, claim: ClaimId) -> None:
        """From its disk, or from the hub."""
        is_download = slice_ not in self.disk
        size = (slice_.end - slice_.begin) * (self._numbers.expert_bytes or 0)
        kind = self.kind
        rate = kind.download_bytes_per_s if is_download else kind.load_bytes_per_s
        self._fetching = slice_
        if is_download:
            self._tally.downloads += 1
            self._tally.download_bytes += size
        else:
            self._tally.warm_loads += 1
        self._later(
            round(size * NANOS_PER_SECOND / rate),
            lambda: self._ready(slice_, claim, is_download=is_download),
        )

    def _ready(self, slice_: Slice, claim: ClaimId, *, is_download: bool) -> None:
        self._fetching = None
        self.disk.pop(slice_, None)
        self.disk[slice_] = None
        if not any(_overlaps(slice_, own) for own in self.slices):
            self.joins += not self.slices
            self.slices[slice_] = Holding(is_download)
            self._tally.starts += 1
            self._beat(claim)
        self._later(NEXT_SLICE_NS, self._ask)

    def _beat(self, claim: ClaimId | None = None, *, is_draining: bool = False) -> None:
        """A heartbeat now, and the next one after the hub's period."""
        hub, life = self._hub, self.life
        assert hub is not None
        self._beats += 1
        beat = self._beats
        event = CoverageReported(
            self.id, self._numbers.name, tuple(self.slices), claim, is_draining
        )

        def reply(answer: object) -> None:
            if self.life == life and isinstance(answer, Acknowledge):
                self._take_orders(answer)

        self._line.ask(lambda: hub.serve(event), reply)
        if self.slices and not is_draining:
            self._later(hub.heartbeat_ns, lambda: self._beat() if beat == self._beats else None)

    def _take_orders(self, answer: Acknowledge) -> None:
        released = [slice_ for slice_ in answer.release if slice_ in self.slices]
        for slice_ in released:
            self.draining[slice_] = self.slices[slice_]
            self._drop(slice_)
            self._later(DRAIN_NS, partial(self._drained, slice_))
        if released:
            self._beat()
            self._later(NEXT_SLICE_NS, self._ask)
        if not self.slices:
            return
        if answer.session > self.session or not self.is_connected:
            self._dial(answer.session)

    def _dial(self, session: Session) -> None:
        hub, life = self._hub, self.life
        assert hub is not None

        def reply(answer: object) -> None:
            if self.life == life and isinstance(answer, AdmitRelay):
                if self.is_connected:
                    self.on_closed(self)  # The older connection goes.
                self.session, self.is_connected = session, True

        def see() -> None:
            is_there = self.life == life and self.is_connected and self.session == session
            if not is_there:
                hub.close_relay(self.id, session)

        event = RelayOpened(self.id, session)
        self._line.ask(lambda: hub.serve(event) if hub.has_relay else None, reply)
        after(self.env, KEEPALIVE_NS, see)

    def _hub_says(self, event: CoverageReported) -> None:
        hub = self._hub
        assert hub is not None
        self._line.carry(lambda: hub.tell_peer(event))

    def _drop(self, slice_: Slice) -> None:
        holding = self.slices.pop(slice_)
        if not self.kind.keeps_slices:
            self.disk.pop(slice_, None)
        self.exits += not self.slices
        self._tally.stops += 1
        if holding.is_download and not holding.served:
            self._tally.wasted_downloads += 1

    def _drained(self, slice_: Slice) -> None:
        self.draining.pop(slice_, None)
        if not self.slices and not self.draining:
            self.disconnect()

    # ------------------------------------------------------------------ serving

    def find(self, layer: int, first: int, last: int) -> tuple[Slice, Holding] | None:
        """The slice that serves these experts, if one does."""
        for held in (self.slices, self.draining):
            for slice_, holding in held.items():
                if slice_.layer == layer and slice_.begin <= first and last < slice_.end:
                    return slice_, holding
        return None

    def layers_s(self, distinct: int, rows: int, layers: int) -> float:
        """How long it computes so many layers' calls of so many experts and rows."""
        kind = self.kind
        once_s = kind.per_expert_s * distinct + kind.per_row_s * rows
        for factor in self.slower:
            once_s *= factor
        return layers * once_s

    def travel_ns(self, layers: int, size: int) -> int:
        """How long calls and answers of so many layers travel; `size` bytes go each way."""
        kind, now = self.kind, self.env.now
        travel = layers * 2 * nanos(kind.link.latency_s)
        if kind.jitter_s:
            travel += nanos(layers * self._chance.expovariate(1 / kind.jitter_s))
        return travel + self._in.send(size, now) + self._out.send(size, now)

    def queue_ns(self, work_ns: int) -> int:
        """Give its own cores work; how long until that is done, after what it has already."""
        now = self.env.now
        self._free_at = max(self._free_at, now) + work_ns
        return self._free_at - now

    def queue_on(self, cores: Cores, work_ns: int, then: Callable[[], None]) -> None:
        """Give it work to do on cores that others use too, after what it has already."""
        self._queued.append((work_ns, then))
        if len(self._queued) == 1:
            self._compute_next(cores)

    def _compute_next(self, cores: Cores) -> None:
        work_ns, then = self._queued[0]

        def done() -> None:
            self._queued.popleft()
            if self._queued:
                self._compute_next(cores)
            then()

        cores.compute(work_ns, done)

    def _later(self, delay_ns: int, call: Callable[[], None]) -> None:
        life = self.life
        after(self.env, Nanos(delay_ns), lambda: call() if self.life == life else None)


def _overlaps(one: Slice, other: Slice) -> bool:
    return one.layer == other.layer and one.begin < other.end and other.begin < one.end
