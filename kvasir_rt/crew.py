"""The ring's stages as the bridge sees them: who has joined, who is alive, who knows which epoch.

Every epoch, the first too, begins with the same barrier, each step waiting for all stages:
loaded -> idle (nothing older is left) -> listening -> wired (the next stage has answered). A stage
is lost when its process ends (pidfd), its beats stop (also while it is only stopped), it computes
one micro-batch far too long, it says so itself, or the connection to its upstream breaks.
"""

import hmac
import logging
import time
from collections import deque
from collections.abc import Callable

from kvasir_core.units import Epoch
from kvasir_rt import wire
from kvasir_rt.agent import boot_id
from kvasir_rt.link import Inbox, Traffic
from kvasir_rt.member import HOLD_FLOOR_NS, CrewOptions, Loss, Member, Spare, Step
from kvasir_rt.ring_errors import RingDown, WireError
from kvasir_rt.supervisor import StageProcess, Supervisor

PULSE_NS = 500_000_000
LOADING_SILENCE_NS = 15_000_000_000  # Of remote ones; loading may keep an agent from speaking.
SPARES_MAX = 16  # Joined before there was a place for them; they take the next one.
CHECK_NS = 50_000_000
PAUSE_NS = 700_000_000  # The bridge itself stood still for longer: nobody else is to blame.
WIRING_NS = 5_000_000_000
LINK_GRACE_NS = 200_000_000  # A broken link is mostly a dead process, which pidfd names better.

log = logging.getLogger("kvasir.ring")


