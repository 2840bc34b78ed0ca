"""The bridge's end of all lines: control to every stage, submissions to the head, results back.

Hidden states have no business here: the head's edge carries token ids, the tail's edge sampled
tokens, and `traffic` counts every byte by kind (law R16). One thread, the engine's, uses it.
"""

import logging
import os
import select
from collections import deque
from dataclasses import dataclass, field

import zmq

from kvasir_core.plan import Plan
from kvasir_core.units import Epoch
from kvasir_rt import frames, wire
from kvasir_rt.agent import hello, monotonic
from kvasir_rt.crew import Crew
from kvasir_rt.link import (
    CONTROL_DOMAIN,
    Admission,
    CurveKeys,
    Inbox,
    Outlet,
    Traffic,
)
from kvasir_rt.member import CrewOptions, Loss
from kvasir_rt.ring_errors import RingDown, WireError
from kvasir_rt.socket_directory import SocketDirectory
from kvasir_rt.stage import StageConfig
from kvasir_rt.supervisor import Supervisor

STOP_LINGER_MS = 500  # So that stages elsewhere hear that they may leave.
BRIDGE = -1  # The head's upstream in a greeting.

log = logging.getLogger("kvasir.ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class LineOptions:
    """How the processes of the ring reach each other.

    Attributes:
        crew: The ring's fixed facts.
        listen: `tcp://HOST:PORT` for stages that join; None keeps everything on this host in
            sockets of a private directory.
        keys: The bridge's CURVE keys; needed with `listen`.
        pin: Each local stage on its own core, with one compute thread.
        threads: Compute threads of a local stage; None shares the cores out.
    """

    crew: CrewOptions
    listen: str | None = None
    keys: CurveKeys | None = None
    pin: bool = False
    threads: int | None = None


def threads_of(plan: Plan) -> int:
    """Compute threads of each stage: the cores are shared out, or all would wait for each other."""
    return max(1, len(os.sched_getaffinity(0)) // plan.stages)


@dataclass(slots=True)
class Turn:
    """What one round of polling brought, in order of arrival per kind."""

    results: list[tuple[wire.Result, memoryview]] = field(default_factory=list)
    releases: list[wire.Release] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    became_wired: bool = False
    is_check_due: bool = False  # Now and then, for watchdogs.


class Switchboard:
    """Sockets, crew and credits of the bridge."""

    def __init__(self, options: LineOptions) -> None:
        """Bind everything; nothing is spawned yet.

        Raises:
            JoinError: An address is taken.
        """
        self._options = options
        self._plan: Plan = options.crew.plan
        self._digest = self._plan.digest
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._directory = SocketDirectory()
        self._context: zmq.Context[zmq.SyncSocket] = zmq.Context()
        self._admission = Admission(self._context) if options.keys is not None else None
        self.traffic = Traffic()
        try:
            self._control = Inbox(
                self._context,
                options.listen or f"ipc://{self._directory.path}/control",
                wire.CONTROL_BYTES_MAX,
                options.keys,
                CONTROL_DOMAIN,
            )
            self._control.socket.linger = STOP_LINGER_MS
            self._results = Inbox(
                self._context,
                self._local_endpoint("results"),
                frames.result_frame_max(self._plan),
                options.keys,
            )
        except BaseException:
            self._close_sockets()
            raise
        threads = 1 if options.pin else options.threads or threads_of(self._plan)
        self._supervisor = Supervisor(self._configure, threads)
        self.crew = Crew(
            options.crew, self._control, self._supervisor, self.traffic, wiring_of=self._wiring_of
        )
        self._head: Outlet | None = None
        self._tail_peer: bytes | None = None
        self._credits: int | None = 0
        self._queue: deque[wire.Lap | wire.Release] = deque()
        self._is_head_ready = False
        self._hears_head = False
        self._head_fault = ""  # What it sent that it must not.
        self._was_wired = False
        self._submitted: dict[int, int] = {}
        self._children: set[int] = set()  # Their pidfds.
        self._stamps_due = frames.STAMPS * self._plan.stages
        self._spent_due = frames.SPENT * self._plan.stages * bool(options.crew.overlap)
        self._poller = zmq.Poller()
        for source in (self._wake_fd, self._control.socket, self._results.socket):
            self._poller.register(source, zmq.POLLIN)
        if self._admission is not None:
            self._poller.register(self._admission.socket, zmq.POLLIN)

    @property
    def endpoint(self) -> str:
        """Where stages join."""
        return self._control.endpoint

    def wake(self) -> None:
        """End a `turn` early; safe from any thread."""
        os.eventfd_write(self._wake_fd, 1)

    # ------------------------------------------------------------------ who is where

    def _local_endpoint(self, name: str) -> str:
        listen = self._options.listen
        if listen is None:
            return f"ipc://{self._directory.path}/{name}"
        return f"{listen.rpartition(':')[0]}:*"

    def _configure(self, stage: int) -> StageConfig:
        options = self._options
        cores = sorted(os.sched_getaffinity(0))
        return StageConfig(
            control=self._control.endpoint,
            secret=options.crew.secret,
            stage=stage,
            listen=self._local_endpoint(f"stage{stage}"),
            parent=os.getpid(),
            bridge_key=options.keys.public.decode() if options.keys is not None else "",
            core=cores[stage % len(cores)] if options.pin else None,
        )

    def _wiring_of(self, stage: int) -> wire.Wiring:
        members, keys = self.crew.members, self._options.keys
        is_tail = stage == len(members) - 1
        bridge_key = keys.public if keys is not None else b""
        before = members[stage - 1].join if stage else None
        after = None if is_tail else members[stage + 1]
        if self._admission is not None and is_tail:
            tail = members[stage].join
            self._admission.upstream_key = tail.client_key if tail is not None else b""
        return wire.Wiring(
            epoch=self.crew.epoch,
            upstream_key=before.client_key if before is not None else bridge_key,
            next_endpoint=after.endpoint if after is not None else self._results.endpoint,
            next_key=after.join.server_key if after is not None and after.join else bridge_key,
        )

    # ------------------------------------------------------------------ one round

    def turn(self, wait_ms: int) -> Turn:
        """Wait for something to happen, but not longer, and take it all in.

        Raises:
            RingDown: The ring cannot go on.
        """
        turn = Turn()
        self._listen_to_head()
        ready = dict(self._poller.poll(wait_ms))
        if self._wake_fd in ready:
            os.eventfd_read(self._wake_fd)
        if self._admission is not None and self._admission.socket in ready:
            self._admission.answer()
        if self._control.socket in ready:
            self.crew.hear()
        if self._head is not None:
            if self._head.socket in ready:
                self._flush()
            if self._head.monitor in ready and self._head.was_disconnected():
                self.crew.note_broken_link(0)
        if self._results.socket in ready:
            try:
                self._hear_tail(turn)
            except WireError as error:
                turn.losses.append(Loss(self._plan.stages - 1, str(error), is_dead=True))
        if self._head is None and self.crew.is_listening:
            self._greet_head()
        if not self._was_wired and self._is_head_ready and self.crew.is_wired:
            self._was_wired = turn.became_wired = True
        is_urgent = not self._children.isdisjoint(ready)
        turn.is_check_due = is_urgent or self.crew.is_check_due
        if self._head_fault:
            turn.losses.append(Loss(0, self._head_fault, is_dead=True))
            self._head_fault = ""
        if turn.is_check_due:
            turn.losses += self.crew.check()
        return turn

    def _listen_to_head(self) -> None:
        """Credits wake us only when something waits for them; else `_flush` picks them up."""
        wanted = bool(self._queue) or not self._is_head_ready
        if self._head is not None and wanted != self._hears_head:
            self._hears_head = wanted
            self._poller.register(self._head.socket, zmq.POLLIN if wanted else 0)

    def _greet_head(self) -> None:
        head = self.crew.members[0]
        assert head.join is not None
        self._head = Outlet(
            self._context,
            head.endpoint,
            frames.header_bytes_max(self._plan),
            self._options.keys,
            head.join.server_key,
        )
        self._hears_head = False
        self._poller.register(self._head.monitor, zmq.POLLIN)
        self._head.send(wire.encode(self._hello(BRIDGE)))

    def _hello(self, sender: int) -> wire.Hello:
        return hello(self._plan, self._digest, self._options.crew.dtype, sender, self.crew.epoch)

    def _hear_head(self, head: Outlet) -> None:
        """Take in the welcome, and as many credits as are needed now."""
        while not (self._credits and self._is_head_ready):
            if (frame := head.receive(is_due=True)) is None:
                return
            self.traffic.add("in", "credit", len(frame))
            match wire.decode_edge(frame):
                case wire.Welcome(epoch, count) | wire.Credit(epoch, count):
                    if epoch == self.crew.epoch:
                        self._is_head_ready = True
                        self._credits = (
                            None
                            if count is None or self._credits is None
                            else self._credits + count
                        )
                case wire.Refusal(why):
                    raise RingDown(f"the head refused the bridge: {why}")
                case other:
                    raise WireError(f"the head sent {type(other).__name__.lower()}")

    def _hear_tail(self, turn: Turn) -> None:
        """Take in one message: where more wait, the next poll says so at once."""
        tail = self._plan.stages - 1
        if (message := self._results.receive(is_there=True)) is not None:
            said = wire.decode_edge(message.header)
            body = message.body if message.body is not None else memoryview(b"")
            self.traffic.add("in", type(said).__name__.lower(), len(message.header), len(body))
            if isinstance(said, wire.Hello):
                why = frames.check_hello(said, self._hello(tail))
                if why:
                    self._results.send(message.peer, wire.Refusal(why))
                else:
                    self._tail_peer = message.peer
                    self._results.send(message.peer, wire.Welcome(self.crew.epoch, None))
            elif message.peer != self._tail_peer:
                return
            elif isinstance(said, wire.Result):
                shape = len(said.stamps), len(said.spent), said.body_bytes
                if shape != (self._stamps_due, self._spent_due, len(body)):
                    raise WireError(f"the result of micro-batch {said.id} has a wrong shape")
                turn.results.append((said, body))
            elif isinstance(said, wire.Release):
                turn.releases.append(said)

    # ------------------------------------------------------------------ orders

    def submit(self, message: wire.Lap | wire.Release) -> None:
        """Queue for the head, behind what is queued already."""
        self._queue.append(message)
        self._flush()

    def take_submitted(self, micro_batch: int) -> int:
        """When a micro-batch of this epoch got the head's slot; each may be asked for once.

        Raises:
            WireError: It did not get one.
        """
        submitted = self._submitted.pop(micro_batch, None)
        if submitted is None:
            raise WireError(f"a result came for micro-batch {micro_batch} before the head got it")
        return submitted

    def _flush(self) -> None:
        if self._head is None:
            return
        try:
            if not self._queue:
                self._hear_head(self._head)
            while self._queue and self._has_slot_for(self._queue[0], self._head):
                message = self._queue.popleft()
                header = wire.encode(message)
                self.traffic.add("out", type(message).__name__.lower(), len(header))
                self._head.send(header)
        except WireError as error:
            self._head_fault = str(error)

    def _has_slot_for(self, message: wire.Lap | wire.Release, head: Outlet) -> bool:
        """Whether the head may be sent this now; a micro-batch uses up a credit."""
        if isinstance(message, wire.Release):
            return True
        self._hear_head(head)
        if self._credits == 0:
            return False
        if self._credits is not None:
            self._credits -= 1
        self._submitted[message.micro_batch.id] = monotonic()
        return True

    def begin_epoch(self, epoch: Epoch) -> None:
        """Drop everything older and start the barrier; absent local stages are spawned."""
        self._queue.clear()
        self._submitted.clear()
        self._credits = 0
        self._tail_peer = None
        self._is_head_ready = self._was_wired = False
        if self._head is not None:
            if self._hears_head:
                self._poller.unregister(self._head.socket)
            self._poller.unregister(self._head.monitor)
            self._head.close()
            self._head = None
        self.crew.begin_epoch(epoch)
        for child in self.crew.spawn_absent():
            self._poller.register(child.pidfd, select.POLLIN)
            self._children.add(child.pidfd)

    def lose(self, loss: Loss) -> str:
        """Take a lost stage out. Raises RingDown after too many."""
        child = self._supervisor.children.get(loss.stage)
        if loss.is_dead and child is not None:
            self._poller.unregister(child.pidfd)
            self._children.discard(child.pidfd)
        return self.crew.lose(loss)

    def close(self, why: str = "") -> None:
        """Ask all stages to leave, end those that do not, and remove what is left."""
        self.crew.stop(why)
        self._supervisor.close()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for name in ("_control", "_results", "_head", "_admission"):
            link = getattr(self, name, None)
            if link is not None:
                link.close()
        self._context.term()
        os.close(self._wake_fd)
        self._directory.close()