class Crew:
    """The members, their control lines and the barrier."""

    def __init__(
        self,
        options: CrewOptions,
        control: Inbox,
        supervisor: Supervisor,
        traffic: Traffic,
        *,
        wiring_of: Callable[[int], wire.Wiring],
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Nobody is here yet.

        Args:
            options: The ring's fixed facts.
            control: Where stages report.
            supervisor: Who spawns the local ones.
            traffic: Counts control bytes.
            wiring_of: The neighbours of a stage in this epoch.
            clock: Monotonic nanoseconds.
        """
        self.options = options
        self._clock = clock
        self.members = [
            Member(stage, stage not in options.remote) for stage in range(options.plan.stages)
        ]
        self.epoch = Epoch(0)
        self.say: Callable[[str], object] = log.info  # Told in a sentence who has got further.
        self._control = control
        self._supervisor = supervisor
        self._traffic = traffic
        self._wiring_of = wiring_of
        self._by_peer: dict[bytes, Member] = {}
        self._spares: dict[bytes, Spare] = {}
        self._boot = boot_id()
        self._losses: deque[int] = deque()
        self._next_pulse = 0
        self._checked_ns = self._clock()
        self._found: list[Loss] = []
        self._has_been_up = False

    # ------------------------------------------------------------------ life

    def spawn_absent(self) -> list[StageProcess]:
        """Spawn every local stage that has no process; returns the new ones."""
        spawned = []
        for member in self.members:
            if member.is_local and member.stage not in self._supervisor.children:
                spawned.append(self._supervisor.spawn(member.stage))
                member.since_ns = self._clock()
        return spawned

    def begin_epoch(self, epoch: Epoch) -> None:
        """All that are here drop what is older."""
        self.epoch = epoch
        for member in self.members:
            member.link_broken_ns = None
            if member.step >= Step.LOADED:
                self._enter(member, Step.LOADED)
                self._send(member, wire.NewEpoch(epoch))

    def lose(self, loss: Loss) -> str:
        """Remove a dead stage's process and make room for its successor.

        Returns:
            How the process ended, for people.

        Raises:
            RingDown: There were too many losses, or the ring has never been up.
        """
        member = self.members[loss.stage]
        why = loss.why
        if loss.is_dead:
            self._by_peer.pop(member.peer, None)
            if member.stage in self._supervisor.children:
                pid = self._supervisor.children[member.stage].pid
                how = self._supervisor.end(member.stage)
                why = f"{why} (process {pid}: {how})"
            elif member.step > Step.ABSENT:
                self._control.send(member.peer, wire.Stop(why, may_rejoin=True))
            restarts = member.restarts + 1
            holds = member.holds
            member = Member(member.stage, member.is_local, restarts=restarts, holds=holds)
            member.since_ns = self._clock()
            self.members[loss.stage] = member
        if not self._has_been_up:
            raise RingDown(f"stage {loss.stage} did not start: {why}")
        now = self._clock()
        window_ns = int(self.options.restart_window_s * 1e9)
        self._losses.append(now)
        while self._losses[0] < now - window_ns:
            self._losses.popleft()
        if len(self._losses) > self.options.restarts_max:
            raise RingDown(
                f"gave up: {len(self._losses)} stages were lost within "
                f"{self.options.restart_window_s:g} s (at most {self.options.restarts_max} are "
                f"replaced); the last was stage {loss.stage}: {why}"
            )
        return why

    def stop(self, why: str = "") -> None:
        """Ask everybody to leave."""
        for peer in (*self._by_peer, *self._spares):
            self._control.send(peer, wire.Stop(why, may_rejoin=False))

    @property
    def is_wired(self) -> bool:
        """Whether every stage has completed the barrier of this epoch."""
        is_up = all(member.step is Step.WIRED for member in self.members)
        self._has_been_up |= is_up
        return is_up

    @property
    def is_listening(self) -> bool:
        """Whether the head takes connections for this epoch."""
        return all(member.step >= Step.LISTENING for member in self.members)

    # ------------------------------------------------------------------ what stages say

    def hear(self) -> None:
        """Take in all control messages that wait."""
        while (message := self._control.receive()) is not None:
            self._traffic.add("in", "control", len(message.header))
            try:
                said = wire.decode_to_bridge(message.header)
            except WireError as error:
                log.warning("dropped a control message: %s", error)
                continue
            if isinstance(said, wire.Join):
                self._admit(message.peer, said)
                continue
            member = self._by_peer.get(message.peer)
            if member is not None:
                member.heard_ns = self._clock()
                self._take_in(member, said)
            elif message.peer in self._spares:
                self._spares[message.peer].heard_ns = self._clock()
            else:  # It was cut off and is not one of us any more, but does not know.
                stop = wire.Stop("the ring has gone on without this stage", may_rejoin=True)
                self._control.send(message.peer, stop)

    def _admit(self, peer: bytes, join: wire.Join) -> None:
        why = ""
        member: Member | None = None
        if not hmac.compare_digest(join.secret.encode(), self.options.secret.encode()):
            why = "the token is not this ring's"
        elif join.protocol != wire.PROTOCOL:
            why = f"protocol version differs: yours is {join.protocol}, here it is {wire.PROTOCOL}"
        else:
            member = self._vacancy(join.stage)
            why = self._why_unfit(join)
        if not why and member is None and join.stage is None and len(self._spares) < SPARES_MAX:
            self._spares[peer] = Spare(join, self._clock())
            log.info("a stage from %s waits for a place", join.host)
            return
        if why or member is None:
            why = why or "no stage of this ring is vacant for you"
            log.warning("refused a stage from %s: %s", join.host, why)
            self._control.send(peer, wire.Stop(why, may_rejoin=False))
            return
        member.peer, member.join = peer, join
        member.heard_ns = self._clock()
        self._by_peer[peer] = member
        self._enter(member, Step.LOADING)
        options = self.options
        self._send(
            member,
            wire.Assign(
                protocol=wire.PROTOCOL,
                plan=options.plan,
                digest=options.plan.digest,
                stage=member.stage,
                dtype=options.dtype,
                compute=options.compute,
            ),
        )
        if member.slowdown != 1:
            self._send(member, wire.Slow(member.slowdown))

    def slow(self, stage: int, factor: float) -> None:
        """Have a stage hold micro-batches so many times as long; a successor does so too."""
        member = self.members[stage]
        member.slowdown = factor
        if member.step is not Step.ABSENT:
            self._send(member, wire.Slow(factor))

    def _why_unfit(self, join: wire.Join) -> str:
        compute = self.options.compute
        if join.stage is not None:
            return ""
        if not self.options.remote:
            return "this ring takes no stages from elsewhere"
        if isinstance(compute, wire.ModelSpec) and join.sha256 != compute.sha256:
            return f"model file differs: yours is {join.sha256}, the plan's is {compute.sha256}"
        return ""

    def _fill_vacancies(self, now: int) -> None:
        """Spares that are still alive take the places that have become free."""
        for peer, spare in list(self._spares.items()):
            if now - spare.heard_ns > self.options.silence_s * 1e9:
                del self._spares[peer]
            elif self._vacancy(None) is not None:
                del self._spares[peer]
                self._admit(peer, spare.join)

    def _vacancy(self, wanted: int | None) -> Member | None:
        for member in self.members:
            fits = member.is_local if wanted is not None else not member.is_local
            if member.step is Step.ABSENT and fits and wanted in {None, member.stage}:
                return member
        return None

    def _take_in(self, member: Member, said: wire.ToBridge) -> None:
        match said:
            case wire.Loaded(digest, endpoint, resident_bytes):
                if digest != self.options.plan.digest:
                    self._report(member, f"it loaded plan {digest}", is_dead=True)
                    return
                member.endpoint, member.resident_bytes = endpoint, resident_bytes
                self._enter(member, Step.LOADED)
                self._send(member, wire.NewEpoch(self.epoch))
                start, stop = self.options.plan.layers[member.stage]
                self.say(
                    f"stage {member.stage} holds layers [{start}, {stop}) in "
                    f"{resident_bytes >> 20} MiB (process {member.pid})"
                )
            case wire.Idle(epoch):
                self._advance(member, epoch, Step.IDLE)
            case wire.Listening(epoch):
                self._advance(member, epoch, Step.LISTENING)
            case wire.Wired(epoch):
                self._advance(member, epoch, Step.WIRED)
            case wire.Echo(bridge_ns, stage_ns):
                self._set_clock(member, bridge_ns, stage_ns)
            case wire.Beat():
                member.beat = said
            case wire.LinkLost(epoch):
                if epoch == self.epoch:
                    self.note_broken_link((member.stage + 1) % len(self.members))
            case wire.Failed(why):
                self._report(member, why, is_dead=True)
            case wire.Join():
                raise AssertionError("a Join is admitted, not taken in")

    def note_broken_link(self, stage: int) -> None:
        """The connection that leads to this stage broke; maybe the stage died, maybe not."""
        self.members[stage].link_broken_ns = self._clock()

    def _advance(self, member: Member, epoch: Epoch, step: Step) -> None:
        if epoch != self.epoch or step != member.step + 1:
            return  # Said before it knew of this epoch.
        self._enter(member, step)
        if any(other.step < step for other in self.members):
            return
        if step is Step.IDLE:
            for other in self.members:
                self._send(other, self._wiring_of(other.stage))
        elif step is Step.LISTENING:
            for other in self.members:
                self._send(other, wire.Connect(self.epoch))

    def _set_clock(self, member: Member, bridge_ns: int, stage_ns: int) -> None:
        """Half a round trip is the error; the quickest pulse before the first lap decides."""
        now = self._clock()
        if member.join is None or member.join.boot == self._boot or member.step is Step.WIRED:
            return
        if now - bridge_ns < member.round_trip_ns:
            member.round_trip_ns = now - bridge_ns
            member.clock_offset_ns = stage_ns - (bridge_ns + now) // 2

    # ------------------------------------------------------------------ who is alive

    @property
    def is_check_due(self) -> bool:
        return bool(self._found) or self._clock() - self._checked_ns >= CHECK_NS

    def check(self) -> list[Loss]:
        """Pulse, and find out who is lost since the last call."""
        now = self._clock()
        if now - self._checked_ns > PAUSE_NS:
            for member in self.members:  # We stood still, so we could not hear them.
                member.heard_ns = member.since_ns = now
            for spare in self._spares.values():
                spare.heard_ns = now
        self._checked_ns = now
        for stage in self._supervisor.ended():
            self._report(self.members[stage], "its process ended", is_dead=True)
        for member in self.members:
            self._check_member(member, now)
        self._fill_vacancies(now)
        if now >= self._next_pulse:
            self._next_pulse = now + PULSE_NS
            for peer in (*self._by_peer, *self._spares):
                self._traffic.add("out", "control", self._control.send(peer, wire.Pulse(now)))
        found, self._found = self._found, []
        by_stage: dict[int, Loss] = {}
        for loss in found:
            known = by_stage.get(loss.stage)
            if known is None or (loss.is_dead and not known.is_dead):
                by_stage[loss.stage] = loss
        return list(by_stage.values())

    def _check_member(self, member: Member, now: int) -> None:
        since = now - member.since_ns
        if member.step is Step.ABSENT:
            limit_s = self.options.load_max_s if member.is_local else self.options.rejoin_max_s
            if since > limit_s * 1e9 and self._has_been_up:
                raise RingDown(f"stage {member.stage} did not come back within {limit_s:g} s")
        elif member.step is Step.LOADING:
            if since > self.options.load_max_s * 1e9:
                why = f"not loaded after {self.options.load_max_s:g} s"
                self._report(member, why, is_dead=True)
            elif not member.is_local and now - member.heard_ns > LOADING_SILENCE_NS:
                self._report(member, "silent while it loaded", is_dead=True)
        elif self._is_silent(member, now):
            self._report(member, f"silent for {(now - member.heard_ns) / 1e9:.1f} s", is_dead=True)
        elif member.step in {Step.IDLE, Step.LISTENING} and since > WIRING_NS:
            # From when the slowest had come as far: others may have loaded long before it.
            waited = now - max(other.since_ns for other in self.members)
            if waited > WIRING_NS and all(other.step >= Step.IDLE for other in self.members):
                why = f"its neighbours did not answer for {waited / 1e9:.1f} s"
                self._report(member, why, is_dead=True)
        elif (beat := member.beat) is not None and beat.epoch == self.epoch:
            limit_ns = HOLD_FLOOR_NS  # The least; what is below it needs no statistics.
            if beat.held_ns > limit_ns:
                limit_ns = member.hold_limit_ns(beat.rows)
            if beat.held_ns > limit_ns:
                self._report(
                    member,
                    f"micro-batch {beat.holding} is computed for "
                    f"{beat.held_ns / 1e9:.1f} s; {limit_ns / 1e9:.1f} s were allowed",
                    is_dead=True,
                )
        broken = member.link_broken_ns
        if broken is not None and now - broken > LINK_GRACE_NS:
            member.link_broken_ns = None
            self._report(member, "the connection to its upstream broke", is_dead=False)

    def _is_silent(self, member: Member, now: int) -> bool:
        """For too long. A process of this machine that others keep from its core gets more time."""
        silence_s, options = (now - member.heard_ns) / 1e9, self.options
        if silence_s <= options.silence_s:
            return False
        is_slow = member.is_local and self._supervisor.may_be_slow(member.stage)
        return not is_slow or silence_s > options.crowded_silence_s

    def _report(self, member: Member, why: str, *, is_dead: bool) -> None:
        self._found.append(Loss(member.stage, why, is_dead))

    def _enter(self, member: Member, step: Step) -> None:
        member.step = step
        member.since_ns = self._clock()

    def _send(self, member: Member, message: wire.ToStage) -> None:
        self._traffic.add("out", "control", self._control.send(member.peer, message))
